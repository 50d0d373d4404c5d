"""Small reproductions of faults that tokamix works around: python benchmarks/onnx_faults.py.

For those of torch.onnx, what PyTorch gives and what ONNX Runtime gives at a size other than the traced one, or the
error. For that of OpenVINO, how a process ends that compiles the graph.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
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


COMPILE = """
import sys, openvino
core = openvino.Core()
core.compile_model(core.read_model(sys.argv[1]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
"""


def residual_rows(rows: int, width: int = 16) -> onnx.ModelProto:
    """a + Gemm(Gemm(a)) with a = x + y, as in a transformer's MLP with one row for each token."""
    helper, shape = onnx.helper, (rows, width)
    nodes = [
        helper.make_node("Add", ["x", "y"], ["a"]),
        helper.make_node("Gemm", ["a", "weight1", "bias1"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "weight2", "bias2"], ["mlp"]),
        helper.make_node("Add", ["a", "mlp"], ["out"]),
    ]
    sizes = {"weight1": (width, 2 * width), "bias1": (2 * width,), "weight2": (2 * width, width), "bias2": (width,)}
    weights = [onnx.numpy_helper.from_array(np.ones(size, np.float32), name) for name, size in sizes.items()]
    x, y, out = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y", "out"))
    graph = helper.make_graph(nodes, "residual", [x, y], [out], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def compile_in_openvino() -> None:
    """Print the exit codes of processes that compile `residual_rows`; -11 is a segmentation fault."""
    print(f"OpenVINO's compile_model: {residual_rows.__doc__}")
    for rows in (4, 5, 8, 16):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "residual.onnx"
            onnx.save(residual_rows(rows), str(path))
            process = subprocess.run([sys.executable, "-c", COMPILE, str(path)], capture_output=True)
        print(f"  {rows} rows: exit code {process.returncode}")


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
    compile_in_openvino()


if __name__ == "__main__":
    main()
