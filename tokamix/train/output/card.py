"""Model cards in the format of the Hugging Face Hub."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCardData

from tokamix.inference import UNKNOWN
from tokamix.recipes import Recipe

PIPELINES = {"classify": "image-classification", "segment": "image-segmentation", "detect": "object-detection"}
PIPELINES |= {"dino": "image-feature-extraction", "vqa": "visual-question-answering"}
# the Hub's names of metrics
METRIC_TYPES = {"top1": "accuracy", "miou": "mean_iou", "box_ap": "mean_average_precision"}
METRIC_TYPES["mask_ap"] = METRIC_TYPES["box_ap"]
SHOWN_CLASSES = 20
TIMM = """import timm, tokamix

model = timm.create_model("local-dir:PATH/TO/THIS/FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"""
CHANGED = """from tokamix.inference import load_model

model, config = load_model("PATH/TO/THIS/FOLDER")"""
OWN = """import tokamix

model = ...  # create the module as for the training
tokamix.load_checkpoint(model, "PATH/TO/THIS/FOLDER")"""
DENSE = """from tokamix.predict import load_predictor

predictor = load_predictor("PATH/TO/THIS/FOLDER")
prediction = predictor("photo.jpg")
predictor.draw("photo.jpg", prediction).save("overlay.png")"""


VQA = """from tokamix.vqa import load_vqa

model = load_vqa("PATH/TO/THIS/FOLDER")
model.answer("photo.jpg", "What is on the table?")"""


class Facts(NamedTuple):
    """What a model card tells about a run besides its results.

    Attributes:
        model: name of the model.
        data: name of the data set, without folders of the machine.
        parameters: trainable ones.
        images: of the training and the validation split.
        metrics: display names of the metrics in percent.
        paper: timm's `pretrained_cfg`, which names the paper of the model or backbone.
        start: name of the weights that training started from; None if none were given.
    """

    model: str
    data: str
    parameters: int
    images: tuple[int, int]
    metrics: Mapping[str, str]
    paper: Mapping[str, Any]
    start: str | None = None


def create_card(
    name: str,
    config: Mapping[str, Any],
    recipe: Recipe,
    facts: Facts,
    results: Mapping[str, Mapping[str, Any]],
    training: str,
) -> str:
    """Create README.md of a run: the model, its results, its use and its training.

    Args:
        name: of the run.
        config: the content of config.json.
        recipe: how it was trained.
        facts: about model and data.
        results: evaluations by kind, "best" and "last": metrics, epoch, and whether the weights were averaged.
        training: hardware and time, in words.
    """
    construction = config.get("construction")
    vqa = config.get("task") == "vqa"
    plain = "method" not in config and construction is None and not vqa
    code = DENSE if "method" in config else TIMM if plain else OWN if construction == UNKNOWN else CHANGED
    code = VQA if vqa else code
    size = f" of {config['pretrained_cfg']['input_size'][-1]} px" if "pretrained_cfg" in config else ""
    used = recipe.to_dict() | {"precision": config.get("precision", recipe.precision)}  # a CPU trains in fp32
    settings = yaml.safe_dump({k: v for k, v in used.items() if v is not None}, sort_keys=False, width=1000)
    return f"""---
{_metadata(name, recipe, facts, results, plain)}
---

# {name}

`{facts.model}`, trained with tokamix on `{facts.data}`.

| | |
|---|---|
| parameters | {facts.parameters:,} |
| classes | {_classes(config["label_names"])} |
| images{size} | {facts.images[0]:,} for training, {facts.images[1]:,} for validation |
| training | {training}{f", from the weights `{facts.start}`" if facts.start else ""} |

{_results(recipe, results, len(config["label_names"]))}
![loss and metrics over the epochs](curves.png)

## Use

```python
{code}
```

## Training

Recipe `{recipe.name}` ({recipe.source}):

```yaml
{settings}```

## Licence

The licence of the weights depends on the training data and on the weights that training started from: set `license` at
the top of this file before you publish them.
{_citation(facts.paper)}"""


def _metadata(
    name: str, recipe: Recipe, facts: Facts, results: Mapping[str, Mapping[str, Any]], is_timm_model: bool
) -> str:
    """The YAML block that the Hub reads, with the results as its `model-index`."""
    task = PIPELINES[recipe.task]
    dataset: dict[str, Any] = {"dataset_name": facts.data, "dataset_type": facts.data.removeprefix("hf:")}
    evaluations = [
        EvalResult(
            task_type=task,
            dataset_split="validation",
            metric_type=METRIC_TYPES.get(key, key),
            metric_name=f"{label} ({_describe(kind, result)})",
            metric_value=round(result[key], 3),
            **dataset,
        )
        for kind, result in results.items()
        for key, label in facts.metrics.items()
        if key in result
    ]
    library = "timm" if is_timm_model else "tokamix"
    tags = list(dict.fromkeys((library, "tokamix")))
    card = ModelCardData(
        library_name=library,
        license="unknown",
        pipeline_tag=task,
        tags=tags,
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
    )
    return card.to_yaml()


def _describe(kind: str, result: Mapping[str, Any]) -> str:
    average = ", averaged weights" if result.get("averaged") else ""
    return f"{kind}: epoch {result['epoch']}{average}"


def _results(recipe: Recipe, results: Mapping[str, Mapping[str, Any]], num_classes: int) -> str:
    """A table with a column for each evaluation; without top-5 for up to five classes, where it is always 100 %."""
    if not results:
        return "No evaluation has finished yet."
    hidden = {"epoch", "averaged"} | ({"top5"} if num_classes <= 5 else set())
    keys = [key for key in next(iter(results.values())) if key not in hidden]
    rows = [f"| metric | {' | '.join(_describe(kind, result) for kind, result in results.items())} |"]
    rows.append("|---" * (len(results) + 1) + "|")
    rows += [f"| {key} | {' | '.join(f'{result[key]:.3f}' for result in results.values())} |" for key in keys]
    if recipe.select == "best":
        note = "`model.safetensors` has the weights of the best epoch. It was chosen on the validation images, so its"
        note += " numbers are optimistic; those of the last epoch are not."
    else:
        note = "`model.safetensors` has the weights of the last epoch, which were not chosen by their results."
    return f"Results on the validation images. {note}\n\n" + "\n".join(rows) + "\n"


def _classes(names: list[str]) -> str:
    if not names:
        return "none: the model returns features"
    shown = ", ".join(names[:SHOWN_CLASSES]).replace("|", "/")
    return f"{len(names)}: {shown}{', ...' if len(names) > SHOWN_CLASSES else ''}"


def _citation(paper: Mapping[str, Any]) -> str:
    """The paper of the model, with links; the Hub lists models by their arXiv links."""
    identifiers = paper.get("paper_ids") or ()
    identifiers = (identifiers,) if isinstance(identifiers, str) else tuple(identifiers)
    sites = {"arxiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
    links = [
        sites[kind.lower()] + number
        for kind, _, number in (identifier.partition(":") for identifier in identifiers)
        if kind.lower() in sites
    ]
    if not links and not paper.get("paper_name"):
        return ""
    return f"\n## Citation\n\n{' '.join(filter(None, (paper.get('paper_name'), *links)))}\n"
