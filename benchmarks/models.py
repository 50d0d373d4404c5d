"""Whole models, ours and the peers, in one run: python benchmarks/models.py OUTPUT.csv [--only REGEX] [--quick]."""

import argparse
import csv
import re
import sys
import time
from pathlib import Path

from tokamix.bench.models import ModelRow, measure

AMIXER_RELEASED = {"depths": (2, 2, 10, 2), "num_heads": (3, 6, 12, 24), "bank_sizes": (4, 9, 18, 36)}
CASES = [
    *(
        {"name": name, "mode": mode, **kwargs}
        for mode in ("infer", "train")
        for name, kwargs in (
            ("atmnet_tiny", {}),
            ("stvit_small", {}),
            ("amixer_tiny", AMIXER_RELEASED),
            ("xcit_small_12_p16_sima", {}),
            ("deit_small_sima", {}),
            ("deit_small_patch16_224", {}),
            ("swin_tiny_patch4_window7_224", {}),
            ("convnext_tiny", {}),
            ("xcit_small_12_p16_224", {}),
        )
    ),
    *(
        {"name": name, "mode": "infer", "size": 1024, "batch": 8, **kwargs}
        for name, kwargs in (
            ("stvit_small", {}),
            ("atmnet_tiny", {}),
            ("deit_small_sima", {"img_size": 1024}),
            ("deit_small_patch16_224", {"img_size": 1024}),
            ("convnext_tiny", {}),
        )
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default="", help="regular expression on 'name mode size'")
    parser.add_argument("--compiled", default="default", help="torch.compile mode, empty for eager")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ModelRow.__dataclass_fields__))
        writer.writeheader()
        for case in CASES:
            label = f"{case['name']} {case['mode']} {case.get('size', 224)}"
            if not re.search(args.only, label):
                continue
            start = time.perf_counter()
            try:
                row = measure(compiled=args.compiled, device=args.device, **case)
            except Exception as error:  # one model that fails must not cost the others their measurement
                print(f"{label}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            writer.writerow(row.as_dict())
            file.flush()
            spent = time.perf_counter() - start
            print(
                f"{label:<44} {row.images_per_second:>9,.0f} img/s {row.peak_gb:6.1f} GB  error {row.error:.1e}"
                f"  ({spent:.0f} s in all)",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
