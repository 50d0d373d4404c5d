"""`tokamix demo`: softmax and five mixers on scans of digits."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def demo(
    output: Annotated[Path, typer.Option(help="folder for the runs and the report")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each mixer")] = 1,
    resume: Annotated[bool, typer.Option(help="go on with what is in the folder, or start over")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="one epoch, to see that everything works")] = False,
) -> None:
    """Train softmax and five mixers on scans of digits, compare them, and write a page about it; a few minutes."""
    with plain_errors():
        from tokamix.demo import run
        from tokamix.demo.report import accuracy_text, amount

        start = time.perf_counter()
        console.print("One small network, six ways for its tokens to talk, learning to read digits:")
        if resume and (output / "report.html").is_file():
            console.print(f"[dim]what is finished in {output} is not trained again; --no-resume starts over[/]")
        with console.status("training, each on a core of its own") as status:

            def say(text: str) -> None:
                console.print(f"  {text}", highlight=False)

            report, page = run(output, range(seeds), quick, resume, say)
            status.stop()
        table = Table(box=None, header_style="bold", caption_justify="left", pad_edge=False)
        table.add_column("token mixer")
        for title in ("accuracy", "params", "MACs", "exp calls", "CPU latency", "training"):
            table.add_column(title, justify="right", no_wrap=True)
        for result in report.results:
            costs = (amount(result.parameters), amount(result.growth[0].macs), amount(result.growth[0].exps))
            times = (f"{result.latency_ms:.1f} ms", f"{result.seconds:.0f} s")
            table.add_row(result.title, accuracy_text(result), *costs, *times)
        table.caption = (
            f"{report.train_images:,} scans to learn from, {report.test_images} to test on: differences below"
            f" {report.noise:.1f} points mean nothing"
        )
        every = Table(box=None, header_style="bold", pad_edge=False)
        every.add_column("every mixer, untrained")
        for title in ("params", "MACs", "exp calls", "CPU latency"):
            every.add_column(title, justify="right", no_wrap=True)
        for cost in report.costs:
            every.add_row(cost.mixer, *cost.cells())
        console.print("", table, "", every)
        console.print(f"\n{(time.perf_counter() - start) / 60:.1f} min; the whole story, with pictures: {page}")
