"""A run's curves as a picture."""

from pathlib import Path
from typing import Any


def draw_curves(epochs: list[dict[str, Any]], path: Path) -> None:
    """Loss and accuracy over the epochs."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no window

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    x = [row["epoch"] + 1 for row in epochs]
    named = {
        "loss": {"train_loss": "training", "loss": "validation", "ema_loss": "validation, averaged weights"},
        "top-1 accuracy (%)": {
            "train_top1": "training",
            "top1": "validation",
            "ema_top1": "validation, averaged weights",
        },
    }
    for panel, (title, lines) in zip(panels, named.items(), strict=True):
        for key, label in lines.items():
            if key in epochs[-1]:
                marker = "." if len(x) < 30 else None
                panel.plot(x, [row.get(key) for row in epochs], label=label, marker=marker, linewidth=1.6)
        panel.set_xlabel("epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_title(title, fontsize=10, loc="left")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.lines:
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png", dpi=140)
