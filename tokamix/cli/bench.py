"""`tokamix bench`: measurements of operators and models."""

import re
from pathlib import Path
from typing import Annotated

import typer

from tokamix.cli._shared import plain_errors


def bench(
    suite: Annotated[str, typer.Option(help="ops, scaling, models, mixers, or h200 for the first three.")] = "ops",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the CSV files.")] = Path("results"),
    device: Annotated[str, typer.Option(help="cuda or cpu. Default: cuda if available.")] = "",
    only: Annotated[str, typer.Option(help="Measure only labels that match this regular expression.")] = "",
) -> None:
    """Measure operators and models, each after a correctness check, and write CSV files."""
    with plain_errors():
        import torch

        from tokamix.bench.suites import H200, SUITES, environment, run

        names = list(H200) if suite == "h200" else [suite]
        if names[0] not in SUITES:
            raise ValueError(f"there is no suite {suite!r}; choose one of {', '.join(SUITES)}, h200")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in ("cuda", "cpu"):
            raise ValueError(f"cannot measure on device {device!r}; choose cuda or cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, and torch finds none; `tokamix info` shows why")
        try:
            re.compile(only)
        except re.error as error:
            raise ValueError(f"--only {only!r} is not a regular expression: {error}") from None
        header = environment(device)
        print(header, end="", flush=True)
        if suite == "h200":  # the environment stated in docs/benchmarks.md
            output.mkdir(parents=True, exist_ok=True)
            (output / "environment.txt").write_text(header)
        for name in names:
            path = run(name, output, device, only, lambda line: print(line, flush=True))
            print(f"wrote {path}", flush=True)
