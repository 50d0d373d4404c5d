"""Reading and editing the nodes of ONNX graphs, for the rules of `tokamix.export.simplify`."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a value if it is known and fixed."""
    if value is None or value.shape is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def constant_of(value: Any) -> Any:
    """The array of a constant; None for other values."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def count_uses(value: Any) -> int:
    """How often nodes and the graph's outputs read a value."""
    return len(value.uses()) + value.is_graph_output()


def only_read_by(value: Any, op_type: str) -> bool:
    """Whether nodes of this type are all that reads a value."""
    return not value.is_graph_output() and all(use.node.op_type == op_type for use in value.uses())


def producer_of(value: Any, op_type: str, uses: int | None = 1) -> Any:
    """The node that makes a value if it is of this type, and the value is read `uses` times."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and uses in (None, count_uses(value)) else None


def perm_of(node: Any) -> list[int]:
    """The order of the axes after a Transpose."""
    return list(node.attributes.get_ints("perm", range(len(node.inputs[0].shape))[::-1]))


def add_constant(node: Any, values: Any) -> Any:
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


def add_node(
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


def add_split(place: Any, value: Any, parts: int) -> list[Any]:
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


def add_reshape(place: Any, source: Any, shape: tuple[int, ...]) -> Any:
    """Add a Reshape before `place`, or a constant if the source is one; its output."""
    if (values := constant_of(source)) is not None:
        return add_constant(place, values.reshape(shape))
    return add_node(place, "Reshape", [source, add_constant(place, np.array(shape, np.int64))], place, shape=shape)


def reshape(node: Any, source: Any) -> bool:
    """Replace a node by a Reshape of a value to the node's shape, if that is fixed."""
    shape = shape_of(node.outputs[0])
    return shape is not None and replace(node, add_reshape(node, source, shape))


def replace(node: Any, value: Any) -> bool:
    """Let all readers of a node read another value, and remove the node."""
    import onnx_ir

    onnx_ir.convenience.replace_all_uses_with(node.outputs[0], value)
    node.graph.remove(node, safe=True)
    return True
