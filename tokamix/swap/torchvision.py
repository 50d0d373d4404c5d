"""torchvision's window attention; its ViT has nn.MultiheadAttention."""

from tokamix.swap._host import Adapter

ADAPTERS: dict[str, Adapter] = {}
