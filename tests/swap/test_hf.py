"""Hugging Face's vision transformers: another mixer, and context broadcasting in ViT and ViLT."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokamix
from tests.swap.hosts import broadcast, change_inputs, change_outputs, submodules, weights
from tokamix.swap import insert_context_broadcast, load_hf, remove_context_broadcast, swap_mixer

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
STAGES = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 2]}
# class of the model, options of its configuration, number of prefix tokens
FAMILIES: dict[str, tuple[str, dict[str, object], int]] = {
    "ViT": ("ViTModel", IMAGE, 1),
    "DeiT": ("DeiTModel", IMAGE, 2),
    "Beit": ("BeitModel", {**IMAGE, "use_relative_position_bias": True}, 1),
    "Dinov2": ("Dinov2Model", IMAGE, 1),
    "Dinov2WithRegisters": ("Dinov2WithRegistersModel", {**IMAGE, "num_register_tokens": 3}, 4),
    "DINOv3ViT": ("DINOv3ViTModel", {**IMAGE, "num_register_tokens": 2}, 3),
    "CLIPVision": ("CLIPVisionModel", IMAGE, 1),
    "SiglipVision": ("SiglipVisionModel", IMAGE, 0),
    "Segformer": ("SegformerModel", STAGES, 0),
}


def create_family(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    name, options, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_swap_in_every_family(family: str, tmp_path: Path) -> None:
    """Softmax gives the host's own outputs; SimA has none; mixers on a grid know the prefix tokens."""
    model, x = create_family(family), torch.randn(2, 3, 32, 32)
    plain = model(x)[0]
    twin: Any = copy.deepcopy(model)
    swap_mixer(twin, "softmax")
    torch.testing.assert_close(twin(x)[0], plain)
    twin = copy.deepcopy(model)
    report = swap_mixer(twin)
    assert len(report.replaced) >= 2
    assert not report.kept
    assert not tokamix.count_exp(twin, 32)["softmax"]
    out = twin(x)[0]
    assert not torch.allclose(out, plain)
    out.square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in twin.parameters())
    report = swap_mixer(model, "weight_mixing", partial=True)  # SigLIP's pool has a learned query
    assert bool(report.carried) == (family == "Beit")
    assert {model.get_submodule(name).prefix for name in report.replaced} == {FAMILIES[family][2]}
    out = model(x)[0]
    assert out.shape == plain.shape
    model.save_pretrained(tmp_path)
    assert torch.equal(load_hf(type(model), tmp_path)(x)[0], out)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_relu_broadcast_and_folders_of_every_family(family: str, tmp_path: Path) -> None:
    """No exp is left, the MLP and the attention broadcast, and a folder comes back as the same network."""
    size = 64 if family == "Segformer" else 32  # at 32 px it has one key in each stage
    model, x = create_family(family), torch.randn(2, 3, size, size)
    plain = model(x)[0]
    kinds = ["cb"] if family in ("SiglipVision", "Segformer") else ["cb", "gate"]
    for kind in kinds:
        for options in ({}, {"position": "mid"}, {"position": "front"}, {"block": "msa"}):
            sites = insert_context_broadcast(model, kind, **options)
            assert not torch.allclose(model(x)[0], plain)
            assert remove_context_broadcast(model) == sites
            assert torch.equal(model(x)[0], plain)
    report = swap_mixer(model, relu=True)
    assert report.activations
    left = tokamix.count_exp(model, size)
    assert set(left) <= {"tanh"}, "of the poolers of ViT and DeiT"
    assert bool(left) == any("exp remains in 1 modules, such as pooler.activation (tanh)" in n for n in report.notes)
    out = model(x)[0]
    model.save_pretrained(tmp_path)
    model_class: Any = type(model)
    with pytest.raises(KeyError, match=r"changed by tokamix: load it with tokamix\.swap\.load_hf"):
        model_class.from_pretrained(tmp_path)
    assert torch.equal(load_hf(model_class, tmp_path)(x)[0], out)


def test_folders_of_other_names(tmp_path: Path) -> None:
    """SegFormer's decoder has other names in files than in the network; a wrong class is refused."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.SegformerForSemanticSegmentation
    model = kind(transformers.SegformerConfig(**STAGES, decoder_hidden_size=8)).eval()
    swap_mixer(model)
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(load_hf(kind, tmp_path)(x).logits, model(x).logits)
    with pytest.raises(ValueError, match=r"does not have \d+ weights of SegformerForImageClassification, such as clas"):
        load_hf(transformers.SegformerForImageClassification, tmp_path)
    with pytest.raises(TypeError, match="load_hf needs the class of the model, such as transformers"):
        load_hf(transformers.AutoModel, tmp_path)


def test_text_towers_are_kept() -> None:
    transformers = pytest.importorskip("transformers")
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=IMAGE))
    sites = insert_context_broadcast(model)
    assert len(sites) == 2, "later words must not be seen by earlier ones"
    assert all(site.startswith("vision_model") for site in sites)
    remove_context_broadcast(model)
    report = swap_mixer(model)
    assert all(name.startswith("vision_model") for name in report.replaced)
    assert set(report.kept.values()) == {"is part of a text tower"}
    assert len(report.replaced) == len(report.kept) == 2


def test_padding_of_vilt() -> None:
    """Masked words change nothing."""
    model, inputs = hugging_face_vilt()
    swap_mixer(model.eval())
    inputs["attention_mask"][:, 4:] = 0
    expected = model(**inputs).logits
    inputs["input_ids"][:, 4:] = (inputs["input_ids"][:, 4:] + 1) % 50
    torch.testing.assert_close(model(**inputs).logits, expected)


def hugging_face_vit() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**IMAGE)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def hugging_face_vilt() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViltConfig(**IMAGE, vocab_size=50, num_labels=3, max_image_length=-1)
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
