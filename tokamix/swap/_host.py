"""Descriptions of host models: how an attention is replaced, and where the parts of a block are.

Each host library has a file with its tables: timm.py, torch.py, hf.py and tokamix.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Adapter:
    """How `swap_mixer` replaces one class of attention by SimA.

    Attributes:
        create: attention and number of heads -> the module that takes its place.
        output: name of the output projection, whose input features are divided among the heads.
        note: what else changes, for the report.
        class_attention: whether only the class token attends; see `swap_mixer`'s keep_class_attention.
        check: raises ValueError if the attention, given with its name, has an option that SimA lacks.
    """

    create: Callable[[Any, int], nn.Module]
    output: str = "proj"
    note: str | None = None
    class_attention: bool = False
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
