"""Vision token mixers from five papers, inside timm.

`import tokamix` registers every model with timm, so that `timm.create_model("stvit_small")` works.
"""

from tokamix import mixers, models, ops
from tokamix.checkpoint import load_checkpoint
from tokamix.cost import count_exp, count_macs
from tokamix.models._registry import create_model, list_models
from tokamix.models.bodies import create_body
from tokamix.swap import insert_context_broadcast, remove_context_broadcast, swap_mixer

__version__ = "0.1.0"
__all__ = [
    "count_exp",
    "count_macs",
    "create_body",
    "create_model",
    "insert_context_broadcast",
    "list_models",
    "load_checkpoint",
    "mixers",
    "models",
    "ops",
    "remove_context_broadcast",
    "swap_mixer",
]
