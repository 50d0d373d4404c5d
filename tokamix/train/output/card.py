"""Model cards in the format of the Hugging Face Hub."""

from typing import Any

import yaml

from tokamix.recipes import Recipe

PIPELINES = {"classify": "image-classification", "segment": "image-segmentation", "detect": "object-detection"}
TIMM = """import timm, tokamix

model = timm.create_model("local-dir:PATH/TO/THIS/FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"""
DENSE = """from tokamix.predict import load_predictor

predictor = load_predictor("PATH/TO/THIS/FOLDER")
prediction = predictor("photo.jpg")
predictor.draw("photo.jpg", prediction).save("overlay.png")"""


def create_card(name: str, config: dict[str, Any], recipe: Recipe, data: str, best: dict[str, Any] | None) -> str:
    """Create README.md of a run: the model, its results, its use and its training."""
    dense = "method" in config
    library = "tokamix" if dense else "timm"
    head = {"library_name": library, "pipeline_tag": PIPELINES[recipe.task], "tags": [library, "tokamix"][dense:]}
    if dense:
        model = f"`{config['method']}` with the backbone `{config['backbone']}`"
        size = ""
    else:
        model = f"`{config['architecture']}`"
        size = f", images of {config['pretrained_cfg']['input_size'][-1]} px"
    results = "No evaluation has finished yet."
    if best:
        numbers = {key: value for key, value in best.items() if key not in ("epoch", "averaged")}
        rows = "".join(f"| {key} | {value:.3f} |\n" for key, value in numbers.items())
        kind = " (EMA of the weights)" if best.get("averaged") else ""
        which = "Best validation results, of" if recipe.select == "best" else "Validation results of the last"
        results = f"{which} epoch {best['epoch']}{kind}:\n\n| metric | value |\n|---|---|\n{rows}"
    settings = yaml.safe_dump({k: v for k, v in recipe.to_dict().items() if v is not None}, sort_keys=False, width=1000)
    return f"""---
{yaml.safe_dump(head, sort_keys=False)}---

# {name}

{model}, trained with tokamix on `{data}`: {config["num_classes"]} classes{size}.

{results}
![loss and metrics over the epochs](curves.png)

## Use

```python
{DENSE if dense else TIMM}
```

## Training

Recipe `{recipe.name}` ({recipe.source}):

```yaml
{settings}```
"""
