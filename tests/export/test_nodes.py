"""The number of nodes in ONNX graphs of fixed size: what a rule or a model's export saves, stays saved."""

from typing import Any

import pytest

import tokamix
from tokamix.export.graph import create_graph
from tokamix.export.run import trace
from tokamix.export.write import OPSET, to_onnx, to_openvino
from tokamix.inference import InferenceConfig

SIZE = 64
SMALL: dict[str, Any] = {"dims": (16, 32), "depths": (1, 1)}
# name: (arguments, nodes); two stages show mixers with windows or super tokens, and without
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "amixer_tiny": ({**SMALL, "img_size": SIZE, "num_heads": (2, 2), "window_sizes": (8, 8), "depths": (2, 1)}, 82),
    "stvit_small": ({**SMALL, "num_heads": (1, 2), "stoken_sizes": (4, 1), "layer_scale": (None, None)}, 96),
    "atmnet_xtiny": ({"dims": (16, 16, 32, 32), "depths": (2, 1, 1, 1)}, 295),
    "pyramid_nano_softmax": ({**SMALL, "num_heads": (1, 2)}, 73),
}


@pytest.mark.parametrize("name", CASES)
def test_nodes(name: str) -> None:
    arguments, nodes = CASES[name]
    assert len(translate(tokamix.create_model(name, **arguments), SIZE, "onnx").graph.node) <= nodes


def test_openvino_compiles_normed_queries_and_keys() -> None:
    """In three axes; OpenVINO 2026.4 takes those of the heads (heads, tokens, channels) for a part of attention."""
    openvino = pytest.importorskip("openvino")
    model = tokamix.create_model("pyramid_nano_softmax", depths=(1, 1, 1))
    openvino.Core().compile_model(translate(model, 96, "openvino"), "CPU")


def translate(model: Any, size: int, target: str) -> Any:
    """The model as the target's graph for one image of fixed size."""
    config = InferenceConfig.from_model(model).replace(image_size=size)
    graph = create_graph(model.eval(), config, preprocessing=False, features=False, precision="fp32")
    program = trace(graph, (size, size), 1, config, "model", target)
    return (to_onnx if target == "onnx" else to_openvino)(program, ["logits"], OPSET)
