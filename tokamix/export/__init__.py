"""Export of trained models to ONNX, OpenVINO, torch.export, AOTInductor and ExecuTorch, each file checked."""

from typing import TYPE_CHECKING

from tokamix._lazy import attach

if TYPE_CHECKING:
    from tokamix.export.run import ExportReport, export

__all__ = ["ExportReport", "export"]
__getattr__, __dir__ = attach(__name__, {"run": ("ExportReport", "export")})
