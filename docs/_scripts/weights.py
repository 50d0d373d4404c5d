"""Write the table of docs/weights.md from the weights that come with the package: python docs/_scripts/weights.py."""

import math
import sys
from pathlib import Path

from tokamix.models.shipped import FOLDER, shipped_weights

PAGE = Path(__file__).parents[1] / "weights.md"


def interval(percent: float, count: int) -> str:
    """Wilson's 95 % interval of an accuracy measured on `count` images."""
    p, z2 = percent / 100, 1.96**2
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (p * (1 - p) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return f"{100 * (middle - half):.1f} to {100 * (middle + half):.1f}"


def table() -> str:
    lines = [
        "| name | top-1 | 95 % interval | images | parameters | file | training |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, row in shipped_weights().items():
        data = row["data"]
        size = (FOLDER / f"{name}.safetensors").stat().st_size
        cells = [f"`{name}`", f"{row['top1']:.2f}", interval(row["top1"], data["test_images"])]
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
    PAGE.write_text(fill(current))
