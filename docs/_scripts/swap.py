"""Sweep over all models of timm: what `swap_mixer` and `insert_context_broadcast` cover, as docs/swap_coverage.md.

Every model with attention is created on the meta device, swapped to SimA, and run there once; a softmax that is left
without being reported counts as not covered. `python docs/_scripts/swap.py` writes docs/swap_coverage.md and
tokamix's record of the number of covered names in tests/swap/coverage.json; it takes about twenty minutes.
"""

import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch

import tokamix
from tokamix.swap.inspect import find_attentions, nominal_size

ROOT = Path(__file__).parents[2]
PAGE, RECORD = ROOT / "docs" / "swap_coverage.md", ROOT / "tests" / "swap" / "coverage.json"


def sweep(name: str) -> dict[str, Any] | None:
    """What the swap does to one model; None if it has no attention."""
    torch.set_num_threads(1)
    file = timm.models.model_entrypoint(name).__module__.rpartition(".")[2]
    row = {"name": name, "file": file, "replaced": 0, "kept": {}, "broadcast": 0, "problem": ""}
    try:
        model = timm.create_model(name, device="meta").eval()
        hosts, kept, unknown = find_attentions(model)
        if not hosts and not kept and not unknown:
            return None
        classes = {type(module).__name__ for module, _ in hosts.values()}
        classes |= {type(model.get_submodule(path)).__name__ for path in (*kept, *unknown)}
        row["classes"] = sorted(classes)
        row["kept"] = dict(Counter(kept.values()))
        if not hosts:
            row["problem"] = next(iter({**kept, **unknown}.values()))
            return row
        report = tokamix.swap_mixer(model, "sima")
        row["replaced"] = len(report.replaced)
        try:
            row["broadcast"] = len(tokamix.insert_context_broadcast(model, "cbs"))
        except ValueError as error:
            row["broadcast_problem"] = str(error).splitlines()[0][:200]
        left = _softmax(model, nominal_size(model))
        if left and not report.kept:
            row["problem"] = f"{left} softmax evaluations are left"
    except Exception as error:  # a row of the table
        row["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return row


def _softmax(model: Any, size: tuple[int, int]) -> int:
    try:
        return tokamix.count_exp(model, size)["softmax"]
    except RuntimeError as error:
        if "item() cannot be called on meta" in str(error):  # the model looks at values; the swap does not
            return 0
        raise


def page(rows: list[dict[str, Any]]) -> str:
    """The table of files, and the exceptions."""
    covered = [row for row in rows if not row["problem"]]
    lines = [
        "# Models that can be swapped",
        "",
        f"Written by `python docs/_scripts/swap.py` on {date.today()} with timm {timm.__version__}:"
        f" {len(covered)} of {len(rows)} names with softmax attention can be swapped with"
        f" `tokamix.swap_mixer(model, 'sima')`,"
        f" {sum(row['broadcast'] > 0 for row in rows)} take context broadcasting. Each was created and run on the meta"
        " device, so this says that the network is built and runs, not how accurate it is.",
        "",
        "| file of timm | attention | names | swapped | context broadcasting |",
        "|---|---|---:|---:|---:|",
    ]
    for file in sorted({row["file"] for row in rows}):
        own = [row for row in rows if row["file"] == file]
        classes = ", ".join(sorted({name for row in own for name in row["classes"]}))
        swapped, broadcast = sum(not row["problem"] for row in own), sum(row["broadcast"] > 0 for row in own)
        lines.append(f"| {file} | {classes} | {len(own)} | {swapped} | {broadcast} |")
    lines += ["", "## Not swapped", "", "| names | reason |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["problem"]:
            reasons.setdefault(row["problem"], []).append(row["name"])
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in reasons.items()]
    lines += ["", "## Kept in swapped models", "", "| reason | names |", "|---|---:|"]
    kept = Counter(reason for row in covered for reason in row["kept"])
    lines += [f"| {reason} | {count} |" for reason, count in kept.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Sweep, and write the page and the record."""
    names = [name for name in timm.list_models() if not name.startswith(tuple(sys.argv[1:]))]
    names = [name for name in names if timm.models.model_entrypoint(name).__module__.startswith("timm.")]
    with ProcessPoolExecutor(1) as pool:
        rows = [row for row in pool.map(sweep, names) if row is not None]
    PAGE.write_text(page(rows))
    counts = {"timm": timm.__version__, "names": len(rows), "swapped": sum(not row["problem"] for row in rows)}
    RECORD.write_text(json.dumps(counts | {"broadcast": sum(row["broadcast"] > 0 for row in rows)}, indent=2) + "\n")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
