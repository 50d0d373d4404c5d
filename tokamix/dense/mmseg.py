"""Convert checkpoints of MMSegmentation, in which the papers' authors trained their segmenters, to our names."""

import re
import sys

from torch import Tensor, nn

from tokamix.dense.backbone import split_levels

PATTERNS: tuple[tuple[str, str], ...] = (
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"neck.lateral.\1."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"neck.output.\1."),
    (r"^decode_head\.psp_modules\.(\d)\.1\.", r"head.pooling.branches.\1."),
    (r"^decode_head\.bottleneck\.", "head.pooling.join."),
    (r"^decode_head\.lateral_convs\.", "head.lateral."),
    (r"^decode_head\.fpn_convs\.", "head.output."),
    (r"^decode_head\.fpn_bottleneck\.", "head.join."),
    (r"^decode_head\.conv_seg\.", "head.classifier.1."),
    (r"^auxiliary_head\.convs\.0\.", "auxiliary.0."),
    (r"^auxiliary_head\.conv_seg\.", "auxiliary.1.1."),
    (r"^((?:head|auxiliary)\..*)\.conv\.(\w+)$", r"\1.0.\2"),
    (r"^((?:head|auxiliary)\..*)\.bn\.(\w+)$", r"\1.1.\2"),
)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """MMSegmentation's names -> ours, with the backbone's own converter for its part; our names pass unchanged."""
    if not any(name.startswith("decode_head.") for name in state_dict):
        return state_dict
    inner = {n.removeprefix("backbone."): v for n, v in state_dict.items() if n.startswith("backbone.")}
    levels, body = split_levels(inner), model.get_submodule("backbone.body")
    translate = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    inner = translate(inner, body) if translate else inner
    ours = {f"backbone.body.{n}": v for n, v in inner.items()}
    ours |= {f"backbone.levels.{n}": v for n, v in levels.items()}
    for name, value in state_dict.items():
        if not name.startswith("backbone."):
            ours[_translate(name)] = value
    return ours


def _translate(name: str) -> str:
    # the convolutions of a level have the indices 0, 2 and 4, with an upsampling after each
    name = re.sub(r"^decode_head\.scale_heads\.(\d)\.(\d)\.", lambda m: f"head.levels.{m[1]}.{int(m[2]) // 2}.", name)
    for pattern, replacement in PATTERNS:
        name = re.sub(pattern, replacement, name)
    return name
