"""One small exported classifier for the tests of this folder."""

from pathlib import Path

import pytest

from tokamix.export import ExportReport, export


@pytest.fixture(scope="session")
def onnx_report(classifier_run: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """The classifier run as an ONNX file that takes any batch; read-only."""
    return export(classifier_run, tmp_path_factory.mktemp("onnx") / "model.onnx", batch="dynamic")
