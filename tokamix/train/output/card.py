"""A model card in the Hub's form."""

from typing import Any

import yaml

PIPELINES = {"classify": "image-classification", "segment": "image-segmentation", "detect": "object-detection"}
TIMM = """import timm, tokamix

model = timm.create_model("local-dir:PATH/TO/THIS/FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"""
DENSE = """from tokamix.predict import load_predictor

predictor = load_predictor("PATH/TO/THIS/FOLDER")
prediction = predictor("photo.jpg")
predictor.draw("photo.jpg", prediction).save("overlay.png")"""


def model_card(
    name: str, config: dict[str, Any], recipe: dict[str, Any], data: str, best: dict[str, Any] | None
) -> str:
    """README.md of a run: what the model is, how well it does, how to use it, how it was made."""
    dense = "method" in config
    library = "tokamix" if dense else "timm"
    head = {"library_name": library, "pipeline_tag": PIPELINES[recipe["task"]], "tags": [library, "tokamix"][dense:]}
    if dense:
        what = f"`{config['method']}` with the backbone `{config['backbone']}`"
        size = ""
    else:
        what = f"`{config['architecture']}`"
        size = f", images of {config['pretrained_cfg']['input_size'][-1]} px"
    results = "No evaluation is finished yet."
    if best:
        numbers = {key: value for key, value in best.items() if key not in ("epoch", "averaged")}
        rows = "".join(f"| {key} | {value:.3f} |\n" for key, value in numbers.items())
        kind = " (moving average of the weights)" if best.get("averaged") else ""
        results = (
            f"Best validation results, of epoch {best['epoch'] + 1}{kind}:\n\n| metric | value |\n|---|---|\n{rows}"
        )
    settings = yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}, sort_keys=False, width=1000)
    return f"""---
{yaml.safe_dump(head, sort_keys=False)}---

# {name}

{what}, trained with tokamix on `{data}`: {config["num_classes"]} classes{size}.

{results}
![loss and accuracy over the epochs](curves.png)

## Use

```python
{DENSE if dense else TIMM}
```

## Training

Recipe `{recipe["name"]}` ({recipe["source"]}):

```yaml
{settings}```
"""
