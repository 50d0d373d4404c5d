"""Small host models and reference formulas for the tests of swap."""

import copy
import re
from collections.abc import Callable

import pytest
import timm
import torch
from packaging.version import Version
from torch import Tensor, nn

SIZE, CLASSES = 64, 5
TIMM = Version(timm.__version__)
# files of timm that are newer than the oldest timm that tokamix supports, and the versions that added them
ADDED = dict.fromkeys(("deepseek_vit", "efficientvim", "iformer", "qwen3_vit"), "1.0.30")
VIT = {"img_size": SIZE, "depth": 2, "embed_dim": 24, "num_heads": 3}
PYRAMID = {"img_size": SIZE, "depths": (1, 1, 1, 1)}
HOSTS: dict[str, dict[str, object]] = {
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "xcit_nano_12_p16_224": {"depth": 2, "embed_dim": 32},
    "cait_xxs24_224": {"img_size": SIZE, "depth": 2, "embed_dim": 24},
    "pit_ti_224": {"img_size": SIZE, "depth": [1, 1, 1], "base_dims": [8, 8, 8]},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)},
    "swin_tiny_patch4_window7_224": {
        "img_size": SIZE,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "twins_pcpvt_small": {**PYRAMID, "embed_dims": (8, 16, 40, 64)},
    "twins_svt_small": {**PYRAMID, "depths": (1, 1, 2, 1), "embed_dims": (8, 16, 32, 64), "num_heads": (2, 4, 8, 16)},
    "cvt_13": {"depths": (1, 1, 1), "dims": (8, 24, 48)},
    "pvt_tiny": {**PYRAMID, "dims": (8, 16, 40, 64)},
    "localvit_tiny": {
        "img_size": SIZE,
        "depth": 2,
        "embed_dim": 24,
        "num_heads": 4,
        "se_reduction": 4,
        "global_pool": "avg",
    },
}


def is_missing(file: str) -> bool:
    """Whether this timm is too old to have a file."""
    return Version(ADDED.get(file, "0")) > TIMM


def skip_if_missing(file: str) -> None:
    """Skip the test of a file that this timm is too old to have."""
    if is_missing(file):
        pytest.skip(f"timm {ADDED[file]} added {file}, this is {TIMM}")


def skip_if_mixed(file: str) -> None:
    """Skip the rest of a test of GCViT's own attention where its output depends on the other images of the batch."""
    if file == "gcvit" and Version("1.0.31") > TIMM:
        pytest.skip(f"before timm 1.0.31, windows have the global queries of other images of the batch, this is {TIMM}")


def create(name: str, **kwargs: object) -> nn.Module:
    """A small version of a host model."""
    return timm.create_model(name, num_classes=CLASSES, **{**HOSTS[name], **kwargs})


def images(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random images."""
    return torch.randn(batch, 3, SIZE, SIZE, dtype=dtype)


def broadcast(x: Tensor, kind: str = "cb", scale: float | Tensor = 1.0) -> Tensor:
    """The supplement's formulas on tokens (B, N, C) or maps (B, H, W, C)."""
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    cb = (tokens + scale * tokens.mean(1, keepdim=True)) / 2
    gate = tokens * (tokens[:, :1] + 1)
    hybrid = tokens * tokens[:, :1] + cb
    return {"cb": cb, "cbs": cb, "gate": gate, "hybrid": hybrid}[kind].reshape(x.shape)


def change_outputs(model: nn.Module, paths: list[str], change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with `change` applied to the outputs of some modules."""
    model = copy.deepcopy(model)
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda _, args, out: change(out))
    return model


def change_inputs(model: nn.Module, paths: list[str], change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with `change` applied to the inputs of some modules."""
    model = copy.deepcopy(model)
    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without the record of changes."""
    return {name: value for name, value in model.state_dict().items() if name != "tokamix_changes"}


def submodules(model: nn.Module, pattern: str) -> list[str]:
    """Names of submodules that match a regular expression."""
    return [name for name, _ in model.named_modules() if re.search(pattern, name)]


def host(**options: object) -> nn.Module:
    """A small ViT in float64 that takes images of any size."""
    torch.manual_seed(0)
    return (
        timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**VIT, "dynamic_img_size": True, **options})
        .double()
        .eval()
    )
