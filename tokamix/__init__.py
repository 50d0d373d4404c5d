"""Vision token mixers from five papers, inside timm.

`import tokamix` registers every model with timm, so that `timm.create_model("stvit_small")` works.
"""

from importlib.metadata import version

from tokamix import models, ops
from tokamix.checkpoint import load_checkpoint
from tokamix.registry import create_model, list_models

__version__ = version("tokamix")
__all__ = ["create_model", "list_models", "load_checkpoint", "models", "ops"]
