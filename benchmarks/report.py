"""Turn results/*.csv into docs/benchmarks.md and its plots: python benchmarks/report.py."""

import csv
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from targets import NOT_MEASURED, targets_table

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "results", ROOT / "docs"

METHODS = {"mask_rcnn": "Mask R-CNN", "semantic_fpn": "Semantic FPN"}
GRAPHS = "reduce-overhead"  # the mode of torch.compile that replays CUDA graphs
COLORS = {
    "SimA": "#d1495b",
    "active tokens": "#00798c",
    "super tokens": "#edae49",
    "weight mixing": "#66a182",
    "softmax attention": "#222222",
    "Swin windows": "#777777",
    "ConvNeXt block": "#aaaaaa",
}
PEERS = ("softmax attention", "Swin windows", "ConvNeXt block")
# ImageNet top-1 that the papers print; none is known for AMixer-T
PRINTED_TOP1 = {"stvit_small": 83.6, "xcit_small_12_p16_sima": 82.1, "atmnet_tiny": 82.0, "deit_small_sima": 79.8}
# timm's models of the figure, and where their labels stand: points to the right and up
TIMM_PLACES = {
    "caformer_s18": (-8, 4),
    "efficientvit_l1": (8, 0),
    "nextvit_small": (8, 5),
    "convnext_tiny": (-8, -2),
    "inception_next_tiny": (8, -6),
    "davit_tiny": (8, 6),
    "hiera_tiny": (6, 11),
    "mambaout_tiny": (6, -9),
    "rdnet_tiny": (-8, 4),
    "fastvit_sa24": (-8, -6),
    "swin_tiny": (-8, 0),
    "deit_small": (-8, 0),
}
PANELS = {
    "forward, ms": "graph_ms",
    "forward and backward, ms": "training_graph_ms",
    "peak memory of forward, GB": "forward_gb",
    "peak memory of forward and backward, GB": "peak_gb",
}


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a file; none if it was not measured yet."""
    path = RESULTS / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def models_table(mode: str, size: int) -> list[str]:
    lines = [
        "| model | images / s, CUDA graphs | without | peak memory (GB) |",
        "|---|---|---|---|",
    ]
    measured = [r for r in rows("models") if (r["mode"], int(r["size"])) == (mode, size)]
    plain = {r["model"]: r for r in measured if r["compiled"] == "default"}
    for row in measured:
        if row["compiled"] != GRAPHS:
            continue
        name, rate = row["model"], float(row["images_per_second"])
        without = f"{float(plain[name]['images_per_second']):,.0f}" if name in plain else ""
        memory = f"{float(plain[name]['peak_gb']):.1f}" if name in plain else ""
        lines.append(f"| `{name}` | **{rate:,.0f}** | {without} | {memory} |")
    return lines


class Sides:
    """results/side_by_side.csv: our models, the authors' code and timm's models, all measured in one run."""

    def __init__(self) -> None:
        self.rows = rows("side_by_side")

    def row(self, case: str, model: str, side: str, mode: str) -> dict[str, str]:
        keys = (case, model, side, mode)
        return next((r for r in self.rows if (r["case"], r["model"], r["side"], r["mode"]) == keys), {})

    def rate(self, *keys: str) -> float:
        return float(self.row(*keys).get("images_per_second") or 0)

    def cell(self, *keys: str) -> str:
        row, rate = self.row(*keys), self.rate(*keys)
        number = f"{rate:,.0f}" if rate else ""
        gib = f"{row['gib']} GiB" if row.get("gib") else ""
        remarks = "; ".join(filter(None, (gib, row.get("note"))))
        return f"{number} ({remarks})" if number and remarks else number or remarks

    def authors_best(self, case: str, model: str) -> str:
        """The authors' fastest mode: CUDA graphs, compiled without them, or an explanation."""
        return self.cell(case, model, "authors", "graphs") or self.cell(case, model, "authors", "compiled")

    def models(self, case: str, side: str) -> list[str]:
        return list(dict.fromkeys(r["model"] for r in self.rows if (r["case"], r["side"]) == (case, side)))

    def authors_table(self) -> list[str]:
        """Both sides in the best mode, and both sides eager; a ratio only where the modes and sizes agree."""
        lines = [
            "| | model | ours, CUDA graphs | authors, best mode | ratio | ours, eager | authors, eager | ratio |",
            "|---|---|---|---|---|---|---|---|",
        ]
        titles = {"infer": "inference", "train": "training", "infer_1024": "inference, 1024 px, batch 8"}
        for case, title in titles.items():
            for model in self.models(case, "ours"):
                cells = [self.cell(case, model, "ours", "graphs"), self.authors_best(case, model)]
                cells += [self.ratio(case, model, "graphs")]
                cells += [self.cell(case, model, side, "eager") for side in ("ours", "authors")]
                cells += [self.ratio(case, model, "eager")]
                lines.append(f"| {title} | `{model}` | {' | '.join(cells)} |")
        return lines

    def ratio(self, case: str, model: str, mode: str) -> str:
        ours, authors = (self.rate(case, model, side, mode) for side in ("ours", "authors"))
        if not (ours and authors) or model == "amixer_tiny":  # AMixer's released configuration is a different network
            return ""
        ratio = ours / authors
        return f"{ratio:.2f}x" if ratio < 1.8 else f"{ratio:.1f}x"

    def peers_table(self) -> list[str]:
        lines = [
            "| timm model | top-1 | inference, graphs | training, graphs | inference, eager | training, eager |",
            "|---|---|---|---|---|---|",
        ]
        for model in self.models("infer", "timm"):
            top1 = self.row("infer", model, "timm", "graphs")["note"]
            kinds = [(case, mode) for mode in ("graphs", "eager") for case in ("infer", "train")]
            rates = [self.rate(case, model, "timm", mode) for case, mode in kinds]
            lines.append(f"| `{model}` | {top1} | {' | '.join(f'{r:,.0f}' if r else '' for r in rates)} |")
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
        "| network | images | eager | with `deform_conv2d` | graphed | with `deform_conv2d` | times |",
        "|---|---|---|---|---|---|---|",
    ]
    modes: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in (row for row in rows("dense") if row["precision"] == "autocast"):
        modes.setdefault((row["method"], row["batch"], row["size"]), {})[row["mode"]] = row
    for (method, batch, size), by_mode in modes.items():
        numbers = [by_mode[mode][side] for mode in ("eager", "graphed") for side in ("ours_ms", "deform_ms")]
        numbers[2] = f"**{numbers[2]}**"
        times = by_mode["graphed"]["times_as_fast"]
        lines.append(f"| {METHODS[method]} | {batch} x {size} | {' | '.join(numbers)} | {times}x |")
    return lines


def scaling_section() -> list[str]:
    """Draw the mixers, and say what the picture shows; the earlier picture of operators stays until they are there."""
    points = [r for r in rows("scaling") if r["op"] in COLORS]
    picture = "![Cost against size](scaling.png)"
    if not points:
        return [
            picture,
            "",
            f"Operators alone, batch 4, 384 channels, 15 November 2026. Whole mixers with peers: {NOT_MEASURED}.",
            "",
            *images_table(),
        ]
    scaling_plot(points)
    first, last = (pick(int(r["tokens"]) for r in points) for pick in (min, max))
    date, processor, torch = (points[-1][key] for key in ("date", "processor", "torch"))
    return [
        picture,
        "",
        f"Whole mixers with their projections from {first:,} to {last:,} tokens, batch 4, 384 channels, 6 heads,"
        " bfloat16, replayed from CUDA graphs without compilation; ours solid, peers dashed. Softmax attention is"
        " PyTorch's fused one (FlashAttention), Swin's windows are timm's with fused attention, and ConvNeXt's block"
        " contains its MLP, which the others do not have. Super tokens have no projections of single tokens. Mixers"
        " with windows get the next smaller grid that is a multiple of 14. Dotted: the time that the fewest bytes (one"
        f" read and one write of the tokens) need. {processor}, torch {torch}, {date} (`results/scaling.csv`).",
        "",
        *images_table(),
    ]


def scaling_plot(points: list[dict[str, str]]) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for name, color in COLORS.items():
        own = sorted((r for r in points if r["op"] == name), key=lambda r: int(r["tokens"]))
        tokens = [int(r["tokens"]) for r in own]
        for axis, key in zip(axes.flat, PANELS.values(), strict=True):
            values = [float(r[key]) for r in own]
            axis.plot(tokens, values, "o--" if name in PEERS else "o-", color=color, label=name, ms=4)
    limits = sorted({(int(r["tokens"]), float(r["limit_ms"])) for r in points})
    axes[0, 0].plot(*zip(*limits, strict=True), ":", color="#777777", lw=1, label="fewest bytes")
    for axis, title in zip(axes.flat, PANELS, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.grid(alpha=0.25, which="both", lw=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle("Cost against size: batch 4, 384 channels, bfloat16, one H200", fontsize=12)
    figure.savefig(DOCS / "scaling.png", dpi=110)


def images_table() -> list[str]:
    """Models by the largest image that fits: milliseconds and peak memory of one image."""
    measured = {(r["model"], r["mode"], int(r["size"])): r for r in rows("images")}
    sizes = sorted({size for _, _, size in measured})
    names = list(dict.fromkeys(model for model, _, _ in measured))
    if not names:
        return [f"Images up to 4,096 px: {NOT_MEASURED}."]
    headings = [f"{title}, {size:,} px" for title in ("inference", "training") for size in sizes]
    lines = [
        "One image, nothing compiled, milliseconds (peak memory in GB), replayed from a CUDA graph where the model can"
        " be captured (`results/images.csv`):",
        "",
        f"| model | {' | '.join(headings)} | largest image that fits, inference / training |",
        f"|---|{'---|' * (len(headings) + 1)}",
    ]
    for name in names:
        cells = [image_cell(measured.get((name, mode, size))) for mode in ("infer", "train") for size in sizes]
        largest = [
            max((s for s in sizes if (r := measured.get((name, mode, s))) and r["fits"] == "True"), default=0)
            for mode in ("infer", "train")
        ]
        fits = " / ".join(f"{size:,} px" if size else NOT_MEASURED for size in largest)
        lines.append(f"| `{name}` | {' | '.join(cells)} | {fits} |")
    return lines


def image_cell(row: dict[str, str] | None) -> str:
    if row is None:
        return NOT_MEASURED
    if row["fits"] != "True":
        return "does not fit"
    graph = float(row["graph_ms"])
    milliseconds = float(row["milliseconds"]) if math.isnan(graph) else graph
    return f"{milliseconds:,.1f} ({float(row['peak_gb']):.1f})"


def models_plot(sides: Sides) -> None:
    """Our models, the authors' code and timm's peers: one run, every side with CUDA graphs where it can use them."""
    names = sides.models("infer", "ours")
    peers = ("convnext_tiny", "caformer_s18", "swin_tiny", "deit_small")
    kinds = {**dict.fromkeys(names, "ours"), **dict.fromkeys(peers, "timm")}
    picked = sorted(kinds, key=lambda name: sides.rate("infer", name, kinds[name], "graphs"))
    rates = [sides.rate("infer", name, kinds[name], "graphs") for name in picked]
    figure, axis = plt.subplots(figsize=(8, 0.42 * len(picked) + 1.3), layout="constrained")
    axis.barh(picked, rates, color=["#00798c" if kinds[name] == "ours" else "#b8c4c8" for name in picked])
    for mode, fill, label in (
        ("graphs", "#d1495b", "authors' code, CUDA graphs"),
        ("compiled", "white", "authors' code, without graphs (released AMixer)"),
    ):
        marked = [(sides.rate("infer", name, "authors", mode), name) for name in picked]
        points = [(rate, name) for rate, name in marked if rate]
        axis.plot(*zip(*points, strict=True), "D", color=fill, markeredgecolor="#d1495b", ms=6, ls="", label=label)
    eager = [sides.rate("infer", name, kinds[name], "eager") for name in picked]
    shown = [(rate, name) for rate, name in zip(eager, picked, strict=True) if rate]
    axis.plot(*zip(*shown, strict=True), "|", color="#222222", ms=14, mew=2, ls="", label="the same model, eager")
    axis.set_title("Images per second with CUDA graphs, 224 px, batch 128, one H200 (grey: timm)", fontsize=11)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(DOCS / "models.png", dpi=150)


def accuracy_plot(sides: Sides) -> None:
    """ImageNet top-1, as the papers or timm print it, against images per second with CUDA graphs."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained", sharey=True)
    for axis, (case, title) in zip(axes, {"infer": "inference", "train": "training"}.items(), strict=True):
        peers = {name: float(sides.row("infer", name, "timm", "graphs")["note"] or 0) for name in TIMM_PLACES}
        for color, side, accuracies in (("#b8c4c8", "timm", peers), ("#00798c", "ours", PRINTED_TOP1)):
            points = [(name, sides.rate(case, name, side, "graphs"), top1) for name, top1 in accuracies.items()]
            for name, rate, top1 in (point for point in points if point[1]):
                axis.plot(rate, top1, "o", color=color, ms=9 if side == "ours" else 7)
                dx, dy = TIMM_PLACES.get(name, (9, -4 if name == "atmnet_tiny" else 4))
                style = {"weight": "bold"} if side == "ours" else {"color": "#555555"}
                where = {"xytext": (dx, dy), "textcoords": "offset points", "ha": "left" if dx > 0 else "right"}
                axis.annotate(name, (rate, top1), fontsize=8, va="center", **where, **style)
        axis.set(title=title, xlabel="images per second with CUDA graphs, 224 px, batch 128")
        low, high = axis.get_xlim()
        axis.set_xlim(low - 0.22 * (high - low), high + 0.22 * (high - low))  # room for the labels
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("ImageNet top-1 in %, as printed")
    figure.suptitle("Accuracy against speed on one H200: tokamix (teal) and timm (grey)", fontsize=12)
    figure.savefig(DOCS / "accuracy_speed.png", dpi=110)


def main() -> None:
    sides = Sides()
    models_plot(sides)
    accuracy_plot(sides)
    environment = (RESULTS / "environment.txt").read_text().strip()
    page = (DOCS / "benchmarks.in.md").read_text()
    for mark, lines in {
        "AUTHORS": sides.authors_table(),
        "PEERS": sides.peers_table(),
        "INFER": models_table("infer", 224),
        "TRAIN": models_table("train", 224),
        "LARGE": models_table("infer", 1024),
        "DENSE": dense_table(),
        "OPS": ops_table(),
        "SCALING": scaling_section(),
        "TARGETS": targets_table(rows("targets"), rows("eager"), rows("traced"), rows("side_by_side")),
        "ENVIRONMENT": [environment],
    }.items():
        page = page.replace(f"<{mark}>", "\n".join(lines))
    (DOCS / "benchmarks.md").write_text(page)


if __name__ == "__main__":
    main()
