"""The learning curves of a run as an image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

KINDS = {"train_": "training", "": "validation", "ema_": "validation, EMA"}


def draw_curves(epochs: list[dict[str, Any]], path: Path, names: Mapping[str, str]) -> None:
    """Draw loss and metrics over the epochs; `names` maps metrics to display names."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    lines = {
        "loss": {prefix + "loss": kind for prefix, kind in KINDS.items()},
        f"{' and '.join(names.values())} (%)": {
            prefix + key: kind + (f", {label}" if len(names) > 1 else "")
            for key, label in names.items()
            for prefix, kind in KINDS.items()
        },
    }
    for panel, (title, keys) in zip(panels, lines.items(), strict=True):
        for key, label in keys.items():
            points = [(row["epoch"], row[key]) for row in epochs if key in row]  # not every epoch is evaluated
            if points:
                panel.plot(
                    *zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None, linewidth=1.6
                )
        panel.set_xlabel("epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_title(title, fontsize=10, loc="left")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.lines:
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png", dpi=140)
