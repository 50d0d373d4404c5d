"""The number of nodes in ONNX graphs of fixed size: what a rule or a model's export saves, stays saved."""

from typing import Any

import pytest
import torch

import tokamix
from tokamix.export.graph import create_graph
from tokamix.export.run import trace
from tokamix.export.write import OPSET, to_onnx
from tokamix.inference import InferenceConfig

SIZE = 64
SMALL: dict[str, Any] = {"dims": (16, 32), "depths": (1, 1)}
# name: (arguments, nodes); two stages show mixers with windows or super tokens, and without
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "amixer_tiny": ({**SMALL, "img_size": SIZE, "num_heads": (2, 2), "window_sizes": (8, 8), "depths": (2, 1)}, 82),
    "stvit_small": ({**SMALL, "num_heads": (1, 2), "stoken_sizes": (4, 1), "layer_scale": (None, None)}, 96),
    "atmnet_xtiny": ({"dims": (16, 16, 32, 32), "depths": (2, 1, 1, 1)}, 295),
    "pyramid_nano_softmax": ({**SMALL, "num_heads": (1, 2)}, 71),
}


@pytest.mark.parametrize("name", CASES)
def test_nodes(name: str) -> None:
    arguments, nodes = CASES[name]
    torch.manual_seed(0)
    model = tokamix.create_model(name, **arguments).eval()
    config = InferenceConfig.from_model(model).replace(image_size=SIZE)
    graph = create_graph(model, config, preprocessing=False, features=False, precision="fp32")
    program = trace(graph, (SIZE, SIZE), 1, config, name, "onnx")
    written = len(to_onnx(program, ["logits"], OPSET).graph.node)
    assert written <= nodes
