"""Hugging Face's vision transformers: their attentions, and the layout of their blocks."""

from typing import Any

from torch import Tensor, nn

from tokamix.layers import merge_heads, split_heads
from tokamix.swap._host import AFTER, BEFORE, Adapter, BlockLayout
from tokamix.swap.attention import split_mask


def _use_sdpa(host: Any) -> None:
    """The configuration chooses the function of attention; PyTorch's is the one that is replaced."""
    host.config._attn_implementation = "sdpa"


def _pair(out: Tensor, self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return out, None


def _class_and_registers(name: str, host: Any) -> int:
    return 1 + int(host.config.num_register_tokens)


def _text(name: str) -> str | None:
    return "is part of a text tower" if "text" in name.split(".")[0] or ".text_model" in f".{name}" else None


def _vilt(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any) -> tuple[Tensor]:
    """ViLT's attention, without its output projection; its mask is negative at padding."""
    layers, heads = (self.query, self.key, self.value), self.num_attention_heads
    q, k, v = (split_heads(layer(hidden_states), heads) for layer in layers)
    mask, bias = split_mask(attention_mask, False, q, self.mixer, self.adapter)
    return (merge_heads(self.attend(q, k, v, None, mask, bias)),)


def _adapter(prefix: Any, output: str = "o_proj", **options: Any) -> Adapter:
    return Adapter(prefix=prefix, output=output, wrap=_pair, prepare=_use_sdpa, **options)


_RELATIVE = "the relative position bias is dropped: only softmax has logits to add it to"
# by name, so that transformers need not be imported
_CLASSES = {
    "vit": {"ViTAttention": _adapter(1)},
    "deit": {"DeiTAttention": _adapter(2)},
    "beit": {"BeitAttention": _adapter(1, position=("relative_position_bias",), relative=True, note=_RELATIVE)},
    "dinov2": {"Dinov2Attention": _adapter(1)},
    "dinov2_with_registers": {"Dinov2WithRegistersAttention": _adapter(_class_and_registers)},
    "dinov3_vit": {"DINOv3ViTAttention": _adapter(_class_and_registers)},
    "clip": {"CLIPAttention": _adapter(1, "out_proj", keep=_text)},
    "siglip": {"SiglipAttention": _adapter(0, "out_proj", keep=_text)},
    "segformer": {"SegformerAttention": _adapter(0)},
    "vilt": {"ViltSelfAttention": Adapter(_vilt, layout="other")},
}
ADAPTERS: dict[str, Adapter] = {
    f"transformers.models.{family}.modeling_{family}.{name}": adapter
    for family, classes in _CLASSES.items()
    for name, adapter in classes.items()
}

JOINT = BlockLayout(msa=("attention.o_proj", AFTER), class_token=True)
SPLIT = BlockLayout(
    front=("intermediate", BEFORE),
    mid=("output.dense", BEFORE),
    end=("output.dropout", AFTER),
    msa=("attention.output", AFTER),
    class_token=True,
)
BLOCKS = {
    "transformers.models.vit.modeling_vit.ViTLayer": JOINT,
    "transformers.models.vilt.modeling_vilt.ViltLayer": SPLIT,
}

CLASS_TOKEN = ("vit", "deit", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "clip", "vilt")


def find_layout(name: str, block: nn.Module) -> BlockLayout | None:
    """The layout of a block by the name of its class; ViT's differs between versions of transformers."""
    layout = BLOCKS.get(name)
    return SPLIT if layout is JOINT and hasattr(block, "intermediate") else layout  # transformers before version 5


def has_class_token(name: str) -> bool:
    """Whether the blocks of a class receive a class token, as the first."""
    return any(name.startswith(f"transformers.models.{family}.") for family in CLASS_TOKEN)
