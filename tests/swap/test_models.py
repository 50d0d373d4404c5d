"""A small model of every file of timm that docs/swap_coverage.md covers: swapped, saved, compiled, exported.

`make test` checks forward and backward passes, saving and the report of every file, and the rest for one file of each
kind of adapter; `make test-swap` checks all of it for all files.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import model_entrypoint, save_for_hf
from torch import Tensor, nn

import tokamix
from tests.swap.hosts import SIZE, is_missing, skip_if_missing, skip_if_mixed
from tokamix.swap import insert_context_broadcast, remove_context_broadcast, swap_mixer
from tokamix.swap.context_broadcast import InsertedBroadcast

Options = dict[str, Any]
VIT: Options = {"img_size": SIZE, "depth": 2, "embed_dim": 24, "num_heads": 3}
WINDOWS: Options = {"img_size": SIZE, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
ROTARY: Options = {"img_size": SIZE, "depth": 2, "embed_dim": 32, "num_heads": 2}
# name and options of a small model; image size if it is not SIZE
MODELS: dict[str, tuple[Any, ...]] = {
    "beit": ("beit_base_patch16_224", VIT),
    "byoanet": ("botnet26t_256", {"img_size": SIZE}),
    "byobnet": ("resnet50_clip", {}),
    "cait": ("cait_xxs24_224", {"img_size": SIZE, "depth": 2, "embed_dim": 24}),
    "coat": ("coat_tiny", {"img_size": SIZE, "embed_dims": (16,) * 4, "serial_depths": (1,) * 4, "parallel_depth": 1}),
    "convit": ("convit_tiny", {**VIT, "local_up_to_layer": 1}),
    "cpubone": ("cpubone_nano", {}),
    "crossvit": ("crossvit_tiny_240", {"embed_dim": (24, 24), "depth": ((1, 2, 0),), "num_heads": (2, 2)}, 240),
    "csatv2": ("csatv2", {}),
    "davit": ("davit_tiny", {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 2)}),
    "deepseek_vit": ("deepseek_vit_412m", {**ROTARY, "img_size": 56}, 56),
    "deit": ("deit_tiny_distilled_patch16_224", VIT),
    "edgenext": ("edgenext_xx_small", {"depths": (1, 1, 2, 1), "dims": (8, 16, 16, 16)}),
    "efficientformer": ("efficientformer_l1", {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32)}, 224),
    "efficientformer_v2": ("efficientformerv2_s0", {"img_size": SIZE, "depths": (1, 1, 2, 2)}),
    "efficientvit_msra": (
        "efficientvit_m0",
        {"img_size": SIZE, "embed_dim": (16,) * 3, "num_heads": (2,) * 3, "key_dim": (8,) * 3},
    ),
    "eva": ("eva02_tiny_patch14_224", {**VIT, "img_size": 56}, 56),
    "fastvit": ("fastvit_sa12", {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64)}),
    "gcvit": ("gcvit_xxtiny", {"img_size": SIZE}),
    "gemma4_vit": ("gemma4_vit_167m", ROTARY),
    "hiera": ("hiera_tiny_224", {"img_size": SIZE, "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 1, 1)}),
    "hieradet_sam2": ("sam2_hiera_tiny", {"embed_dim": 16, "stages": (1, 2, 2, 1), "global_att_blocks": (4,)}, 224),
    "iformer": ("iformer_t", {}),
    "levit": ("levit_128s", {"img_size": SIZE, "depth": (1, 1, 1)}),
    "lowformer": ("lowformer_b0", {}),
    "maxxvit": (
        "maxvit_rmlp_pico_rw_256",
        {"img_size": SIZE, "embed_dim": (32,), "depths": (1,), "stem_width": 16},
    ),
    "metaformer": ("caformer_s18", {}),
    "mobilenetv3": ("mobilenetv4_hybrid_medium", {}),
    "mobilenetv5": ("mobilenetv5_base", {"channel_multiplier": 0.1}),
    "mobilevit": ("mobilevit_xxs", {}),
    "mvitv2": ("mvitv2_tiny", {"img_size": SIZE}),
    "naflexvit": ("naflexvit_base_patch16_gap", {"depth": 2, "embed_dim": 24, "num_heads": 3}),
    "nest": ("nest_tiny", {"img_size": SIZE}),
    "nextvit": ("nextvit_small", {}),
    "pit": ("pit_ti_224", {"img_size": SIZE, "depth": [1, 1, 1], "base_dims": [8, 8, 8]}),
    "pvt_v2": ("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)}),
    "qwen3_vit": ("qwen3_vit_88m", ROTARY),
    "shvit": ("shvit_s1", {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", WINDOWS),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", WINDOWS),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", WINDOWS),
    "tiny_vit": ("tiny_vit_5m_224", {"window_sizes": (4, 4, 4, 2)}),
    "tnt": (
        "tnt_s_patch16_224",
        {
            **{"img_size": SIZE, "embed_dim": 24, "inner_dim": 12, "depth": 2},
            **{"num_heads_inner": 2, "num_heads_outer": 2},
        },
    ),
    "twins": (
        "twins_svt_small",
        {"img_size": SIZE, "depths": (1, 1, 2, 1), "embed_dims": (8, 16, 32, 64), "num_heads": (2, 4, 8, 16)},
    ),
    "visformer": (
        "visformer_tiny",
        {"img_size": SIZE, "embed_dim": 48, "init_channels": 8, "depth": (1, 1, 1), "num_heads": 2},
    ),
    "vision_transformer": ("vit_tiny_patch16_224", VIT),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", VIT),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", VIT),
    "vision_transformer_sam": (
        "samvit_base_patch16",
        {**VIT, "window_size": 2, "neck_chans": 8, "global_attn_indexes": (1,)},
    ),
    "vitamin": ("vitamin_small_224", {"img_size": SIZE, "depth": 2}),
    "volo": ("volo_d1_224", {"img_size": SIZE}),
    "xcit": ("xcit_nano_12_p16_224", {"depth": 2, "embed_dim": 32}),
}
# kinds of adapters: the host's own forward, a forward of ours in windows, sub-sampled keys, maps; rotary embeddings are
# compiled and exported by test_mixers.py
KINDS = ("maxxvit", "swin_transformer_v2", "pvt_v2", "visformer")
# blocks without an MLP for context broadcasting
NO_MLP = ("byoanet", "byobnet", "iformer", "mobilenetv3", "mobilenetv5")


def create(file: str) -> tuple[Any, Tensor]:
    """The small model of a file, and two images."""
    skip_if_missing(file)
    name, options, *size = MODELS[file]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).eval()
    with torch.no_grad():  # branches that start at 0 would hide changes
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    side = size[0] if size else SIZE
    return model, torch.randn(2, 3, side, side)


def missing_gradients(model: nn.Module, x: Tensor) -> set[str]:
    """Names of the parameters that do not receive a finite gradient."""
    model.zero_grad()
    model(x).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name for name, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()}


def test_every_covered_file_has_a_model() -> None:
    table = (Path(__file__).parents[2] / "docs" / "swap_coverage.md").read_text().split("## Not swapped")[0]
    rows = [line.split("|")[1:5] for line in table.splitlines() if line.startswith("|")][2:]
    assert {file.strip() for file, _, _, swapped in rows if int(swapped)} == set(MODELS)
    for file, (name, *_) in MODELS.items():
        assert is_missing(file) or model_entrypoint(name).__module__.endswith(f".{file}")


@pytest.mark.parametrize("file", MODELS)
def test_swap_of_a_model_of_every_file(file: str, tmp_path: Path) -> None:
    """Outputs, gradients, the report, and the network that comes back from a folder of timm."""
    model, x = create(file)
    unused, plain = missing_gradients(model, x), model(x).detach()
    report = swap_mixer(model)
    assert report.replaced
    json.dumps(report.to_dict())
    assert bool(tokamix.count_exp(model, x.shape[-1])["softmax"]) == bool(report.kept), "a softmax that is not reported"
    assert missing_gradients(model, x) <= unused
    with torch.no_grad():
        out, alone = model(x), model(x[:1])
    assert out.shape == plain.shape
    assert not torch.allclose(out, plain)
    torch.testing.assert_close(alone, out[:1], rtol=1e-3, atol=1e-4)
    save_for_hf(model, tmp_path, model_args=MODELS[file][1])
    loaded = tokamix.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), out)


@pytest.mark.parametrize("file", MODELS)
@torch.no_grad()
def test_broadcast_in_a_model_of_every_file(file: str) -> None:
    """Context broadcasting changes the outputs, and its removal restores them to the bit."""
    model, x = create(file)
    if file in NO_MLP:
        with pytest.raises(ValueError, match="has no blocks that insert_context_broadcast supports"):
            insert_context_broadcast(model)
        return
    plain = model(x)
    calls: list[nn.Module] = []
    alone: list[tuple[Tensor, Tensor]] = []
    for options in ({}, {"position": "mid"}, {"block": "msa"}):
        sites = insert_context_broadcast(model, "cbs", scale_init=0.5, **options)
        calls.clear()
        for module in model.modules():
            if isinstance(module, InsertedBroadcast):
                module.register_forward_hook(lambda module, *_: calls.append(module))
        out = model(x)
        assert len(calls) == len(set(calls)) == len(sites), "each once"
        assert not torch.equal(out, plain)
        alone.append((model(x[:1]), out[:1]))
        assert remove_context_broadcast(model) == sites
        assert torch.equal(model(x), plain)
    skip_if_mixed(file)
    for one, first in alone:
        torch.testing.assert_close(one, first, rtol=1e-3, atol=1e-4)


def as_the_host(action: Callable[[Any], None], model: nn.Module, host: nn.Module) -> bool:
    """Do something with a swapped model; if it fails, its host must fail too. Whether it succeeded."""
    try:
        action(model)
    except Exception:
        with pytest.raises(Exception):  # noqa: B017, PT011  (whatever the host raises)
            action(host)
        return False
    return True


def check_sizes_compile_and_export(file: str) -> dict[str, bool]:
    """What a host can, its swapped model can: another image size, torch.compile without graph breaks, torch.export."""
    host, x = create(file)
    model = copy.deepcopy(host)
    swap_mixer(model)

    def resize(network: Any) -> None:
        network = copy.deepcopy(network)
        size = (x.shape[-2], x.shape[-1] * 2)
        if hasattr(network, "set_input_size"):
            network.set_input_size(img_size=size)
        assert network(torch.randn(1, 3, *size)).isfinite().all()

    def compile_whole(network: nn.Module) -> None:
        torch.compiler.reset()
        expected = network(x)
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-4)

    def export(network: nn.Module) -> None:
        program = torch.export.export(network, (x,)).module()
        torch.testing.assert_close(program(x), network(x), rtol=1e-3, atol=1e-4)

    with torch.no_grad():
        return {action.__name__: as_the_host(action, model, host) for action in (resize, compile_whole, export)}


@pytest.mark.parametrize("file", KINDS)
def test_sizes_compile_and_export(file: str) -> None:
    done = check_sizes_compile_and_export(file)
    assert done["compile_whole"]
    assert done["export"]
