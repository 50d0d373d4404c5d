"""The layout of the blocks of Hugging Face's transformers."""

from torch import nn

from tokamix.swap._host import AFTER, BEFORE, Adapter, BlockLayout

JOINT = BlockLayout(msa=("attention.o_proj", AFTER), class_token=True)
SPLIT = BlockLayout(
    front=("intermediate", BEFORE),
    mid=("output.dense", BEFORE),
    end=("output.dropout", AFTER),
    msa=("attention.output", AFTER),
    class_token=True,
)
# by name, so that transformers need not be imported
BLOCKS = {
    "transformers.models.vit.modeling_vit.ViTLayer": JOINT,
    "transformers.models.vilt.modeling_vilt.ViltLayer": SPLIT,
}


def find_layout(name: str, block: nn.Module) -> BlockLayout | None:
    """The layout of a block by the name of its class; ViT's differs between versions of transformers."""
    layout = BLOCKS.get(name)
    return SPLIT if layout is JOINT and hasattr(block, "intermediate") else layout  # transformers before version 5


ADAPTERS: dict[str, Adapter] = {}
