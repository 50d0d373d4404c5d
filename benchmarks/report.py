"""Turn results/*.csv into docs/benchmarks.md and its plots: python benchmarks/report.py."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "results", ROOT / "docs"

# The authors' published code on the same GPU, images per second (docs/benchmarks.md says how it was run).
AUTHORS = {
    ("atmnet_tiny", "infer", 224): 5612,
    ("stvit_small", "infer", 224): 6734,
    ("amixer_tiny", "infer", 224): 8743,
    ("xcit_small_12_p16_sima", "infer", 224): 6127,
    ("atmnet_tiny", "train", 224): 826,
    ("stvit_small", "train", 224): 889,
    ("amixer_tiny", "train", 224): 1159,
    ("xcit_small_12_p16_sima", "train", 224): 1722,
    ("atmnet_tiny", "infer", 1024): 145,
    ("stvit_small", "infer", 1024): 41,
}
AUTHORS_GB = {"atmnet_tiny": 12.2, "stvit_small": 11.6, "amixer_tiny": 13.8, "xcit_small_12_p16_sima": 9.1}
METHODS = {"mask_rcnn": "Mask R-CNN", "semantic_fpn": "Semantic FPN"}
GRAPHS = "reduce-overhead"  # the mode of torch.compile that replays CUDA graphs
COLORS = {
    "softmax": "#444444",
    "sima": "#d1495b",
    "active_token": "#00798c",
    "super_token": "#edae49",
    "weight_mixing": "#66a182",
    "context_broadcast": "#8d6a9f",
}


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def models_table(mode: str, size: int) -> list[str]:
    lines = [
        "| model | images / s, CUDA graphs | without | authors' code | times | peak memory (GB) |",
        "|---|---|---|---|---|---|",
    ]
    measured = [r for r in rows("models") if (r["mode"], int(r["size"])) == (mode, size)]
    plain = {r["model"]: r for r in measured if r["compiled"] == "default"}
    for row in measured:
        if row["compiled"] != GRAPHS:
            continue
        name, rate, authors = row["model"], float(row["images_per_second"]), AUTHORS.get((row["model"], mode, size))
        without = f"{float(plain[name]['images_per_second']):,.0f}" if name in plain else ""
        memory = f"{float(plain[name]['peak_gb']):.1f}" if name in plain else ""
        if mode == "train" and name in AUTHORS_GB:
            memory += f" (authors {AUTHORS_GB[name]})"
        beside = f"{authors:,} | {rate / authors:.1f}x" if authors else " | "
        lines.append(f"| `{name}` | **{rate:,.0f}** | {without} | {beside} | {memory} |")
    return lines


def ops_table() -> list[str]:
    lines = [
        "| operator | case | tokens | backend | forward | called | fewest bytes | + backward | called | peak (GB) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ("graph_ms", "forward_ms", "limit_ms", "training_graph_ms", "training_ms", "peak_gb")
    for row in rows("ops"):
        numbers = [f"{float(row[k]):.3f}" for k in keys]
        lines.append(
            f"| {row['op']} | {row['case']} | {int(row['tokens']):,} | {row['backend']} | {' | '.join(numbers)} |"
        )
    return lines


def dense_table() -> list[str]:
    lines = [
        "| network | images | eager | with `deform_conv2d` | recorded | with `deform_conv2d` | times |",
        "|---|---|---|---|---|---|---|",
    ]
    modes: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in (row for row in rows("dense") if row["precision"] == "autocast"):
        modes.setdefault((row["method"], row["batch"], row["size"]), {})[row["mode"]] = row
    for (method, batch, size), by_mode in modes.items():
        numbers = [by_mode[mode][side] for mode in ("eager", "recorded") for side in ("ours_ms", "deform_ms")]
        numbers[2] = f"**{numbers[2]}**"
        times = by_mode["recorded"]["times_as_fast"]
        lines.append(f"| {METHODS[method]} | {batch} x {size} | {' | '.join(numbers)} | {times}x |")
    return lines


def scaling_plot() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for op in COLORS:
        points = [r for r in rows("scaling") if r["op"] == op and r["backend"] in ("triton", "torch")]
        tokens = [int(r["tokens"]) for r in points]
        for axis, key in zip(axes, ("graph_ms", "peak_gb"), strict=True):
            axis.plot(tokens, [float(r[key]) for r in points], "o-", color=COLORS[op], label=op.replace("_", " "), ms=4)
        if op != "softmax":  # which has the limit of SimA
            axes[0].plot(tokens, [float(r["limit_ms"]) for r in points], ":", color=COLORS[op], lw=1)
    axes[0].plot([], [], ":", color="#777777", lw=1, label="fewest bytes of each")
    for axis, title in zip(axes, ("forward, ms", "peak memory of forward + backward, GB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.grid(alpha=0.25, which="both", lw=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("Cost against size: batch 4, 384 channels, bfloat16, one H200", fontsize=12)
    figure.savefig(DOCS / "scaling.png", dpi=150)


def models_plot() -> None:
    picked = [r for r in rows("models") if (r["mode"], r["size"], r["compiled"]) == ("infer", "224", GRAPHS)]
    picked.sort(key=lambda r: float(r["images_per_second"]))
    names = [r["model"].removesuffix("_patch16_224").removesuffix("_patch4_window7_224") for r in picked]
    authors = [AUTHORS.get((r["model"], "infer", 224)) for r in picked]
    figure, axis = plt.subplots(figsize=(8, 0.5 * len(picked) + 1.2), layout="constrained")
    ours = [a is not None or "sima" in r["model"] for r, a in zip(picked, authors, strict=True)]
    rates = [float(r["images_per_second"]) for r in picked]
    axis.barh(names, rates, color=["#00798c" if o else "#b8c4c8" for o in ours])
    marked = [(a, n) for a, n in zip(authors, names, strict=True) if a]
    axis.plot(*zip(*marked, strict=True), "D", color="#d1495b", ms=6, label="authors' code")
    axis.set_title("Images per second, inference at 224 px on one H200 (grey: timm's)", fontsize=11)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(DOCS / "models.png", dpi=150)


def main() -> None:
    scaling_plot()
    models_plot()
    environment = (RESULTS / "environment.txt").read_text().strip()
    page = (DOCS / "benchmarks.in.md").read_text()
    for mark, lines in {
        "INFER": models_table("infer", 224),
        "TRAIN": models_table("train", 224),
        "LARGE": models_table("infer", 1024),
        "DENSE": dense_table(),
        "OPS": ops_table(),
        "ENVIRONMENT": [environment],
    }.items():
        page = page.replace(f"<{mark}>", "\n".join(lines))
    (DOCS / "benchmarks.md").write_text(page)


if __name__ == "__main__":
    main()
