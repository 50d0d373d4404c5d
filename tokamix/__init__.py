"""Vision token mixers from five papers, inside timm.

`import tokamix` registers every model with timm, so that `timm.create_model("stvit_small")` works. All names below are
imported on first use.
"""

from typing import TYPE_CHECKING

from tokamix._lazy import attach
from tokamix._register import register_with_timm

if TYPE_CHECKING:
    from tokamix.checkpoint import load_checkpoint
    from tokamix.compare import compare
    from tokamix.convert import convert
    from tokamix.cost import count_exp, count_macs
    from tokamix.data import create_dataset
    from tokamix.dense import create_detector, create_segmenter
    from tokamix.embed import embed
    from tokamix.evaluate import evaluate
    from tokamix.evaluate.robustness import evaluate_robustness
    from tokamix.explain import explain
    from tokamix.export import export
    from tokamix.inference import InferenceConfig
    from tokamix.mixers import create_mixer
    from tokamix.models import create_body, create_model, list_models
    from tokamix.predict import predict
    from tokamix.probe import probe
    from tokamix.recipes import list_recipes, load_recipe
    from tokamix.swap import insert_context_broadcast, remove_context_broadcast, swap_mixer
    from tokamix.train import train
    from tokamix.transfer import transfer

__version__ = "0.1.0"
__all__ = [
    "InferenceConfig",
    "compare",
    "convert",
    "count_exp",
    "count_macs",
    "create_body",
    "create_dataset",
    "create_detector",
    "create_mixer",
    "create_model",
    "create_segmenter",
    "embed",
    "evaluate",
    "evaluate_robustness",
    "explain",
    "export",
    "insert_context_broadcast",
    "list_models",
    "list_recipes",
    "load_checkpoint",
    "load_recipe",
    "predict",
    "probe",
    "remove_context_broadcast",
    "swap_mixer",
    "train",
    "transfer",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "checkpoint": ("load_checkpoint",),
        "compare": ("compare",),
        "convert": ("convert",),
        "cost": ("count_exp", "count_macs"),
        "data": ("create_dataset",),
        "dense": ("create_detector", "create_segmenter"),
        "embed": ("embed",),
        "evaluate": ("evaluate",),
        "evaluate.robustness": ("evaluate_robustness",),
        "explain": ("explain",),
        "export": ("export",),
        "inference": ("InferenceConfig",),
        "mixers": ("create_mixer",),
        "models": ("create_body", "create_model", "list_models"),
        "predict": ("predict",),
        "probe": ("probe",),
        "recipes": ("list_recipes", "load_recipe"),
        "swap": ("insert_context_broadcast", "remove_context_broadcast", "swap_mixer"),
        "train": ("train",),
        "transfer": ("transfer",),
    },
)
register_with_timm()
