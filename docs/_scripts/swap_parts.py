"""Draw docs/swap_parts.png, the picture of docs/guides/swap.md: python docs/_scripts/swap_parts.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).parents[1] / "swap_parts.png"
PARTS = (
    "windows",
    "query and key\nprojections",
    "q/k norms,\nrotary",
    "relative\nposition bias",
    "token mixing",
    "value\nprojection",
    "gate",
    "output\nprojection",
)
KEPT, NEW, CARRIED, DROPPED = "kept", "the mixer's own", "carried over", "dropped"
COLORS = {KEPT: "#66a182", NEW: "#00798c", CARRIED: "#edae49", DROPPED: "#d9d9d9"}
MIXERS = {
    "softmax": (KEPT, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT),
    "sima, xca, linformer, performer,\nnystrom, efficient, cosformer,\nsuper_token": (
        *(KEPT, KEPT, KEPT, DROPPED, NEW, KEPT, KEPT, KEPT),
    ),
    "weight_mixing": (KEPT, DROPPED, DROPPED, CARRIED, NEW, NEW, DROPPED, KEPT),
    "active_token, soft": (KEPT, DROPPED, DROPPED, DROPPED, NEW, NEW, DROPPED, KEPT),
    "pooling, identity": (KEPT, DROPPED, DROPPED, DROPPED, NEW, DROPPED, DROPPED, DROPPED),
}


def main() -> None:
    """A row for each kind of mixer, a column for each part of the attention."""
    figure, axis = plt.subplots(figsize=(11.5, 3.9), layout="constrained")
    for row, (mixers, fates) in enumerate(MIXERS.items()):
        axis.text(-0.1, -row, mixers, ha="right", va="center", fontsize=9, family="monospace")
        for column, fate in enumerate(fates):
            box = FancyBboxPatch((column + 0.05, -row - 0.36), 0.9, 0.72, "round,pad=0,rounding_size=0.08", lw=0)
            box.set_facecolor(COLORS[fate])
            axis.add_patch(box)
            dark = fate in (KEPT, NEW)
            axis.text(
                column + 0.5, -row, fate, ha="center", va="center", fontsize=8, color="white" if dark else "#333333"
            )
    for column, part in enumerate(PARTS):
        axis.text(column + 0.5, 0.5, part, ha="center", va="bottom", fontsize=9, weight="bold")
    axis.set(xlim=(-2.6, len(PARTS)), ylim=(0.6 - len(MIXERS), 1.1))
    axis.axis("off")
    figure.savefig(PICTURE, dpi=140)


if __name__ == "__main__":
    main()
