"""Robustness of the shipped networks: softmax with and without context broadcasting, and SimA, on Imagenette at 96 px.

python benchmarks/robustness.py --data imagenette_96px_train.npz,imagenette_96px_val.npz --limit 500

Writes results/robustness.csv, docs/robustness.png and the table of docs/guides/robustness.md. Each model's scores are
kept in runs/robustness as soon as it is finished; the same command continues after an interruption. A CPU core takes 2
seconds for each image and model with all severities, 1.2 with `--severities 1 3 5`.
"""

import argparse
import re
import shutil
from pathlib import Path

import torch

from tokamix.evaluate.robustness import ModelRobustness, RobustnessResult, evaluate_robustness
from tokamix.evaluate.robustness.calibration import Calibration
from tokamix.evaluate.robustness.conditions import Condition
from tokamix.evaluate.robustness.report import draw_robustness, group_conditions, mean_scores, write_csv
from tokamix.evaluate.robustness.statistics import difference_interval

ROOT = Path(__file__).parent.parent
MODELS = {
    "softmax": "pyramid_nano_softmax.imagenette",
    "softmax with CB": "pyramid_nano_softmax.cb_imagenette",
    "SimA": "pyramid_nano_sima.imagenette",
}


def measure(title: str, arguments: argparse.Namespace) -> RobustnessResult:
    """The result of one model, from the cache if it is there."""
    severities = "".join(map(str, arguments.severities))
    path = arguments.cache / f"{MODELS[title]}-{arguments.limit or 'all'}-{severities}.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        scores = {Condition(*condition): values for condition, values in saved["scores"]}
        row = ModelRobustness(title, scores, Calibration(*saved["calibration"]))
        return RobustnessResult([row], *saved["data"])
    options = {key: getattr(arguments, key) for key in ("limit", "device", "batch_size", "severities")}
    result = evaluate_robustness({title: MODELS[title]}, arguments.data, progress=print, **options)
    row = result.models[0]
    data = (Path(result.data.rpartition(",")[2]).stem, result.num_images, result.total_images, result.split)
    scores = [(tuple(condition), values) for condition, values in row.scores.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"scores": scores, "calibration": tuple(row.calibration), "data": data}, path)
    return measure(title, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="Imagenette at 96 px, as for `tokamix train`")
    parser.add_argument("--limit", type=int, help="images; default: all")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--device")
    parser.add_argument("--cache", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--only", choices=MODELS, help="measure one model and stop, to share the work among processes")
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments.only, arguments)
        return
    results = [measure(title, arguments) for title in MODELS]
    first = results[0]
    together = RobustnessResult(
        [result.models[0] for result in results], first.data, first.num_images, first.total_images, first.split
    )
    write_csv(together, arguments.cache)
    shutil.copy(arguments.cache / "results.csv", ROOT / "results" / "robustness.csv")
    draw_robustness(together, ROOT / "docs" / "robustness.png")
    page = ROOT / "docs" / "guides" / "robustness.md"
    text = f"<!-- measured -->\n\n{table(together)}\n<!-- end -->"
    page.write_text(re.sub("<!-- measured -->.*?<!-- end -->", lambda _: text, page.read_text(), flags=re.DOTALL))


def table(result: RobustnessResult) -> str:
    """Markdown: accuracies of all models, and differences to the first with their intervals."""
    first = result.models[0]
    titles = [first.title, *(f"{row.title} | difference" for row in result.models[1:])]
    lines = [
        f"{result.num_images:,} of Imagenette's {result.total_images:,} validation images at 96 px, one",
        "",
    ]
    lines[0] += " training run of each model; accuracy in percent, paired differences with their 95 % intervals:"
    lines += [f"| | {' | '.join(titles)} |", "|---" + "|---:" * (2 * len(result.models) - 1) + "|"]
    for label, chosen in group_conditions(list(first.scores)).items():
        base = mean_scores(first, chosen)
        cells = [f"{100 * base.mean():.1f}"]
        for row in result.models[1:]:
            mean, low, high = difference_interval(mean_scores(row, chosen), base)
            cells.append(f"{100 * mean_scores(row, chosen).mean():.1f} | {mean:+.1f} [{low:+.1f}, {high:+.1f}]")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    errors = [f"{row.calibration.ece:.1f}" for row in result.models]
    lines.append(f"| ECE | {errors[0]} | " + " | ".join(f"{error} |" for error in errors[1:]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
