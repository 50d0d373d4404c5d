"""`tokamix bench`: measurements of operators and models."""

from pathlib import Path
from typing import Annotated

import typer

from tokamix.cli._shared import console


def bench(
    suite: Annotated[str, typer.Option(help="ops, scaling, models, mixers, or h200 for the first three")] = "ops",
    output: Annotated[Path, typer.Option(help="folder for the CSV files")] = Path("results"),
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is one")] = "",
    only: Annotated[str, typer.Option(help="regular expression on what is measured")] = "",
) -> None:
    """Measure operators and models, each after a correctness check, into CSV files."""
    import torch

    from tokamix.bench.suites import H200, SUITES, environment, run

    chosen = list(H200) if suite == "h200" else [suite]
    if chosen[0] not in SUITES:
        console.print(f"there is no suite {suite!r}; choose one of {', '.join(SUITES)}, h200")
        raise typer.Exit(1)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = environment(device)
    print(where, end="", flush=True)
    if suite == "h200":  # what docs/benchmarks.md says of its tables
        output.mkdir(parents=True, exist_ok=True)
        (output / "environment.txt").write_text(where)
    for name in chosen:
        path = run(name, output, device, only, lambda line: print(line, flush=True))
        print(f"wrote {path}", flush=True)
