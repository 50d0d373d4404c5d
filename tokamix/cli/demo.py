"""`tokamix demo`: six mixers compared on handwritten digits."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tokamix.cli._shared import console, plain_errors, print_comparison


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the runs and the page.")] = Path(
        "runs/demo"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each mixer.")] = 1,
    resume: Annotated[bool, typer.Option(help="Continue the demo in the folder, or start over.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch, to see that everything works.")] = False,
) -> None:
    """Train softmax attention and five mixers on digits, compare them, and write a page; takes a few minutes."""
    with plain_errors():
        from tokamix.demo import run_demo

        start = time.perf_counter()
        console.print("One small network with six token mixers learns to read digits:")
        if resume and (output / "report.html").is_file():
            console.print(f"[dim]finished runs in {output} are not trained again; --no-resume starts over[/]")
        with console.status("training, one core for each run") as status:
            comparison = run_demo(
                output, seeds, quick, resume, lambda line: console.print(f"  {line}", highlight=False)
            )
            status.stop()
        print_comparison(comparison.report)
        console.print(f"\n{(time.perf_counter() - start) / 60:.1f} min; charts and explanations: {comparison.page}")
