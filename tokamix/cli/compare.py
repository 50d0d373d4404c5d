"""`tokamix compare`: a fair comparison of token mixers on any classification data."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tokamix.cli._shared import console, plain_errors, print_comparison


def compare(
    data: Annotated[str, typer.Option(help="Classification data, as for `tokamix train`.")],
    mixers: Annotated[
        str, typer.Option(help="At least two mixers, separated by commas.", show_default="softmax, sima, super_token")
    ] = "softmax,sima,super_token",
    body: Annotated[
        str | None,
        typer.Option(
            help="columnar_tiny, columnar_small, pyramid_nano, _tiny or _small. Default: the recipe's, or pyramid_tiny."
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="A name of `tokamix recipes`, or a YAML file.")] = "small",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value replaces a value of the recipe, such as epochs=30.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each mixer.")] = 1,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the runs and the page.")] = Path(
        "runs/compare"
    ),
    resume: Annotated[bool, typer.Option(help="Continue the comparison in the folder, or start over.")] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images, for each training.")] = 0,
) -> None:
    """Train one body with several token mixers on your data, and write a page that compares them.

    All mixers get the same data, recipe and seeds. If the command is stopped, run it again: it resumes.
    """
    with plain_errors():
        import tokamix

        start = time.perf_counter()
        with console.status("training") as status:
            comparison = tokamix.compare(
                data,
                [name.strip() for name in mixers.split(",") if name.strip()],
                body,
                recipe,
                output,
                overrides=set_ or (),
                seeds=seeds,
                resume=resume,
                device=device,
                workers=workers,
                progress=lambda line: console.print(line, highlight=False),
            )
            status.stop()
        print_comparison(comparison.report)
        console.print(f"\n{(time.perf_counter() - start) / 60:.1f} min; charts and explanations: {comparison.page}")
