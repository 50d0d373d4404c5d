"""Rules that remove nodes from ONNX graphs: the same outputs, and the nodes that should be left."""

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from tokamix.export.simplify import simplify

# name: (input shape, shapes of constants, nodes, operators that are left)
CASES: dict[str, tuple[tuple[int, ...], dict[str, tuple[int, ...]], str, str]] = {
    "a Transpose of single axes": ((2, 1, 3), {}, "a = Transpose<perm=[1, 0, 2]>(x) y = Softmax(a)", "Reshape Softmax"),
    "a Transpose that moves data": (
        (2, 3, 1),
        {},
        "a = Transpose<perm=[1, 0, 2]>(x) y = Softmax(a)",
        "Transpose Softmax",
    ),
    "Reshapes that undo each other": (
        (2, 3, 4),
        {"s": (2, 12), "t": (2, 3, 4)},
        "a = Reshape(x, s) b = Reshape(a, t) y = Relu(b)",
        "Relu",
    ),
    "a function between Transposes": (
        (2, 3, 4),
        {},
        "a = Transpose<perm=[1, 2, 0]>(x) b = Gelu(a) c = Transpose<perm=[2, 0, 1]>(b) y = Abs(c)",
        "Gelu Abs",
    ),
    "a function between other Transposes": (
        (2, 3, 4),
        {},
        "a = Transpose<perm=[1, 2, 0]>(x) b = Gelu(a) c = Transpose<perm=[1, 2, 0]>(b) y = Abs(c)",
        "Transpose Gelu Transpose Abs",
    ),
    "one index of an axis": (
        (3, 2, 4),
        {"i": (1,), "j": (2,), "axis": (0,)},
        "a = Slice(x, i, j, axis) b = Squeeze(a, axis) y = Abs(b)",
        "Gather Abs",
    ),
    "two indices of an axis": (
        (3, 2, 4),
        {"i": (1,), "j": (3,), "axis": (0,)},
        "a = Slice(x, i, j, axis) y = Abs(a)",
        "Slice Abs",
    ),
    "indices as a matrix": (
        (2, 2),
        {"W": (5, 3), "flat": (4,), "s": (2, 2, 3)},
        "n = Cast<to=7>(x) i = Reshape(n, flat) a = Gather<axis=0>(W, i) b = Reshape(a, s) y = Abs(b)",
        "Cast Gather Abs",
    ),
    "constant indices of an axis": (
        (2, 5, 3),
        {"i": (4, 0, 1, 1), "s": (2, 2, 2, 3)},
        "a = Gather<axis=1>(x, i) b = Reshape(a, s) y = Abs(b)",
        "Gather Abs",
    ),
    "gathered rows that are reshaped": (
        (2, 5, 3),
        {"i": (4, 0), "s": (2, 6)},
        "a = Gather<axis=1>(x, i) b = Reshape(a, s) y = Softmax(b)",
        "Gather Reshape Softmax",
    ),
    "queries, keys and values": (
        (1, 3, 12),
        {"s": (1, 3, 3, 2, 2), "i": (0,), "j": (1,), "k": (2,), "l": (3,), "axis": (0,)},
        "c = Reshape(x, s) d = Transpose<perm=[2, 0, 3, 1, 4]>(c) e = Slice(d, i, j, axis) q = Squeeze(e, axis)"
        " f = Slice(d, j, k, axis) m = Squeeze(f, axis) g = Slice(d, k, l, axis) v = Squeeze(g, axis)"
        " a = Sub(v, q) y = Div(a, m)",
        "Reshape Transpose Split Sub Div",
    ),
    "a norm between tokens and rows": (
        (1, 4, 3, 2),
        {"G": (4,), "B": (4,), "W": (4, 5), "D": (5,), "s": (1, 4, 6), "r": (6, 4)},
        "a = Reshape(x, s) b = Transpose<perm=[0, 2, 1]>(a) n = LayerNormalization<axis=-1>(b, G, B)"
        " c = Reshape(n, r) y = Gemm(c, W, D)",
        "Reshape Transpose LayerNormalization Reshape Gemm",
    ),
    "Transposes that undo each other": (
        (2, 3, 4),
        {},
        "a = Transpose<perm=[1, 2, 0]>(x) b = Transpose<perm=[2, 0, 1]>(a) c = Abs(a) d = Transpose<perm=[2, 0, 1]>(c)"
        " y = Add(b, d)",
        "Abs Add",
    ),
    "a norm that two linear layers read": (
        (4, 3),
        {"G": (3,), "B": (3,), "W": (3, 5), "D": (5,), "V": (3, 5), "E": (5,)},
        "n = LayerNormalization<axis=-1>(x, G, B) a = Gemm(n, W, D) b = Gemm(n, V, E) y = Add(a, b)",
        "LayerNormalization Gemm Gemm Add",
    ),
    "a norm that others read as well": (
        (4, 3),
        {"G": (3,), "B": (3,), "W": (3, 3), "D": (3,)},
        "n = LayerNormalization<axis=-1>(x, G, B) a = Gemm(n, W, D) y = Add(a, n)",
        "LayerNormalization Gemm Add",
    ),
    "a norm in front of a linear layer without bias": (
        (4, 3),
        {"G": (3,), "B": (3,), "W": (3, 5)},
        "n = LayerNormalization<axis=-1>(x, G, B) y = MatMul(n, W)",
        "LayerNormalization MatMul",
    ),
    "a norm in front of transposed weights": (
        (4, 3),
        {"G": (3,), "B": (3,), "W": (5, 3), "D": (5,)},
        "n = LayerNormalization<axis=-1>(x, G, B) y = Gemm<transB=1>(n, W, D)",
        "LayerNormalization Gemm",
    ),
    "a new leading axis": (
        (6, 20),
        {"s": (6, 4, 5), "t": (1, 6, 5, 4)},
        "a = Reshape(x, s) b = Transpose<perm=[0, 2, 1]>(a) c = Reshape(b, t) y = Softmax(c)",
        "Reshape Transpose Softmax",
    ),
    "the same Reshape twice": (
        (2, 6),
        {"s": (3, 4), "t": (3, 4)},
        "a = Softmax(x) b = Reshape(a, s) c = Reshape(a, t) d = Softmax(b) y = Add(c, d)",
        "Softmax Reshape Softmax Add",
    ),
    "transposed keys": (
        (2, 3, 4, 5),
        {"s": (6, 4, 5), "t": (2, 3, 5, 4)},
        "a = Reshape(x, s) b = Transpose<perm=[0, 2, 1]>(a) c = Reshape(b, t) y = Abs(c)",
        "Transpose Abs",
    ),
    "a linear layer on tokens": (
        (2, 3, 4),
        {"W": (4, 5), "B": (5,)},
        "a = MatMul(x, W) b = Add(a, B) y = Relu(b)",
        "Reshape Gemm Reshape Relu",
    ),
    "a residual block in rows": (
        (3, 3, 4),
        {"W": (4, 4), "B": (4,), "G": (4,)},
        "n = LayerNormalization<axis=-1>(x, G, B) a = MatMul(n, W) b = Add(a, B) c = Add(x, b) d = Gelu(c)"
        " e = MatMul(d, W) f = Add(e, B) h = Add(c, f) y = Softmax(h)",
        "Reshape LayerNormalization Gemm Add Gelu Gemm Add Reshape Softmax",
    ),
    "a residual block in few rows, with which OpenVINO crashes": (
        (2, 3, 4),
        {"W": (4, 4), "B": (4,), "G": (4,)},
        "n = LayerNormalization<axis=-1>(x, G, B) a = MatMul(n, W) b = Add(a, B) c = Add(x, b) d = Gelu(c)"
        " e = MatMul(d, W) f = Add(e, B) h = Add(c, f) y = Softmax(h)",
        "LayerNormalization Reshape Gemm Reshape Add Gelu Reshape Gemm Reshape Add Softmax",
    ),
    "a norm of a map": (
        (2, 3, 4, 5),
        {"G": (5,), "B": (5,)},
        "a = Relu(x) n = LayerNormalization<axis=-1, epsilon=0.01>(a, G, B) y = Softmax(n)",
        "Relu Reshape LayerNormalization Reshape Softmax",
    ),
    "layer scale": (
        (2, 3, 4),
        {"W": (4, 5), "B": (5,), "G": (5,)},
        "a = MatMul(x, W) b = Add(a, B) c = Mul(b, G) y = Relu(c)",
        "Reshape Gemm Reshape Relu",
    ),
    "layer scale after a convolution": (
        (1, 2, 4, 4),
        {"W": (3, 2, 1, 1), "B": (3,), "G": (3,)},
        "a = Conv(x, W, B) b = Transpose<perm=[0, 2, 3, 1]>(a) c = Mul(b, G) y = Abs(c)",
        "Conv Transpose Abs",
    ),
    "a scale of the wrong axis": (
        (2, 5, 4),
        {"W": (4, 5), "B": (5,), "G": (5, 1)},
        "a = MatMul(x, W) b = Add(a, B) c = Mul(b, G) y = Relu(c)",
        "Reshape Gemm Reshape Mul Relu",
    ),
    "a scale of one reader": (
        (2, 3, 4),
        {"W": (4, 5), "G": (5,)},
        "a = MatMul(x, W) b = Mul(a, G) y = Add(a, b)",
        "MatMul Mul Add",
    ),
    "the scale of the queries": (
        (1, 3, 4),
        {"W": (4, 12), "B": (12,), "G": (1,), "s": (1, 3, 3, 2, 2), "i": (0,), "j": (1,), "k": (2,), "axis": (0,)},
        "a = MatMul(x, W) b = Add(a, B) c = Reshape(b, s) d = Transpose<perm=[2, 0, 3, 1, 4]>(c)"
        " e = Slice(d, i, j, axis) q = Squeeze(e, axis) f = Slice(d, j, k, axis) v = Squeeze(f, axis)"
        " g = Mul(q, G) y = Add(g, v)",
        "Reshape Gemm Reshape Transpose Gather Gather Add",
    ),
    "tokens in another order between Reshapes": (
        (6, 4),
        {"s": (1, 6, 4), "i": (5, 0, 2, 1, 4, 3), "t": (2, 3, 4)},
        "a = Reshape(x, s) b = Gather<axis=1>(a, i) c = Reshape(b, t) y = Abs(c)",
        "Gather Abs",
    ),
    "the same order of what two linear layers make": (
        (6, 4),
        {"W": (4, 5), "D": (5,), "V": (4, 5), "E": (5,), "i": (5, 0, 2, 1, 4, 3)},
        "n = Softmax(x) a = Gemm(n, W, D) b = Gelu(a) c = Gather(b, i) d = Gemm(n, V, E) e = Gather(d, i)"
        " y = Mul(c, e)",
        "Softmax Gather Gemm Gelu Gemm Mul",
    ),
    "some rows of a linear layer": (
        (6, 4),
        {"W": (4, 5), "D": (5,), "i": (5, 0)},
        "a = Gemm(x, W, D) b = Gather(a, i) y = Abs(b)",
        "Gemm Gather Abs",
    ),
    "a norm of tokens that a linear layer reads as rows": (
        (1, 3, 4, 3),
        {"G": (3,), "B": (3,), "W": (3, 3), "D": (3,), "s": (1, 12, 3), "r": (12, 3)},
        "t = Transpose<perm=[0, 2, 1, 3]>(x) a = Reshape(t, s) n = LayerNormalization<axis=-1>(a, G, B)"
        " b = Reshape(n, r) c = Gemm(b, W, D) e = Reshape(t, r) f = Softmax(e) y = Sub(c, f)",
        "Transpose Reshape LayerNormalization Gemm Softmax Sub",
    ),
    "weights of single heads in front of a product": (
        (3, 4, 5),
        {"W": (1, 3, 5, 2), "s": (1, 3, 4, 5)},
        "a = Reshape(x, s) b = Softmax<axis=-1>(a) c = MatMul(b, W) y = Abs(c)",
        "Softmax MatMul Abs",
    ),
    "weights of channels": (
        (6, 4),
        {"s": (1, 6, 4), "W": (4, 4), "t": (1, 1, 4), "axes": (0,)},
        "a = MatMul(x, W) b = Reshape(a, s) m = ReduceMean<keepdims=1>(a, axes) w = Reshape(m, t) c = Mul(w, b)"
        " y = Softmax(c)",
        "MatMul ReduceMean Mul Reshape Softmax",
    ),
    "the scale of the queries of a convolution": (
        (1, 4, 3, 1),
        {"W": (12, 4, 1, 1), "B": (12,), "G": (1,), "s": (3, 4, 3, 1), "i": (0,), "j": (1,), "k": (2,), "axis": (0,)},
        "a = Conv(x, W, B) b = Reshape(a, s) c = Transpose<perm=[0, 2, 1, 3]>(b)"
        " e = Slice(c, i, j, axis) q = Squeeze(e, axis) f = Slice(c, j, k, axis) v = Squeeze(f, axis)"
        " g = Mul(q, G) y = Add(g, v)",
        "Conv Reshape Transpose Gather Gather Mul Add",
    ),
}


def create_model(shape: tuple[int, ...], constants: dict[str, tuple[int, ...]], nodes: str) -> onnx.ModelProto:
    """Capital names are weights of these shapes, others are these numbers."""
    dims = ",".join(map(str, shape))
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[{dims}] x) => (float[] y) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    for name, value in constants.items():
        array = rng.standard_normal(value).astype(np.float32) if name.isupper() else np.array(value, np.int64)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize("case", CASES)
def test_rules(case: str) -> None:
    shape, constants, nodes, left = CASES[case]
    before = create_model(shape, constants, nodes)
    model = onnx_ir.from_proto(before)
    simplify(model)
    assert [node.op_type for node in model.graph] == left.split()
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(run(onnx_ir.to_proto(model), x), run(before, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "folded"),
    [
        ("a norm that two linear layers read", True),
        ("a norm that others read as well", False),
        ("a norm in front of a linear layer without bias", False),
        ("a norm in front of transposed weights", False),
    ],
)
def test_norm_is_folded(case: str, folded: bool) -> None:
    shape, constants, nodes, _ = CASES[case]
    model = onnx_ir.from_proto(create_model(shape, constants, nodes))
    simplify(model)
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    scale = norm.inputs[1].const_value.numpy()
    assert (len(norm.inputs) == 2 and (scale == 1).all()) == folded
