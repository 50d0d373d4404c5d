"""Count all models except the comparison grid and write tokamix/models/sizes.csv: python benchmarks/sizes.py."""

import csv

from timm.models import model_entrypoint

from tokamix.models._registry import SIZES, count_sizes, list_models


def main() -> None:
    names = [name for name in list_models() if not model_entrypoint(name).__module__.endswith(".bodies")]
    with SIZES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "parameters", "macs"])
        for name in names:
            writer.writerow([name, *count_sizes(name)])


if __name__ == "__main__":
    main()
