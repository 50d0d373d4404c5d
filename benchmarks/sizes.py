"""Count all models and write tokamix/models/sizes.csv: python benchmarks/sizes.py."""

import csv

from tokamix.models._registry import SIZES, count_sizes, list_models


def main() -> None:
    with SIZES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "parameters", "macs"])
        for name in list_models():
            writer.writerow([name, *count_sizes(name)])


if __name__ == "__main__":
    main()
