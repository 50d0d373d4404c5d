"""Descriptions of host models: how an attention is replaced, and where the parts of a block are.

Each host library has a file with its tables: timm.py, torch.py, torchvision.py, hf.py and tokamix.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Adapter:
    """How `swap_mixer` replaces the product of queries, keys and values in one class of attention.

    Without `forward` the host's own forward runs, and its call of F.scaled_dot_product_attention is replaced: so
    rotary embeddings, norms, gates, windows and sub-sampled keys stay as they are.

    Attributes:
        forward: a forward for hosts that compute softmax themselves; it calls `self.attend`.
        layout: of the input: "tokens" (B, N, C), "nhwc", "nchw", or "other", which only mixers with the host's
            projections support.
        head_axis: axis of the heads in the host's queries, keys and values; 0 if batch and heads share one.
        position: names of parameters and modules that only make biases of softmax; dropped for other mixers.
        lost: names of parts that no mixer can use, softmax included, such as talking heads; None if softmax gives the
            host's own outputs.
        relative: whether that bias depends on displacements only, so that the bank of weight mixing can hold it.
        bias_methods: methods of the host that return such a bias; they return None once it is dropped.
        window: whether the tokens are those of a window, not of the image.
        windowed: name of an attention and model -> whether this one's tokens are those of a window, where that differs.
        output: name of the output projection.
        prefix: number of prefix tokens, or a function of the attention's name and module; None for that of the model.
        ordered: whether tokens are in the row-major order of a grid.
        wrap: output tokens and the call's arguments -> the host's output, for mixers that replace the whole module.
        class_attention: whether only the class token, or learned queries, attend.
        note: what else changes, for the report.
        prepare: called with the host after it was changed.
        keep: name of an attention -> the reason to keep it, if there is one.
        convert: changes the host itself for some products, and returns whether it did.
        check: raises ValueError if the attention, given with its name, has an option that no mixer supports.
    """

    forward: Callable[..., Any] | None = None
    layout: str = "tokens"
    head_axis: int = 1
    position: tuple[str, ...] = ()
    lost: tuple[str, ...] | None = None
    relative: bool = False
    bias_methods: tuple[str, ...] = ()
    window: bool = False
    windowed: Callable[[str, Any], bool] | None = None
    output: str = "proj"
    prefix: int | Callable[[str, Any], int] | None = None
    ordered: bool = True
    wrap: Callable[..., Any] | None = None
    class_attention: bool = False
    note: str | None = None
    prepare: Callable[[Any], None] | None = None
    keep: Callable[[str], str | None] | None = None
    convert: Callable[[Any, nn.Module], bool] | None = None
    check: Callable[[str, Any], None] | None = None


BEFORE, AFTER = "broadcast_before", "broadcast_after"  # names of the modules that insert_context_broadcast adds
Place = tuple[str, str]  # path of a submodule of the block, and whether to insert before or after it


@dataclass(frozen=True)
class BlockLayout:
    """Where `insert_context_broadcast` inserts into a block.

    Attributes:
        front: front of the MLP.
        mid: before the second layer of the MLP.
        end: end of the MLP.
        msa: end of the attention.
        class_token: whether every MLP and attention receives the class token, if the model has one.
    """

    front: Place = ("mlp", BEFORE)
    mid: Place = ("mlp.fc2", BEFORE)
    end: Place = ("mlp", AFTER)
    msa: Place = ("attn", AFTER)
    class_token: bool = False
