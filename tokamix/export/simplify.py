"""Fewer nodes in ONNX graphs: each rule removes what the exporter writes and no runtime needs.

Rules look at one node and what it reads. They need sizes that are numbers, so a graph of dynamic size keeps more nodes.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

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
    return _replace(node, node.inputs[0])


def drop_transpose(node: Any) -> bool:
    """A Transpose that moves only axes of size 1 is a Reshape."""
    shape, perm = _shape(node.inputs[0]), _perm(node)
    moved = [axis for axis in perm if shape is None or shape[axis] != 1]
    return shape is not None and moved == sorted(moved) and _reshape(node, node.inputs[0])


def merge_transposes(node: Any) -> bool:
    """Transpose(f(Transpose(x))) -> f(x), if the second Transpose undoes the first and f looks at single values.

    Without f, x.
    """
    function = node.inputs[0].producer()
    first = _producer(node.inputs[0], "Transpose", uses=None)
    if first is None and function is not None and function.op_type in ELEMENTWISE and _uses(node.inputs[0]) == 1:
        first = _producer(function.inputs[0], "Transpose")
    if first is None or [_perm(first)[axis] for axis in _perm(node)] != sorted(_perm(first)):
        return False
    plain = first is function
    return _replace(node, first.inputs[0] if plain else _add(node, function.op_type, [first.inputs[0]], function))


def to_reshape(node: Any) -> bool:
    """Squeeze and Unsqueeze are Reshapes, which merge with others."""
    return _reshape(node, node.inputs[0])


def merge_reshapes(node: Any) -> bool:
    """Reshape(Reshape(x)) -> Reshape(x), and nothing if the shape is the same."""
    before = _producer(node.inputs[0], "Reshape", uses=None)
    source = node.inputs[0] if before is None else before.inputs[0]
    if _shape(source) is not None and _shape(source) == _shape(node.outputs[0]):
        return _replace(node, source)
    return before is not None and _reshape(node, source)


def unbind_to_gather(node: Any) -> bool:
    """Squeeze(Slice(x)) of one index, which `unbind` and `q, k, v = x` are translated to -> Gather."""
    cut = _producer(node.inputs[0], "Slice")
    if cut is None or _shape(cut.inputs[0]) is None or _shape(node.outputs[0]) is None:
        return False
    start, stop, axis = (_constant(value) for value in cut.inputs[1:4])
    if start is None or stop is None or axis is None or start.shape != (1,) or stop[0] - start[0] != 1:
        return False
    position = int(axis[0]) % len(_shape(cut.inputs[0]) or ())
    if len(_shape(node.outputs[0]) or ()) != len(_shape(cut.inputs[0]) or ()) - 1:
        return False
    index = _initializer(node, np.int64(start[0]))
    return _replace(node, _add(node, "Gather", [cut.inputs[0], index], node, axis=position))


def gather_shaped(node: Any) -> bool:
    """Reshape(Gather(x, indices)) -> Gather(x, reshaped indices): Gather takes indices of any shape."""
    gather = _producer(node.inputs[0], "Gather")
    if gather is None:
        return False
    axis, values = gather.attributes.get_int("axis", 0), _constant(gather.inputs[1])
    flat = _producer(gather.inputs[1], "Reshape", uses=None)
    data, out = _shape(gather.inputs[0]), _shape(node.outputs[0])
    if data is None or out is None or len(out) < len(data):
        return False
    indices = out[axis : len(out) - len(data) + axis + 1]
    if out != data[:axis] + indices + data[axis + 1 :]:
        return False
    if values is not None and values.size == math.prod(indices):
        source = _initializer(node, values.reshape(indices))
    elif flat is not None and _shape(flat.inputs[0]) == indices:
        source = flat.inputs[0]
    else:
        return False
    return _replace(node, _add(node, "Gather", [gather.inputs[0], source], gather))


def gathers_to_split(node: Any) -> bool:
    """Queries, keys and values as one Gather each -> one Split of the heads of all three."""
    reshape, shape = _producer(node.inputs[0], "Reshape"), _shape(node.inputs[0])
    if reshape is None or shape is None or len(shape) != 5 or _perm(node) != [2, 0, 3, 1, 4]:
        return False
    gathers = [use.node for use in node.outputs[0].uses()]
    if any(gather.op_type != "Gather" or gather.attributes.get_int("axis", 0) != 0 for gather in gathers):
        return False
    order = [_constant(gather.inputs[1]) for gather in gathers]
    if any(index is None or index.ndim for index in order) or sorted(map(int, order)) != list(range(shape[2])):
        return False
    # a scale of one of them is folded through its Gather first
    if any(use.node.op_type == "Mul" for gather in gathers for use in gather.outputs[0].uses()):
        return False
    batch, tokens, parts, heads, channels = shape
    joined = _add_reshape(node, reshape.inputs[0], (batch, tokens, parts * heads, channels))
    moved = _add(node, "Transpose", [joined], node, shape=(batch, parts * heads, tokens, channels), perm=[0, 2, 1, 3])
    pieces = _add_split(node, moved, parts)
    for index, gather in zip(map(int, order), gathers, strict=True):
        _replace(gather, pieces[index])
    return True


def transpose_keys(node: Any) -> bool:
    """Reshape, Transpose, Reshape of four axes by way of three -> one Transpose of the last two."""
    swap = _producer(node.inputs[0], "Transpose")
    first = None if swap is None else _producer(swap.inputs[0], "Reshape")
    if first is None or _perm(swap) != [0, 2, 1]:
        return False
    source, shape = _shape(first.inputs[0]), _shape(node.outputs[0])
    if source is None or len(source) != 4 or shape != (*source[:2], source[3], source[2]):
        return False
    if _shape(swap.inputs[0]) != (source[0] * source[1], *source[2:]):
        return False
    return _replace(node, _add(node, "Transpose", [first.inputs[0]], swap, perm=[0, 1, 3, 2]))


def fold_scale(node: Any) -> bool:
    """A product with a constant, such as layer scale -> a factor in the weights of the layer before."""
    for value, other in (node.inputs, node.inputs[::-1]):
        scale, shape = _constant(other), _shape(value)
        if scale is None or shape is None or _shape(node.outputs[0]) != shape:
            continue
        axes = [axis for axis, size in enumerate(scale.shape, len(shape) - scale.ndim) if size > 1]
        if len(axes) < 2 and _scale(value, scale.reshape(-1), axes[0] if axes else None):
            return _replace(node, value)
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
    if node is None or (_uses(value) > 1 and part == (0, 1)):
        return False
    if node.op_type == "Transpose":
        return _scale(node.inputs[0], scale, None if axis is None else _perm(node)[axis], part)
    if node.op_type == "Reshape":
        before, after = _shape(node.inputs[0]), _shape(value)
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
    index, moved = _constant(gather.inputs[1]), _producer(gather.inputs[0], "Transpose", uses=None)
    split = None if moved is None else _producer(moved.inputs[0], "Reshape")
    if index is None or index.ndim or split is None or gather.attributes.get_int("axis", 0) != 0:
        return False
    readers = [use.node for use in moved.outputs[0].uses()]
    same = [node for node in readers if node.op_type != "Gather" or _constant(node.inputs[1]) in (None, index)]
    shape, tokens, axis = _shape(split.outputs[0]), _shape(split.inputs[0]), _perm(moved)[0]
    if same != [gather] or shape is None or tokens is None or np.prod(shape[:axis]) != np.prod(tokens[:-1]):
        return False
    return _scale(split.inputs[0], scale, None, (int(index), shape[axis]))


def _scale_biased(node: Any, scale: np.ndarray, part: tuple[int, int]) -> bool:
    """Scale Add(MatMul(x, weight), bias)."""
    for i in (0, 1):
        product, bias = _producer(node.inputs[i], "MatMul"), _constant(node.inputs[1 - i])
        if product is not None and bias is not None and bias.ndim == 1 and _scale_inputs(product, scale, scale, part):
            _scale_input(node, 1 - i, scale, part)
            return True
    return False


def _scale_inputs(node: Any, weight_scale: np.ndarray, bias_scale: np.ndarray, part: tuple[int, int] = (0, 1)) -> bool:
    """Scale the weight and bias of a layer, if they are constants."""
    if any(_constant(value) is None for value in node.inputs[1:]):
        return False
    for position, scale in zip(range(1, len(node.inputs)), (weight_scale, bias_scale), strict=False):
        _scale_input(node, position, scale, part)
    return True


def _scale_input(node: Any, position: int, scale: np.ndarray, part: tuple[int, int]) -> None:
    """Multiply a constant input, or part i of n along its last axis."""
    values = _constant(node.inputs[position]).copy()
    i, n = part
    step = values.shape[-1] // n
    values[..., i * step : (i + 1) * step if n > 1 else None] *= scale.astype(values.dtype)
    node.replace_input_with(position, _initializer(node, values))


def to_gemm(node: Any) -> bool:
    """Add(MatMul(x, weight), bias) -> Gemm of all tokens as rows of one matrix."""
    for product, bias in (node.inputs, node.inputs[::-1]):
        matmul = _producer(product, "MatMul")
        if matmul is None or _constant(bias) is None or _constant(matmul.inputs[1]) is None:
            continue
        weight, shape = _constant(matmul.inputs[1]), _shape(matmul.inputs[0])
        if shape is None or weight.ndim != 2 or _constant(bias).shape != weight.shape[1:]:
            continue
        rows = _add_reshape(node, matmul.inputs[0], (int(np.prod(shape[:-1])), shape[-1]))
        result = (rows.shape[0], weight.shape[1])
        gemm = _add(node, "Gemm", [rows, matmul.inputs[1], bias], matmul, shape=result)
        return _reshape(node, gemm)
    return False


def sink_reshape(node: Any) -> bool:
    """f(Reshape(x)) -> Reshape(f(x)) for functions of single values, and of tokens if those stay whole."""
    before, after = _producer(node.inputs[0], "Reshape", uses=None), _shape(node.outputs[0])
    shape = None if before is None else _shape(before.inputs[0])
    if shape is None or after is None:
        return False
    if node.op_type not in ELEMENTWISE:
        axis = node.attributes.get_int("axis", -1)
        if axis != -1 or shape[-1] != after[-1] or len(shape) > min(3, len(after)):
            return False
    return _reshape(node, _add(node, node.op_type, [before.inputs[0], *node.inputs[1:]], node, shape=shape))


def fold_norm(node: Any) -> bool:
    """Scale and bias of a LayerNormalization -> into the linear layers that read it: fewer values to quantise."""
    scale, bias = _constant(node.inputs[1]), _constant(node.inputs[2]) if len(node.inputs) > 2 else None
    layers = _linear_readers(node.outputs[0])
    if scale is None or scale.ndim != 1 or not layers or (bias is None) is not (len(node.inputs) < 3):
        return False
    if bias is None and (scale == 1).all():
        return False
    if bias is not None and any(len(layer.inputs) < 3 or _constant(layer.inputs[2]) is None for layer in layers):
        return False
    for layer in layers:
        weight = _constant(layer.inputs[1])
        if bias is not None:
            layer.replace_input_with(2, _initializer(layer, _constant(layer.inputs[2]) + bias @ weight))
        layer.replace_input_with(1, _initializer(layer, scale[:, None] * weight))
    inputs = [node.inputs[0], _initializer(node, np.ones_like(scale))]
    return _replace(node, _add(node, node.op_type, inputs, node))


def _linear_readers(value: Any) -> list[Any]:
    """The linear layers with constant weights (in, out) that read tokens, if nothing else does."""
    layers = []
    for use in value.uses():
        node, shape = use.node, _shape(use.node.outputs[0])
        if node.op_type == "Reshape" and shape is not None and value.shape is not None and shape[-1] == value.shape[-1]:
            found = _linear_readers(node.outputs[0])
        else:
            weight = _constant(node.inputs[1]) if node.op_type in ("MatMul", "Gemm") and use.idx == 0 else None
            plain = weight is not None and weight.ndim == 2 and _uses(node.inputs[1]) == 1
            flags = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
            scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
            found = [node] if plain and not any(flags) and scales == [1.0, 1.0] else []
        if not found:
            return []
        layers += found
    return [] if value.is_graph_output() else layers


def norm_tokens(node: Any) -> bool:
    """A LayerNormalization of a map -> of its tokens: OpenVINO 2026.4 splits those of more than three axes.

    Tokens, not rows: in OpenVINO, norms of two axes are slower.
    """
    shape = _shape(node.inputs[0])
    if shape is None or len(shape) < 4 or node.attributes.get_int("axis", -1) != -1:
        return False
    tokens = (shape[0], math.prod(shape[1:-1]), shape[-1])
    inputs = [_add_reshape(node, node.inputs[0], tokens), *node.inputs[1:]]
    return _reshape(node, _add(node, node.op_type, inputs, node, shape=tokens))


def reshape_first(node: Any) -> bool:
    """Reshape(Transpose(Reshape(x))) that adds or drops a leading axis of size 1 -> Transpose(Reshape(x))."""
    moved = _producer(node.inputs[0], "Transpose")
    before = None if moved is None else _producer(moved.inputs[0], "Reshape")
    if before is None:
        return False
    perm, shape, after = _perm(moved), _shape(moved.inputs[0]), _shape(node.outputs[0])
    if shape is None or after is None:
        return False
    moved_shape = tuple(shape[axis] for axis in perm)
    if after == (1, *moved_shape):
        shape, perm = (1, *shape), [0, *(axis + 1 for axis in perm)]
    elif (1, *after) == moved_shape and perm[0] == 0:
        shape, perm = shape[1:], [axis - 1 for axis in perm[1:]]
    else:
        return False
    source = _add_reshape(node, before.inputs[0], shape)
    return _replace(node, _add(node, "Transpose", [source], moved, perm=perm))


def join_reshapes(node: Any) -> bool:
    """Two equal Reshapes of one value -> one."""
    shape = _shape(node.outputs[0])
    same = {use.node for use in node.inputs[0].uses() if use.node.op_type == "Reshape"}
    same = {other for other in same if shape is not None and _shape(other.outputs[0]) == shape}
    if len(same) < 2:
        return False
    first = next(other for other in node.graph if other in same)
    return first is not node and not first.outputs[0].is_graph_output() and _replace(node, first.outputs[0])


def sink_reshapes(node: Any) -> bool:
    """Add(Reshape(a), b) -> Reshape(Add(a, Reshape(b))), if b is such a Reshape too, or a comes from a Gemm."""
    before = [_producer(value, "Reshape", uses=None) for value in node.inputs]
    sources = [None if reshape is None else reshape.inputs[0] for reshape in before]
    target = _shape(sources[0])
    if target is None or target != _shape(sources[1]):
        rows = [_shape(value) for value in sources if any(_producer(value, kind, None) for kind in ("Gemm", "Add"))]
        target = next((shape for shape in rows if shape is not None and len(shape) == 2), None)
    whole = _shape(node.outputs[0])
    if target is not None and len(target) == 2 and target[0] <= FEW_ROWS:
        return False
    if target is None or whole is None or any(_shape(value) != whole for value in node.inputs):
        return False
    parts = [_add_reshape(node, value, target) for value in node.inputs]
    return _reshape(node, _add(node, node.op_type, parts, node, shape=target))


RULES: dict[str, tuple[Rule, ...]] = {
    "Identity": (drop_identity,),
    "Transpose": (drop_transpose, merge_transposes, gathers_to_split),
    "Squeeze": (unbind_to_gather, to_reshape),
    "Unsqueeze": (to_reshape,),
    "Reshape": (transpose_keys, gather_shaped, merge_reshapes, reshape_first, join_reshapes),
    "Mul": (fold_scale,),
    "Add": (to_gemm, sink_reshapes),
    "LayerNormalization": (norm_tokens, fold_norm, sink_reshape),
    **dict.fromkeys(ELEMENTWISE, (sink_reshape,)),
}


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a value if it is known and fixed."""
    if value is None or value.shape is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _constant(value: Any) -> Any:
    """The array of a constant; None for other values."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _uses(value: Any) -> int:
    return len(value.uses()) + value.is_graph_output()


def _producer(value: Any, op_type: str, uses: int | None = 1) -> Any:
    """The node that makes a value if it is of this type, and the value is read `uses` times."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and uses in (None, _uses(value)) else None


def _perm(node: Any) -> list[int]:
    return list(node.attributes.get_ints("perm", range(len(node.inputs[0].shape))[::-1]))


def _initializer(node: Any, values: Any) -> Any:
    """A new constant in the graph of a node."""
    import onnx_ir

    numbers: Iterator[int] = iter(range(len(node.graph.initializers), 10**9))
    name = next(f"constant_{i}" for i in numbers if f"constant_{i}" not in node.graph.initializers)
    tensor = onnx_ir.tensor(np.asarray(values), name=name)
    value = onnx_ir.Value(
        name=name, shape=onnx_ir.Shape(np.shape(values)), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    node.graph.register_initializer(value)
    return value


def _add(
    place: Any, op_type: str, inputs: list[Any], like: Any, shape: tuple[int, ...] | None = None, **attributes: Any
) -> Any:
    """Add a node before `place`, with the origin and (unless named) attributes of a node `like` it; its output."""
    import onnx_ir

    kept = dict(like.attributes) if like.op_type == op_type and not attributes else {}
    new = onnx_ir.node(op_type, inputs, attributes={**kept, **attributes}, metadata_props=dict(like.metadata_props))
    place.graph.insert_before(place, new)
    (output,), (old,) = new.outputs, place.outputs
    output.shape, output.type = onnx_ir.Shape(shape) if shape else old.shape, old.type
    return output


def _add_split(place: Any, value: Any, parts: int) -> list[Any]:
    """Add a Split of axis 1 into equal parts before `place`; its outputs."""
    import onnx_ir

    new = onnx_ir.node(
        "Split",
        [value],
        {"axis": 1, "num_outputs": parts},
        num_outputs=parts,
        metadata_props=dict(place.metadata_props),
    )
    place.graph.insert_before(place, new)
    batch, heads, *rest = value.shape
    for output in new.outputs:
        output.shape, output.type = onnx_ir.Shape((batch, heads // parts, *rest)), value.type
    return list(new.outputs)


def _add_reshape(place: Any, source: Any, shape: tuple[int, ...]) -> Any:
    return _add(place, "Reshape", [source, _initializer(place, np.array(shape, np.int64))], place, shape=shape)


def _reshape(node: Any, source: Any) -> bool:
    """Replace a node by a Reshape of a value to the node's shape, if that is fixed."""
    shape = _shape(node.outputs[0])
    return shape is not None and _replace(node, _add_reshape(node, source, shape))


def _replace(node: Any, value: Any) -> bool:
    """Let all readers of a node read another value, and remove the node."""
    import onnx_ir

    onnx_ir.convenience.replace_all_uses_with(node.outputs[0], value)
    node.graph.remove(node, safe=True)
    return True
