"""A model card in the Hub's form."""

from typing import Any

import yaml

SHOWN = ("top1", "top5", "loss")


def model_card(
    name: str, config: dict[str, Any], recipe: dict[str, Any], data: str, best: dict[str, Any] | None
) -> str:
    """README.md of a run: what the model is, how well it does, how to use it, how it was made."""
    architecture = config["architecture"]
    head = {"library_name": "timm", "pipeline_tag": "image-classification", "tags": ["timm", "tokamix"]}
    size = config["pretrained_cfg"]["input_size"][-1]
    results = "No evaluation is finished yet."
    if best:
        rows = "".join(f"| {key} | {best[key]:.3f} |\n" for key in SHOWN if key in best)
        kind = " (moving average of the weights)" if best.get("averaged") else ""
        results = (
            f"Best validation results, of epoch {best['epoch'] + 1}{kind}:\n\n| metric | value |\n|---|---|\n{rows}"
        )
    settings = yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}, sort_keys=False, width=1000)
    return f"""---
{yaml.safe_dump(head, sort_keys=False)}---

# {name}

`{architecture}`, trained with tokamix on `{data}`: {config["num_classes"]} classes, images of {size} px.

{results}
![loss and accuracy over the epochs](curves.png)

## Use

```python
import timm, tokamix

model = timm.create_model("local-dir:PATH/TO/THIS/FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

## Training

Recipe `{recipe["name"]}` ({recipe["source"]}):

```yaml
{settings}```
"""
