"""Small reproductions of the faults of torch.onnx that tokamix works around: python benchmarks/onnx_faults.py.

Each prints what PyTorch gives and what ONNX Runtime gives at a size other than the traced one, or the error.
"""

import io

import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RoundUp(nn.Module):
    """Pad to a multiple of 7 with -(-n // 7)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -(-x.shape[-1] // 7) * 7 - x.shape[-1]))


class AdaptivePool(nn.Module):
    """Average over a 3x3 grid of windows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 3)


class Largest(nn.Module):
    """The largest value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax()


def main() -> None:
    dim = torch.export.Dim.AUTO
    for model in (RoundUp(), AdaptivePool(), Largest()):
        print(f"{type(model).__name__}: {model.__doc__}")
        try:
            shapes = ({2: dim, 3: dim},)
            program = torch.onnx.export(
                model.eval(), (torch.randn(1, 2, 16, 20),), dynamic_shapes=shapes, dynamo=True, verbose=False
            )
            file = io.BytesIO()
            program.save(file)
            session = onnxruntime.InferenceSession(file.getvalue())
            for size in ((16, 20), (13, 31)):
                x = torch.randn(1, 2, *size)
                expected, (actual,) = model(x), session.run(None, {session.get_inputs()[0].name: x.numpy()})
                same = actual.shape == tuple(expected.shape)
                error = (torch.from_numpy(actual) - expected).abs().max() if same else f"shape {actual.shape}"
                print(f"  {size}: PyTorch {tuple(expected.shape)}, difference {error}")
        except Exception as error:
            print(f"  {type(error).__name__}: {str(error).splitlines()[0][:200]}")


if __name__ == "__main__":
    main()
