"""`tokamix predict`: apply a trained model to images."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tokamix.cli._shared import console, plain_errors


def predict(
    images: Annotated[list[str], typer.Argument(help="pictures, or folders of them")],
    run: Annotated[str, typer.Option(help="the folder of a run of `tokamix train --task segment` or `detect`")],
    output: Annotated[Path, typer.Option(help="folder for the results")] = Path("predictions"),
    score: Annotated[float, typer.Option(min=0, max=1, help="leave detections below it out")] = 0.3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
) -> None:
    """Segment pictures, or find things in them: overlays, classes of pixels, and detections in COCO's form."""
    with plain_errors():
        from tokamix.predict import find_pictures
        from tokamix.predict import predict as run_predict

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        found = find_pictures(images)
        problems = run_predict(run, found, output, device=device, score=score, say=say)
        errors = Console(stderr=True)
        for problem in problems:
            errors.print(f"[bold red]error:[/] {escape(problem)}", highlight=False, soft_wrap=True)
        done = "nothing was done" if len(problems) == len(found) else f"everything is in {output}"
        console.print(done, highlight=False, soft_wrap=True)
        if problems:
            raise typer.Exit(1)
