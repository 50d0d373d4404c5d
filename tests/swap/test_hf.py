"""Context broadcasting in Hugging Face's ViT and ViLT."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.swap.hosts import broadcast, change_inputs, change_outputs, submodules, weights
from tokamix.swap import insert_context_broadcast, remove_context_broadcast


def hugging_face_vit() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def hugging_face_vilt() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViltConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        vocab_size=50,
        num_labels=3,
        max_image_length=-1,
    )
    text = torch.randint(50, (2, 7))
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.ViltForQuestionAnswering(config), {**inputs, "pixel_mask": torch.ones(2, 32, 32).long()}


@pytest.mark.parametrize("build", [hugging_face_vit, hugging_face_vilt])
@pytest.mark.parametrize("kind", ["cb", "cbs", "gate", "hybrid"])
def test_hugging_face(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]], kind: str) -> None:
    model, inputs = build()
    model = model.double().eval()
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    state, plain = copy.deepcopy(model.state_dict()), model(**inputs).logits
    ends = submodules(model, r"layers?\.\d\.(mlp|output\.dropout)$")
    mids = submodules(model, r"layers?\.\d\.(mlp\.fc2|output\.dense)$")
    fronts = submodules(model, r"layers?\.\d\.(mlp|intermediate)$")
    attentions = submodules(model, r"layers?\.\d\.attention\.(o_proj|output)$")
    assert len(ends) == len(mids) == len(fronts) == len(attentions) == 2

    def change(y: Tensor) -> Tensor:
        return broadcast(y, kind)

    for position, block, reference in (
        ("end", "mlp", change_outputs(model, ends, change)),
        ("mid", "mlp", change_inputs(model, mids, change)),
        ("front", "mlp", change_inputs(model, fronts, change)),
        ("end", "msa", change_outputs(model, attentions, change)),
    ):
        expected = reference(**inputs).logits
        assert len(insert_context_broadcast(model, kind, position, block)) == 2
        insert_context_broadcast(model, kind, position, block)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(expected, plain, rtol=1e-9, atol=1e-11)
        if kind != "cbs":
            torch.testing.assert_close(weights(model), state)
        remove_context_broadcast(model)
    torch.testing.assert_close(model(**inputs).logits, plain)


def test_hugging_face_vit_exports() -> None:
    model, inputs = hugging_face_vit()
    insert_context_broadcast(model.eval(), "hybrid")
    expected = model(**inputs).logits
    program = torch.export.export(model, (), inputs)
    torch.testing.assert_close(program.module()(**inputs).logits, expected)
    twin = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(twin(**inputs).logits, expected)
