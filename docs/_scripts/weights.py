"""Write the table of docs/weights.md from the weights that come with the package.

python docs/_scripts/weights.py                                               # the table
python docs/_scripts/weights.py imagenette=VAL.npz cifar100=TEST.npz          # evaluate the missing ones in fp32 first
python docs/_scripts/weights.py --check                                       # whether the page is up to date

The accuracies in fp32 are those of the files as they ship; they are kept in results/weights.csv.
"""

import csv
import math
import sys
from pathlib import Path

from tokamix.models.shipped import FOLDER, shipped_weights

PAGE = Path(__file__).parents[1] / "weights.md"
MEASURED = Path(__file__).parents[2] / "results" / "weights.csv"


def interval(percent: float, count: int) -> str:
    """Wilson's 95 % interval of an accuracy measured on `count` images."""
    p, z2 = percent / 100, 1.96**2
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (p * (1 - p) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return f"{100 * (middle - half):.1f} to {100 * (middle + half):.1f}"


def read_measured() -> dict[str, float]:
    """Top-1 in fp32 by name."""
    if not MEASURED.is_file():
        return {}
    with MEASURED.open() as file:
        return {row["model"]: float(row["top1"]) for row in csv.DictReader(file)}


def measure(data: dict[str, str]) -> None:
    """Evaluate the weights of some data sets in fp32; each result is written at once."""
    import tokamix

    values = read_measured()
    for name, row in shipped_weights().items():
        if row["data"]["name"] not in data or name in values:
            continue
        result = tokamix.evaluate(name, data[row["data"]["name"]], precision="fp32")
        if result.num_images != row["data"]["test_images"]:
            raise ValueError(f"{name} was tested on {row['data']['test_images']} images, got {result.num_images}")
        values[name] = result["top1"]
        print(name, f"{values[name]:.2f}", flush=True)
        with MEASURED.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("model", "top1"))
            writer.writerows((name, f"{values[name]:.4f}") for name in shipped_weights() if name in values)


def table() -> str:
    lines = [
        "| name | top-1, training | top-1, fp32 | 95 % interval | images | parameters | file | training |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    measured = read_measured()
    for name, row in shipped_weights().items():
        data, exact = row["data"], measured.get(name)
        size = (FOLDER / f"{name}.safetensors").stat().st_size
        cells = [f"`{name}`", f"{row['top1']:.2f}", "" if exact is None else f"{exact:.2f}"]
        cells += [interval(row["top1"] if exact is None else exact, data["test_images"])]
        cells += [f"{data['test_images']:,}", f"{row['parameters'] / 1e6:.2f} M", f"{size / 1e6:.1f} MB"]
        lines.append(f"| {' | '.join(cells)} | {row['epochs']} epochs, {row['seconds']} s |")
    return "\n".join(lines)


def fill(page: str) -> str:
    """The page with the table between its two marks written anew."""
    before, start, rest = page.partition("<!-- weights -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (start and end):
        raise ValueError("the page has no <!-- weights --> and <!-- end -->")
    return f"{before}{start}\n{table()}\n\n{end}{after}"


if __name__ == "__main__":
    current = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if fill(current) == current else "docs/weights.md is out of date: python docs/_scripts/weights.py")
    measure(dict(argument.split("=", 1) for argument in sys.argv[1:]))
    PAGE.write_text(fill(current))
