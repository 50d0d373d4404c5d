"""Fewer nodes in ONNX graphs: each rule removes what the exporter writes and no runtime needs.

Rules look at one node and what it reads. They need sizes that are numbers, so a graph of dynamic size keeps more nodes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tokamix.export.nodes import (
    add_constant,
    add_node,
    add_reshape,
    add_split,
    constant_of,
    count_uses,
    only_read_by,
    perm_of,
    producer_of,
    replace,
    reshape,
    shape_of,
)

# functions of single values, which commute with a Reshape or Transpose
ELEMENTWISE = ("Abs", "Erf", "Exp", "Gelu", "HardSwish", "Relu", "Sigmoid", "Sqrt", "Tanh")
# OpenVINO 2026.4 ends the process at a residual connection of so few rows around Gemms (benchmarks/onnx_faults.py)
FEW_ROWS = 8
Rule = Callable[[Any], bool]


def simplify(model: Any) -> None:
    """Apply all rules to an `onnx_ir.Model` in place until none changes anything."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            fixed = node.graph is not None and not any(value.is_graph_output() for value in node.outputs)
            changed |= fixed and any(rule(node) for rule in RULES.get(node.op_type, ()))
        RemoveUnusedNodesPass()(model)


def drop_identity(node: Any) -> bool:
    """Identity(x) -> x."""
    return replace(node, node.inputs[0])


def drop_transpose(node: Any) -> bool:
    """A Transpose that moves only axes of size 1 is a Reshape."""
    shape, perm = shape_of(node.inputs[0]), perm_of(node)
    moved = [axis for axis in perm if shape is None or shape[axis] != 1]
    return shape is not None and moved == sorted(moved) and reshape(node, node.inputs[0])


def merge_transposes(node: Any) -> bool:
    """Transpose(f(Transpose(x))) -> f(x), if the second Transpose undoes the first and f looks at single values.

    Without f, x.
    """
    function = node.inputs[0].producer()
    first = producer_of(node.inputs[0], "Transpose", uses=None)
    if first is None and function is not None and function.op_type in ELEMENTWISE and count_uses(node.inputs[0]) == 1:
        first = producer_of(function.inputs[0], "Transpose")
    if first is None or [perm_of(first)[axis] for axis in perm_of(node)] != sorted(perm_of(first)):
        return False
    plain = first is function
    return replace(node, first.inputs[0] if plain else add_node(node, function.op_type, [first.inputs[0]], function))


def to_reshape(node: Any) -> bool:
    """Squeeze and Unsqueeze are Reshapes, which merge with others."""
    return reshape(node, node.inputs[0])


def merge_reshapes(node: Any) -> bool:
    """Reshape(Reshape(x)) -> Reshape(x), and nothing if the shape is the same."""
    before = producer_of(node.inputs[0], "Reshape", uses=None)
    source = node.inputs[0] if before is None else before.inputs[0]
    if shape_of(source) is not None and shape_of(source) == shape_of(node.outputs[0]):
        return replace(node, source)
    return before is not None and reshape(node, source)


def unbind_to_gather(node: Any) -> bool:
    """Squeeze(Slice(x)) of one index, which `unbind` and `q, k, v = x` are translated to -> Gather."""
    cut = producer_of(node.inputs[0], "Slice")
    if cut is None or shape_of(cut.inputs[0]) is None or shape_of(node.outputs[0]) is None:
        return False
    start, stop, axis = (constant_of(value) for value in cut.inputs[1:4])
    if start is None or stop is None or axis is None or start.shape != (1,) or stop[0] - start[0] != 1:
        return False
    position = int(axis[0]) % len(shape_of(cut.inputs[0]) or ())
    if len(shape_of(node.outputs[0]) or ()) != len(shape_of(cut.inputs[0]) or ()) - 1:
        return False
    index = add_constant(node, np.int64(start[0]))
    return replace(node, add_node(node, "Gather", [cut.inputs[0], index], node, axis=position))


def gather_shaped(node: Any) -> bool:
    """Reshape(Gather(x, indices)) -> Gather(x, reshaped indices): Gather takes indices of any shape."""
    gather = producer_of(node.inputs[0], "Gather")
    if gather is None:
        return False
    axis, values = gather.attributes.get_int("axis", 0), constant_of(gather.inputs[1])
    flat = producer_of(gather.inputs[1], "Reshape", uses=None)
    data, out = shape_of(gather.inputs[0]), shape_of(node.outputs[0])
    if data is None or out is None or len(out) < len(data):
        return False
    indices = out[axis : len(out) - len(data) + axis + 1]
    if out != data[:axis] + indices + data[axis + 1 :]:
        return False
    if values is not None and values.size == math.prod(indices):
        source = add_constant(node, values.reshape(indices))
    elif flat is not None and shape_of(flat.inputs[0]) == indices:
        source = flat.inputs[0]
    else:
        return False
    return replace(node, add_node(node, "Gather", [gather.inputs[0], source], gather))


def gather_rows(node: Any) -> bool:
    """Gather of the tokens (1, N, ...) of one image between Reshapes -> of rows (N, ...): the Reshapes merge."""
    before, shape, out = producer_of(node.inputs[0], "Reshape"), shape_of(node.inputs[0]), shape_of(node.outputs[0])
    if before is None or shape is None or out is None or shape[0] != 1 or node.attributes.get_int("axis", 0) != 1:
        return False
    if not only_read_by(node.outputs[0], "Reshape"):
        return False
    rows = add_reshape(node, before.inputs[0], shape[1:])
    return reshape(node, add_node(node, "Gather", [rows, node.inputs[1]], node, shape=out[1:], axis=0))


def gather_early(node: Any) -> bool:
    """Rows of f(x) in another order -> f of the ordered rows, for layers that look at single rows and share x."""
    index, before = constant_of(node.inputs[1]), node.inputs[0].producer()
    shape = shape_of(node.inputs[0])
    if before is None or index is None or shape is None or len(shape) != 2 or index.shape != shape[:1]:
        return False
    if count_uses(node.inputs[0]) > 1 or node.attributes.get_int("axis", 0) != 0:
        return False
    others = [constant_of(value) for value in before.inputs[1:]]  # a bias of more axes may differ between rows
    linear = len(others) == 2 and all(value is not None for value in others) and others[1].ndim == 1
    linear &= before.op_type == "Gemm" and not before.attributes.get_int("transA", 0)
    if not (linear or before.op_type in ELEMENTWISE):
        return False
    source = shape_of(before.inputs[0])
    rows = add_node(node, "Gather", [before.inputs[0], node.inputs[1]], node, shape=source)
    return replace(node, add_node(node, before.op_type, [rows, *before.inputs[1:]], before, shape=shape))


def join_gathers(node: Any) -> bool:
    """The same rows gathered twice -> once."""
    index, axis = constant_of(node.inputs[1]), node.attributes.get_int("axis", 0)
    same = {use.node for use in node.inputs[0].uses() if use.node.op_type == "Gather" and use.idx == 0}
    same = {other for other in same if other.attributes.get_int("axis", 0) == axis}
    same = {other for other in same if index is not None and np.array_equal(constant_of(other.inputs[1]), index)}
    if len(same) < 2:
        return False
    first = next(other for other in node.graph if other in same)
    return first is not node and not first.outputs[0].is_graph_output() and replace(node, first.outputs[0])


def gathers_to_split(node: Any) -> bool:
    """Queries, keys and values as one Gather each -> one Split of the heads of all three."""
    reshape, shape = producer_of(node.inputs[0], "Reshape"), shape_of(node.inputs[0])
    if reshape is None or shape is None or len(shape) != 5 or perm_of(node) != [2, 0, 3, 1, 4]:
        return False
    gathers = [use.node for use in node.outputs[0].uses()]
    if any(gather.op_type != "Gather" or gather.attributes.get_int("axis", 0) != 0 for gather in gathers):
        return False
    order = [constant_of(gather.inputs[1]) for gather in gathers]
    if any(index is None or index.ndim for index in order) or sorted(map(int, order)) != list(range(shape[2])):
        return False
    # a scale of one of them is folded through its Gather first
    if any(use.node.op_type == "Mul" for gather in gathers for use in gather.outputs[0].uses()):
        return False
    batch, tokens, parts, heads, channels = shape
    joined = add_reshape(node, reshape.inputs[0], (batch, tokens, parts * heads, channels))
    moved = add_node(
        node, "Transpose", [joined], node, shape=(batch, parts * heads, tokens, channels), perm=[0, 2, 1, 3]
    )
    pieces = add_split(node, moved, parts)
    for index, gather in zip(map(int, order), gathers, strict=True):
        replace(gather, pieces[index])
    return True


def transpose_keys(node: Any) -> bool:
    """Reshape, Transpose, Reshape of four axes by way of three -> one Transpose of the last two."""
    swap = producer_of(node.inputs[0], "Transpose")
    first = None if swap is None else producer_of(swap.inputs[0], "Reshape")
    if first is None or perm_of(swap) != [0, 2, 1]:
        return False
    source, shape = shape_of(first.inputs[0]), shape_of(node.outputs[0])
    if source is None or len(source) != 4 or shape != (*source[:2], source[3], source[2]):
        return False
    if shape_of(swap.inputs[0]) != (source[0] * source[1], *source[2:]):
        return False
    return replace(node, add_node(node, "Transpose", [first.inputs[0]], swap, perm=[0, 1, 3, 2]))


def fold_scale(node: Any) -> bool:
    """A product with a constant, such as layer scale -> a factor in the weights of the layer before."""
    for value, other in (node.inputs, node.inputs[::-1]):
        scale, shape = constant_of(other), shape_of(value)
        if scale is None or shape is None or shape_of(node.outputs[0]) != shape:
            continue
        axes = [axis for axis, size in enumerate(scale.shape, len(shape) - scale.ndim) if size > 1]
        if len(axes) < 2 and _scale(value, scale.reshape(-1), axes[0] if axes else None):
            return replace(node, value)
    return False


def _scale(value: Any, scale: np.ndarray, axis: int | None, part: tuple[int, int] = (0, 1)) -> bool:
    """Multiply the weights that make a value by a number, or by one for each index of an axis.

    Args:
        value: what is scaled.
        scale: one factor, or one for each index of `axis`.
        axis: None for one factor.
        part: (i, n): scale part i of n of the layer's outputs, for what is read in several parts.
    """
    node = value.producer()
    if node is None or (count_uses(value) > 1 and part == (0, 1)):
        return False
    if node.op_type == "Transpose":
        return _scale(node.inputs[0], scale, None if axis is None else perm_of(node)[axis], part)
    if node.op_type == "Reshape":
        before, after = shape_of(node.inputs[0]), shape_of(value)
        if axis is not None and (before is None or after is None or before[-1] != after[-1] or axis != len(after) - 1):
            return False
        return before is not None and _scale(node.inputs[0], scale, None if axis is None else len(before) - 1, part)
    if node.op_type == "Gather" and axis is None and part == (0, 1):
        return _scale_part(node, scale)
    if node.op_type == "Conv" and axis in (None, 1) and part == (0, 1):
        return _scale_inputs(node, scale.reshape(-1, 1, 1, 1), scale)
    if axis not in (None, len(value.shape) - 1):
        return False
    if node.op_type == "Add":
        return _scale_biased(node, scale, part)
    if node.op_type in ("MatMul", "LayerNormalization") or (
        node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)
    ):
        return _scale_inputs(node, scale, scale, part)
    return False


def _scale_part(gather: Any, scale: np.ndarray) -> bool:
    """Scale the weights of queries or keys: Gather(Transpose(Reshape(layer)), i)."""
    index, moved = constant_of(gather.inputs[1]), producer_of(gather.inputs[0], "Transpose", uses=None)
    split = None if moved is None else producer_of(moved.inputs[0], "Reshape")
    if index is None or index.ndim or split is None or gather.attributes.get_int("axis", 0) != 0:
        return False
    readers = [use.node for use in moved.outputs[0].uses()]
    same = [node for node in readers if node.op_type != "Gather" or constant_of(node.inputs[1]) in (None, index)]
    shape, tokens, axis = shape_of(split.outputs[0]), shape_of(split.inputs[0]), perm_of(moved)[0]
    if same != [gather] or shape is None or tokens is None or np.prod(shape[:axis]) != np.prod(tokens[:-1]):
        return False
    return _scale(split.inputs[0], scale, None, (int(index), shape[axis]))


def _scale_biased(node: Any, scale: np.ndarray, part: tuple[int, int]) -> bool:
    """Scale Add(MatMul(x, weight), bias)."""
    for i in (0, 1):
        product, bias = producer_of(node.inputs[i], "MatMul"), constant_of(node.inputs[1 - i])
        if product is not None and bias is not None and bias.ndim == 1 and _scale_inputs(product, scale, scale, part):
            _scale_input(node, 1 - i, scale, part)
            return True
    return False


def _scale_inputs(node: Any, weight_scale: np.ndarray, bias_scale: np.ndarray, part: tuple[int, int] = (0, 1)) -> bool:
    """Scale the weight and bias of a layer, if they are constants."""
    if any(constant_of(value) is None for value in node.inputs[1:]):
        return False
    for position, scale in zip(range(1, len(node.inputs)), (weight_scale, bias_scale), strict=False):
        _scale_input(node, position, scale, part)
    return True


def _scale_input(node: Any, position: int, scale: np.ndarray, part: tuple[int, int]) -> None:
    """Multiply a constant input, or part i of n along its last axis."""
    values = constant_of(node.inputs[position]).copy()
    i, n = part
    step = values.shape[-1] // n
    values[..., i * step : (i + 1) * step if n > 1 else None] *= scale.astype(values.dtype)
    node.replace_input_with(position, add_constant(node, values))


def to_gemm(node: Any) -> bool:
    """Add(MatMul(x, weight), bias) -> Gemm of all tokens as rows of one matrix."""
    for product, bias in (node.inputs, node.inputs[::-1]):
        matmul = producer_of(product, "MatMul")
        if matmul is None or constant_of(bias) is None or constant_of(matmul.inputs[1]) is None:
            continue
        weight, shape = constant_of(matmul.inputs[1]), shape_of(matmul.inputs[0])
        if shape is None or weight.ndim != 2 or constant_of(bias).shape != weight.shape[1:]:
            continue
        rows = add_reshape(node, matmul.inputs[0], (int(np.prod(shape[:-1])), shape[-1]))
        result = (rows.shape[0], weight.shape[1])
        gemm = add_node(node, "Gemm", [rows, matmul.inputs[1], bias], matmul, shape=result)
        return reshape(node, gemm)
    return False


def sink_reshape(node: Any) -> bool:
    """f(Reshape(x)) -> Reshape(f(x)) for functions of single values, and of tokens if those stay whole."""
    before, after = producer_of(node.inputs[0], "Reshape", uses=None), shape_of(node.outputs[0])
    shape = None if before is None else shape_of(before.inputs[0])
    if shape is None or after is None:
        return False
    if node.op_type not in ELEMENTWISE:
        axis = node.attributes.get_int("axis", -1)
        if axis != -1 or shape[-1] != after[-1] or len(shape) > min(3, len(after)):
            return False
    return reshape(node, add_node(node, node.op_type, [before.inputs[0], *node.inputs[1:]], node, shape=shape))


def fold_norm(node: Any) -> bool:
    """Scale and bias of a LayerNormalization -> into the linear layers that read it: fewer values to quantise."""
    scale, bias = constant_of(node.inputs[1]), constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    layers = _linear_readers(node.outputs[0])
    if scale is None or scale.ndim != 1 or not layers or (bias is None) is not (len(node.inputs) < 3):
        return False
    if bias is None and (scale == 1).all():
        return False
    if bias is not None and any(len(layer.inputs) < 3 or constant_of(layer.inputs[2]) is None for layer in layers):
        return False
    for layer in layers:
        weight = constant_of(layer.inputs[1])
        if bias is not None:
            layer.replace_input_with(2, add_constant(layer, constant_of(layer.inputs[2]) + bias @ weight))
        layer.replace_input_with(1, add_constant(layer, scale[:, None] * weight))
    inputs = [node.inputs[0], add_constant(node, np.ones_like(scale))]
    return replace(node, add_node(node, node.op_type, inputs, node))


def _linear_readers(value: Any) -> list[Any]:
    """The linear layers with constant weights (in, out) that read tokens, if nothing else does."""
    layers = []
    for use in value.uses():
        node, shape = use.node, shape_of(use.node.outputs[0])
        if node.op_type == "Reshape" and shape is not None and value.shape is not None and shape[-1] == value.shape[-1]:
            found = _linear_readers(node.outputs[0])
        else:
            weight = constant_of(node.inputs[1]) if node.op_type in ("MatMul", "Gemm") and use.idx == 0 else None
            plain = weight is not None and weight.ndim == 2 and count_uses(node.inputs[1]) == 1
            flags = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
            scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
            found = [node] if plain and not any(flags) and scales == [1.0, 1.0] else []
        if not found:
            return []
        layers += found
    return [] if value.is_graph_output() else layers


def norm_tokens(node: Any) -> bool:
    """A LayerNormalization of a map or of heads -> of three axes: OpenVINO 2026.4 splits those of more."""
    shape = shape_of(node.inputs[0])
    if shape is None or len(shape) < 4 or node.attributes.get_int("axis", -1) != -1:
        return False
    return _norm_shaped(node, (shape[0], math.prod(shape[1:-1]), shape[-1]))


def norm_rows(node: Any) -> bool:
    """Reshape(LayerNormalization(tokens)) -> LayerNormalization(rows), if a linear layer reads the rows."""
    shape = shape_of(node.inputs[0])
    if shape is None or len(shape) != 3 or node.attributes.get_int("axis", -1) != -1:
        return False
    rows = (shape[0] * shape[1], shape[2])
    readers = [use.node for use in node.outputs[0].uses()]
    read = any(reader.op_type == "Reshape" and shape_of(reader.outputs[0]) == rows for reader in readers)
    if rows[0] <= FEW_ROWS or not read:
        return False
    return _norm_shaped(node, rows)


def _norm_shaped(node: Any, shape: tuple[int, ...]) -> bool:
    inputs = [add_reshape(node, node.inputs[0], shape), *node.inputs[1:]]
    return reshape(node, add_node(node, node.op_type, inputs, node, shape=shape))


def reshape_first(node: Any) -> bool:
    """Reshape(Transpose(Reshape(x))) that adds or drops a leading axis of size 1 -> Transpose(Reshape(x))."""
    moved = producer_of(node.inputs[0], "Transpose")
    before = None if moved is None else producer_of(moved.inputs[0], "Reshape")
    if before is None:
        return False
    perm, shape, after = perm_of(moved), shape_of(moved.inputs[0]), shape_of(node.outputs[0])
    if shape is None or after is None:
        return False
    moved_shape = tuple(shape[axis] for axis in perm)
    if after == (1, *moved_shape):
        shape, perm = (1, *shape), [0, *(axis + 1 for axis in perm)]
    elif (1, *after) == moved_shape and perm[0] == 0:
        shape, perm = shape[1:], [axis - 1 for axis in perm[1:]]
    else:
        return False
    source = add_reshape(node, before.inputs[0], shape)
    return replace(node, add_node(node, "Transpose", [source], moved, perm=perm))


def drop_axes(node: Any) -> bool:
    """f(Reshape(x), y), where the Reshape adds leading axes of size 1 -> f(x, y), which broadcasts."""
    plain = [_without_axes(value) for value in node.inputs]
    whole, shapes = shape_of(node.outputs[0]), [shape_of(value) for value in node.inputs]
    if whole is None or None in shapes or plain == [None, None]:
        return False
    inputs = [old if new is None else new for new, old in zip(plain, node.inputs, strict=True)]
    ranks = [len(value.shape) for value in inputs]
    if node.op_type == "MatMul":
        rows = max(ranks) == 2
        if min(ranks) < 2 or (rows and (whole[-2] <= FEW_ROWS or only_read_by(node.outputs[0], "Add"))):
            return False  # the Add of a bias makes it a Gemm
    return reshape(node, add_node(node, node.op_type, inputs, node, shape=whole[-max(ranks) :]))


def _without_axes(value: Any) -> Any:
    """x, if the value is Reshape(x) that only adds leading axes of size 1."""
    added, shape = producer_of(value, "Reshape", uses=None), shape_of(value)
    before = None if added is None else shape_of(added.inputs[0])
    if added is None or before is None or shape is None or shape != (1,) * (len(shape) - len(before)) + before:
        return None
    return added.inputs[0]


def sink_axes(node: Any) -> bool:
    """Transpose(Reshape(x)) -> Reshape(Transpose(x)), if the Reshape adds leading axes of size 1, for `drop_axes`."""
    plain, perm = _without_axes(node.inputs[0]), perm_of(node)
    if plain is None or not only_read_by(node.outputs[0], "MatMul"):
        return False
    added = len(perm) - len(plain.shape)
    if perm[:added] != list(range(added)):
        return False
    perm = [axis - added for axis in perm[added:]]
    moved = add_node(node, "Transpose", [plain], node, shape=tuple(plain.shape[axis] for axis in perm), perm=perm)
    return reshape(node, moved)


def join_reshapes(node: Any) -> bool:
    """Two equal Reshapes of one value -> one."""
    shape = shape_of(node.outputs[0])
    same = {use.node for use in node.inputs[0].uses() if use.node.op_type == "Reshape"}
    same = {other for other in same if shape is not None and shape_of(other.outputs[0]) == shape}
    if len(same) < 2:
        return False
    first = next(other for other in node.graph if other in same)
    return first is not node and not first.outputs[0].is_graph_output() and replace(node, first.outputs[0])


def sink_reshapes(node: Any) -> bool:
    """Add(Reshape(a), b) -> Reshape(Add(a, Reshape(b))), if b is such a Reshape too, or a comes from a Gemm."""
    before = [producer_of(value, "Reshape", uses=None) for value in node.inputs]
    sources = [None if reshape is None else reshape.inputs[0] for reshape in before]
    target = shape_of(sources[0])
    if target is None or target != shape_of(sources[1]):
        rows = [shape_of(value) for value in sources if any(producer_of(value, kind, None) for kind in ("Gemm", "Add"))]
        target = next((shape for shape in rows if shape is not None and len(shape) == 2), None)
    whole = shape_of(node.outputs[0])
    if target is not None and len(target) == 2 and target[0] <= FEW_ROWS:
        return False
    if target is None or whole is None or any(shape_of(value) != whole for value in node.inputs):
        return False
    parts = [add_reshape(node, value, target) for value in node.inputs]
    return reshape(node, add_node(node, node.op_type, parts, node, shape=target))


RULES: dict[str, tuple[Rule, ...]] = {
    "Identity": (drop_identity,),
    "Transpose": (drop_transpose, merge_transposes, gathers_to_split, sink_axes),
    "Squeeze": (unbind_to_gather, to_reshape),
    "Unsqueeze": (to_reshape,),
    "Reshape": (transpose_keys, gather_shaped, merge_reshapes, reshape_first, join_reshapes),
    "Mul": (fold_scale, drop_axes),
    "MatMul": (drop_axes,),
    "Softmax": (sink_reshape,),
    "Add": (to_gemm, sink_reshapes),
    "LayerNormalization": (norm_tokens, norm_rows, fold_norm, sink_reshape),
    "Gather": (gather_rows, gather_early, join_gathers),
    **dict.fromkeys(ELEMENTWISE, (sink_reshape,)),
}
