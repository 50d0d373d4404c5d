"""`tokamix pick`: the most accurate model that is fast enough on this machine."""

from typing import Annotated, Literal

import typer

from tokamix.cli._shared import console, plain_errors, print_line, runtime_table


def pick(
    budget_ms: Annotated[float, typer.Option(help="Milliseconds for one image.")],
    size: Annotated[int, typer.Option(min=1, help="Side of the images.")] = 224,
    task: Annotated[Literal["classify", "segment", "detect"], typer.Option(help="Task of the model.")] = "classify",
    models: Annotated[
        str, typer.Option(help="Candidates, separated by commas. Default: all with a known accuracy.")
    ] = "",
    runtime: Annotated[str, typer.Option(help="Runtimes, separated by commas. Default: all installed ones.")] = "",
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
) -> None:
    """Recommend the most accurate model that takes at most --budget-ms for an image here, and its runtime.

    Candidates are measured in every runtime that is installed, the most accurate first, until one keeps the budget.
    The accuracies are those that the papers and timm print: of ImageNet, of ADE20K (segment) or of COCO (detect).
    """
    with plain_errors():
        from tokamix.bench.pick import pick as run
        from tokamix.inference import choose_device

        where = choose_device(device).type
        names = [name.strip() for name in models.split(",") if name.strip()]
        runtimes = [name.strip() for name in runtime.split(",") if name.strip()]
        result = run(budget_ms, size, where, names, runtimes, log=print_line, task=task)
        if result.rows:
            console.print(runtime_table(result.rows))
        if result.skipped:
            console.print(f"not exported, since they are too slow in eager mode: {', '.join(result.skipped)}")
        console.print(result.summary(), highlight=False, soft_wrap=True)
        if result.best is None:
            raise typer.Exit(1)
