"""The table of speed targets in docs/benchmarks.md, from the rows of results/.

targets.csv, eager.csv and traced.csv hold the current numbers, side_by_side.csv those of commit 777e963.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NOT_MEASURED = "not measured"
GRAPHS = "reduce-overhead"
OURS, TORCHVISION = "mask_rcnn atmnet_tiny", "torchvision maskrcnn_resnet50_fpn"
ATM, STV, AMX, XCIT, DEIT = "atmnet_tiny", "stvit_small", "amixer_tiny", "xcit_small_12_p16_sima", "deit_small_sima"
CONVNEXT, CAFORMER, TIMM_DEIT = "convnext_tiny", "caformer_s18", "deit_small_patch16_224"

Row = dict[str, str]
Setting = tuple[str, str, int, str]  # mode, size, batch, mode of torch.compile
Bar = float | str | None  # a number, the model whose number in the same run has to be reached, or no bar


@dataclass(frozen=True)
class Target:
    """What several models should reach in one setting.

    Attributes:
        title: the setting in words.
        setting: of the rows.
        bars: model -> what it should reach.
        peers: printed beside.
        quantity: column of the rows; images per second should be high, all others low.
        file: the CSV file that holds the rows.
    """

    title: str
    setting: Setting
    bars: dict[str, Bar]
    peers: tuple[str, ...]
    quantity: str = "images_per_second"
    file: str = "targets"


TRAIN_EAGER, INFER_EAGER = ("train", "224", 128, ""), ("infer", "224", 128, "")
TRAIN_GRAPHS, INFER_GRAPHS = ("train", "224", 128, GRAPHS), ("infer", "224", 128, GRAPHS)
DETECT = ("infer", "800x1280", 1)
ALL_BELOW_CONVNEXT: dict[str, Bar] = dict.fromkeys((ATM, STV, AMX, XCIT, DEIT), CONVNEXT)
TARGETS = (
    Target("training, eager", TRAIN_EAGER, {ATM: CONVNEXT, STV: CONVNEXT}, (CONVNEXT, CAFORMER), file="eager"),
    Target(
        "training, eager",
        TRAIN_EAGER,
        {XCIT: 3000, AMX: 2819, DEIT: TIMM_DEIT},
        ("xcit_small_12_p16_224", TIMM_DEIT),
        file="eager",
    ),
    Target(
        "training, `torch.compile` without graphs",
        ("train", "224", 128, "default"),
        {ATM: CONVNEXT, STV: CONVNEXT},
        (CONVNEXT,),
        file="traced",
    ),
    Target("inference, eager", INFER_EAGER, dict.fromkeys((ATM, STV, AMX, XCIT), 10_741.0), (CONVNEXT,), file="eager"),
    Target(
        "one image, eager, ms",
        ("infer", "224", 1, ""),
        {ATM: 7.0, STV: 7.0},
        (CONVNEXT, TIMM_DEIT),
        "milliseconds",
        "eager",
    ),
    Target(
        "one image, graphs, ms",
        ("infer", "224", 1, GRAPHS),
        {ATM: 0.65, STV: 0.65},
        (CONVNEXT, TIMM_DEIT),
        "milliseconds",
    ),
    Target(
        "one image, `graphed` (nothing compiled), ms",
        ("infer", "224", 1, "graphed"),
        {ATM: None, STV: None},
        (CONVNEXT, TIMM_DEIT),
        "milliseconds",
    ),
    Target(
        "inference, graphs",
        INFER_GRAPHS,
        {ATM: 19_000, STV: 19_000, AMX: 17_000, XCIT: 24_000, DEIT: 35_000},
        (CONVNEXT, CAFORMER, "efficientvit_l1"),
    ),
    Target(
        "training, graphs",
        TRAIN_GRAPHS,
        {ATM: 6300, STV: 5800, AMX: 5000, XCIT: 6300, DEIT: 10_800},
        (CONVNEXT, "hiera_tiny_224"),
    ),
    Target("1024 px, batch 8, graphs", ("infer", "1024", 8, GRAPHS), {STV: 900, ATM: 1050}, (CONVNEXT,)),
    Target("first call, inference, s", INFER_GRAPHS, ALL_BELOW_CONVNEXT, (CONVNEXT,), "first_call_s"),
    Target("first call, training, s", TRAIN_GRAPHS, ALL_BELOW_CONVNEXT, (CONVNEXT,), "first_call_s"),
    Target("Mask R-CNN, eager, ms", (*DETECT, ""), {OURS: TORCHVISION}, (TORCHVISION,), "milliseconds"),
    Target("Mask R-CNN, best mode, ms", (*DETECT, "best"), {OURS: TORCHVISION}, (TORCHVISION,), "milliseconds"),
)


def known_values(
    targets: Iterable[Row], eager: Iterable[Row], traced: Iterable[Row]
) -> dict[tuple[Setting, str, str, str], float]:
    """The numbers of the rows by setting, model, quantity and file."""
    values = {}
    for file, rows in (("targets", targets), ("traced", traced)):
        for row in rows:
            if row["backend"] == "operators":  # how compiled models ran before, for comparison
                continue
            detector = row["model"] in (OURS, TORCHVISION)
            compiled = "best" if detector and row["compiled"] else row["compiled"]
            setting = (row["mode"], row["size"], int(row["batch"]), compiled)
            for quantity in ("images_per_second", "milliseconds", "first_call_s"):
                values[setting, row["model"], quantity, file] = float(row[quantity])
    for row in eager:
        if row["light"] == "off":  # the path of plain eager calls is "on"; peers have neither
            continue
        setting = ("train" if row["mode"] == "train" else "infer", "224", int(row["batch"]), "")
        values[setting, row["model"], "images_per_second", "eager"] = float(row["images_per_second"])
        values[setting, row["model"], "milliseconds", "eager"] = float(row["ms"])
    return values


def earlier_values(side_by_side: Iterable[Row]) -> dict[tuple[Setting, str], str]:
    """Images per second of our models at commit 777e963, by setting and model."""
    settings = {"infer": ("infer", "224", 128), "train": ("train", "224", 128), "infer_1024": ("infer", "1024", 8)}
    modes = {"eager": "", "graphs": GRAPHS}
    return {
        ((*settings[row["case"]], modes[row["mode"]]), row["model"]): f"{float(row['images_per_second']):,.0f}"
        for row in side_by_side
        if row["side"] == "ours" and row["mode"] in modes
    }


def targets_table(
    targets: Iterable[Row], eager: Iterable[Row], traced: Iterable[Row], side_by_side: Iterable[Row]
) -> list[str]:
    """Lines of the table: what was measured, the peers in the same run, the bar, and whether it is reached."""
    values, earlier = known_values(targets, eager, traced), earlier_values(side_by_side)
    lines = [
        "| | model | at 777e963 | today | peers in the same run | bar | reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:

        def value(model: str, target: Target = target) -> float | None:
            return values.get((target.setting, model, target.quantity, target.file))

        peers = ", ".join(f"`{peer}` {shown(value(peer))}" for peer in target.peers if value(peer) is not None)
        for model, bar in target.bars.items():
            number, needed = value(model), value(bar) if isinstance(bar, str) else bar
            words = f"`{bar}`" if isinstance(bar, str) else "" if bar is None else shown(bar)
            judged = "" if bar is None else judge(number, needed, target.quantity)
            before = earlier.get((target.setting, model), "") if target.quantity == "images_per_second" else ""
            cells = [before, shown(number), peers or NOT_MEASURED, words, judged]
            lines.append(f"| {target.title} | `{model}` | {' | '.join(cells)} |")
    return lines


def shown(number: float | None) -> str:
    if number is None:
        return NOT_MEASURED
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def judge(number: float | None, needed: float | None, quantity: str) -> str:
    """Whether a bar is reached, with the speed as a multiple of the bar."""
    if number is None or needed is None:
        return NOT_MEASURED
    ratio = number / needed if quantity == "images_per_second" else needed / number
    return f"{'**yes**' if ratio >= 1 else 'no'}, {ratio:.2f}x"
