"""Registry of mixers: names, papers, and how each is created for a site of a body."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tokamix._hints import suggest
from tokamix.mixers.active_token import ActiveTokenMixer
from tokamix.mixers.cosformer import CosFormer
from tokamix.mixers.efficient import EfficientAttention
from tokamix.mixers.linformer import Linformer
from tokamix.mixers.nystrom import Nystrom
from tokamix.mixers.performer import Performer
from tokamix.mixers.pooling import Identity, Pooling
from tokamix.mixers.sima import SimASelfAttention
from tokamix.mixers.soft import SOFT
from tokamix.mixers.softmax import SoftmaxAttention
from tokamix.mixers.super_token import SuperTokenAttention
from tokamix.mixers.weight_mixing import WeightMixing
from tokamix.mixers.xca import XCA


@dataclass(frozen=True)
class Site:
    """The place of a mixer in a body.

    Attributes:
        dim: channels of the tokens.
        num_heads: heads, for mixers that have heads.
        grid: grid (H, W) of tokens at the body's image size, for mixers whose parameters depend on the grid.
        stage: index of the stage in a pyramid; None in a column.
        index: index of the block in the stage or column.
    """

    dim: int
    num_heads: int
    grid: tuple[int, int]
    stage: int | None = None
    index: int = 0


@dataclass(frozen=True)
class Entry:
    """A registered mixer: `create(site, **options)` returns the module; the rest is its paper."""

    create: Callable[..., nn.Module]
    paper_ids: str = ""
    paper_name: str = ""


_entries: dict[str, Entry] = {}
_watchers: list[Callable[[str], None]] = []


def register_mixer(name: str, create: Callable[..., nn.Module], paper_ids: str = "", paper_name: str = "") -> None:
    """Register a mixer under a name; every body can use it at once.

    Args:
        name: a new name of letters, digits and underscores; it becomes part of model names.
        create: called `create(site, **options)` with the user's options, device and dtype; returns a module that maps
            tokens x (B, H*W, C) to tokens of the same shape when called `mixer(x, grid)`.
        paper_ids: the paper, such as "arXiv:2206.08898".
        paper_name: the paper's title.
    """
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be part of a model name: use letters, digits and underscores")
    if name in _entries:
        raise ValueError(f"mixer {name!r} is already registered; choose another name")
    _entries[name] = Entry(create, paper_ids, paper_name)
    for watcher in _watchers:
        watcher(name)


def watch_mixers(watcher: Callable[[str], None]) -> None:
    """Call `watcher` with the name of every mixer: those registered so far now, later ones when they are registered."""
    _watchers.append(watcher)
    for name in _entries:
        watcher(name)


def list_mixers() -> list[str]:
    """Names of all registered mixers."""
    return list(_entries)


def get_mixer(name: str) -> Entry:
    """The entry of a mixer; an unknown name raises ValueError with similar names."""
    if name not in _entries:
        raise ValueError(f"there is no mixer {name!r}; {suggest(str(name), _entries)}")
    return _entries[name]


def create_mixer(name: str, site: Site, **options: Any) -> nn.Module:
    """Create a mixer for a site: `create_mixer("sima", Site(dim=192, num_heads=3, grid=(14, 14)))`.

    Args:
        name: a registered name; `list_mixers()` returns all.
        site: channels, heads and grid, and the block's place in a body.
        options: arguments of the mixer's class, device and dtype.
    """
    entry = get_mixer(name)
    if not isinstance(site, Site):
        raise TypeError(f"create_mixer needs a Site(dim, num_heads, grid), got {site!r}; pass Site(192, 3, (14, 14))")
    return entry.create(site, **options)


def _heads(mixer: type[nn.Module]) -> Callable[..., nn.Module]:
    return lambda site, **options: mixer(site.dim, site.num_heads, **options)


def _softmax(site: Site, **options: Any) -> nn.Module:
    # windows, if there are any, are shifted in every second block unless they cover the grid
    if (window := options.get("window")) and site.index % 2 and min(site.grid) > window:
        options = {"shift": window // 2, **options}
    return SoftmaxAttention(site.dim, site.num_heads, **options)


def _active_token(site: Site, **options: Any) -> nn.Module:
    # channels that share an offset, as in ATMNet: 2 at 64 channels, 4 at 128 and 320, 8 at 512
    share = 2 if site.dim < 128 else 4 if site.dim < 512 else 8
    return ActiveTokenMixer(site.dim, **{"share": share, **options})


def _super_token(site: Site, **options: Any) -> nn.Module:
    # STViT's cells in a pyramid; 2 in a column, which gives 7x7 super tokens for 14x14 tokens: with STViT's cell of 1
    # at this stride, the mixer would be softmax attention
    cell = 2 if site.stage is None else (8, 4, 1, 1)[site.stage]
    return SuperTokenAttention(site.dim, site.num_heads, **{"cell": cell, **options})


def _weight_mixing(site: Site, **options: Any) -> nn.Module:
    # AMixer's windows in a pyramid, every second block shifted unless the window is the whole map; the whole grid in a
    # column, as in AMixer-DeiT
    windows: dict[str, Any] = {"window": site.grid}
    if site.stage is not None:
        side = (7, 7, 14, 7)[site.stage]
        shift = side // 2 if site.index % 2 and min(site.grid) > side else 0
        windows = {"window": (min(side, site.grid[0]), min(side, site.grid[1])), "partition": True, "shift": shift}
    return WeightMixing(site.dim, num_heads=site.num_heads, **{**windows, **options})


def _linformer(site: Site, **options: Any) -> nn.Module:
    return Linformer(site.dim, site.num_heads, **{"grid": site.grid, **options})


def _no_channels(mixer: type[nn.Module]) -> Callable[..., nn.Module]:
    return lambda site, **options: mixer(**options)


register_mixer("softmax", _softmax, "arXiv:1706.03762", "Attention Is All You Need")
register_mixer("xca", _heads(XCA), "arXiv:2106.09681", "XCiT: Cross-Covariance Image Transformers")
register_mixer(
    "sima", _heads(SimASelfAttention), "arXiv:2206.08898", "SimA: Simple Softmax-free Attention for Vision Transformers"
)
register_mixer("active_token", _active_token, "arXiv:2203.06108", "Active Token Mixer")
register_mixer("super_token", _super_token, "arXiv:2211.11167", "Vision Transformer with Super Token Sampling")
register_mixer("weight_mixing", _weight_mixing, "doi:10.1007/978-3-031-19803-8_4", "AMixer: Adaptive Weight Mixing")
register_mixer("linformer", _linformer, "arXiv:2006.04768", "Linformer: Self-Attention with Linear Complexity")
register_mixer("performer", _heads(Performer), "arXiv:2009.14794", "Rethinking Attention with Performers")
register_mixer("nystrom", _heads(Nystrom), "arXiv:2102.03902", "Nyströmformer")
register_mixer("soft", _heads(SOFT), "arXiv:2110.11945", "SOFT: Softmax-free Transformer with Linear Complexity")
register_mixer("efficient", _heads(EfficientAttention), "arXiv:1812.01243", "Efficient Attention")
register_mixer("cosformer", _heads(CosFormer), "arXiv:2202.08791", "cosFormer: Rethinking Softmax in Attention")
register_mixer("pooling", _no_channels(Pooling), "arXiv:2111.11418", "MetaFormer Is Actually What You Need for Vision")
register_mixer("identity", _no_channels(Identity), "arXiv:2210.13452", "MetaFormer Baselines for Vision")
