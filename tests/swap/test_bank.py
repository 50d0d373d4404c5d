"""Relative position biases become the banks of weight mixing."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.swap.hosts import SIZE, VIT, create
from tokamix.ops.weight_mixing.reference import mixing_weights
from tokamix.swap import swap_mixer
from tokamix.swap.timm_forwards import _swin_v2_bias

WINDOWS = {"img_size": SIZE, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "window_size": 4}
LEVIT = {"img_size": SIZE, "depth": (1, 1, 1)}


def of_shared(attention: Any, model: Any) -> Tensor:
    return model.shared_rel_pos.get_bias()


def of_module(attention: Any, model: Any) -> Tensor:
    return attention.rel_pos.get_bias()


def of_table(attention: Any, model: Any) -> Tensor:
    return attention._get_rel_pos_bias()


def of_levit(attention: Any, model: Any) -> Tensor:
    return attention.get_attention_biases(torch.device("cpu"))


# options, an attention, its bias (heads, queries, keys) by the host's own code
HOSTS: dict[str, tuple[dict[str, Any], str, Callable[[Any, Any], Tensor]]] = {
    "beit_base_patch16_224": (VIT, "blocks.1.attn", of_table),
    "vit_relpos_small_patch16_224": (VIT, "blocks.0.attn", of_module),
    "vit_srelpos_small_patch16_224": (VIT, "blocks.1.attn", of_shared),
    "swin_tiny_patch4_window7_224": (WINDOWS, "layers.0.blocks.0.attn", of_table),
    "swinv2_tiny_window8_256": (WINDOWS, "layers.0.blocks.0.attn", lambda attention, _: _swin_v2_bias(attention)),
    "swinv2_cr_tiny_224": (WINDOWS, "stages.0.blocks.0.attn", lambda a, _: a._relative_positional_encodings()),
    "maxvit_rmlp_pico_rw_256": (
        {"img_size": SIZE, "embed_dim": (32,), "depths": (1,), "stem_width": 16},
        "stages.0.blocks.0.attn_block.attn",
        of_module,
    ),
    "coatnet_pico_rw_224": (
        {"img_size": SIZE, "embed_dim": (32, 32), "depths": (1, 1), "stem_width": 16, "block_type": ("C", "T")},
        "stages.1.blocks.0.attn",
        of_module,
    ),
    "levit_128s": (LEVIT, "stages.0.blocks.0.attn", of_levit),
    "levit_conv_128s": (LEVIT, "stages.0.blocks.0.attn", of_levit),
    "tiny_vit_5m_224": ({}, "stages.3.blocks.0.attn", of_levit),
}


def random_host(name: str) -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **HOSTS[name][0]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", HOSTS)
def test_mixing_weights_are_those_of_the_bias(name: str) -> None:
    """Exactly softmax(bias): the attention that the host has where its queries are 0, among the patch tokens."""
    model = random_host(name)
    path, find = HOSTS[name][1:]
    bias = find(model.get_submodule(path), model).detach()
    report = swap_mixer(model, "weight_mixing", partial=True, image_size=HOSTS[name][0].get("img_size"))
    assert path in report.carried
    if "levit" not in name:  # 6 heads do not divide the 256 channels of its second stage
        assert set(report.carried) == set(report.replaced)
        assert not any("bias is dropped" in note for note in report.notes)
    assert f"{len(report.carried)} relative position biases carried over into the banks of" in str(report)
    mixer = model.get_submodule(path).mixer
    grid = mixer.window
    count = grid[0] * grid[1]
    policy = mixer._policy(torch.randn(2, count, mixer.adapter[0].in_features, dtype=torch.float64))
    weights = mixing_weights(policy, mixer.bank, grid, grid)[:, :, 0]  # (sources, B, heads, destinations)
    bias = bias.squeeze(0)[:, -count:, -count:]
    assert torch.allclose(bias, bias.mT) == (find is of_levit)  # the others show that it is not the mirror image
    expected = bias.softmax(-1).expand(2, -1, -1, -1)
    torch.testing.assert_close(weights.permute(1, 2, 3, 0), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "options", [{"activation": "l2"}, {"policy_activation": "softmax"}, {"relative": False}, {"bank_size": 1}]
)
def test_banks_that_cannot_hold_a_bias(options: dict[str, Any]) -> None:
    """They keep their own initialisation, and the report says that the bias is dropped."""
    model = create("swin_tiny_patch4_window7_224")
    report = swap_mixer(model, "weight_mixing", mixer_kwargs=options)
    assert not report.carried
    assert any("its relative position bias is dropped" in note for note in report.notes)


def test_fixed_banks_and_hosts_without_a_bias() -> None:
    report = swap_mixer(create("swin_tiny_patch4_window7_224"), "weight_mixing", mixer_kwargs={"adaptive": False})
    assert set(report.carried) == set(report.replaced)
    assert not swap_mixer(create("vit_tiny_patch16_224"), "weight_mixing").carried
    meta = timm.create_model("swin_tiny_patch4_window7_224", device="meta")
    assert not swap_mixer(meta, "weight_mixing").carried
    decomposed = timm.create_model(
        "samvit_base_patch16", img_size=SIZE, depth=1, embed_dim=24, num_heads=2, window_size=2, neck_chans=8
    )
    assert not swap_mixer(decomposed, "weight_mixing").carried, "its bias depends on the queries"


def test_zero_queries_give_the_host() -> None:
    """With queries of 0 and the host's values, Swin stays the same network: shifted windows aside."""
    model = random_host("swin_tiny_patch4_window7_224")
    with torch.no_grad():
        for block in model.layers[0].blocks:
            block.shift_size = block.target_shift_size = (0, 0)
            block.register_buffer("attn_mask", None, persistent=False)
            block.attn.qkv.weight[:24] = 0
            block.attn.qkv.bias[:24] = 0
    values: list[nn.Linear] = [block.attn.qkv for block in model.layers[0].blocks]
    x = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    expected = model(x)
    swap_mixer(model, "weight_mixing")
    with torch.no_grad():
        for block, qkv in zip(model.layers[0].blocks, values, strict=True):
            block.attn.mixer.v.weight.copy_(qkv.weight[48:])
            block.attn.mixer.v.bias.copy_(qkv.bias[48:])
    torch.testing.assert_close(model(x), expected)
