"""Token mixers: modules called `mixer(x, grid)` on tokens (B, N, C); `SimA` is called like nn.MultiheadAttention."""

from tokamix.mixers.active_token import ActiveOffset, ActiveTokenMixer
from tokamix.mixers.context_broadcast import ContextBroadcast
from tokamix.mixers.cosformer import CosFormer
from tokamix.mixers.efficient import EfficientAttention
from tokamix.mixers.heads import HeadMixer, full_precision
from tokamix.mixers.linformer import Linformer
from tokamix.mixers.nystrom import Nystrom
from tokamix.mixers.performer import Performer
from tokamix.mixers.pooling import Identity, Pooling
from tokamix.mixers.registry import Site, create_mixer, list_mixers, register_mixer
from tokamix.mixers.sima import SimAClassAttention, SimASelfAttention
from tokamix.mixers.sima_multihead import SimA
from tokamix.mixers.soft import SOFT
from tokamix.mixers.softmax import SoftmaxAttention
from tokamix.mixers.super_token import SuperTokenAttention
from tokamix.mixers.weight_mixing import WeightMixing
from tokamix.mixers.xca import XCA

__all__ = [
    "SOFT",
    "XCA",
    "ActiveOffset",
    "ActiveTokenMixer",
    "ContextBroadcast",
    "CosFormer",
    "EfficientAttention",
    "HeadMixer",
    "Identity",
    "Linformer",
    "Nystrom",
    "Performer",
    "Pooling",
    "SimA",
    "SimAClassAttention",
    "SimASelfAttention",
    "Site",
    "SoftmaxAttention",
    "SuperTokenAttention",
    "WeightMixing",
    "create_mixer",
    "full_precision",
    "list_mixers",
    "register_mixer",
]
