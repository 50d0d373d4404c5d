"""`tokamix predict`: apply a trained model to images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tokamix.cli._shared import console, is_given, plain_errors

if TYPE_CHECKING:
    from tokamix.predict import Prediction

ROWS = 40  # predictions of a classifier that are printed
# options that affect one task only
TASK_OPTIONS = {"top_k": "classify", "batch_size": "classify", "score_threshold": "detect"}
MODELS = {"classify": "a classifier", "segment": "a segmenter", "detect": "a detector"}


def predict(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] IMAGES...",
            help="MODEL: a run's folder, a checkpoint file, a pretrained timm model, hf-hub:user/name, or an exported"
            " file; without it, a small network for ten classes that comes with tokamix. IMAGES: files, folders, glob"
            " patterns, or - for paths on stdin.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Classifier: a .csv or .jsonl file; others: a folder, by default predictions."
        ),
    ] = None,
    run_: Annotated[
        str | None, typer.Option("--run", metavar="MODEL", help="The model; all arguments are images then.")
    ] = None,
    sheet: Annotated[Path | None, typer.Option(help="Image file for a contact sheet of the predictions.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Classes per image, of a classifier.")] = 5,
    score_threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Leave out detections below it, of a detector. Default: 0.3.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the architecture, for a checkpoint file.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of one forward pass, of a classifier.")] = 32,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
) -> None:
    """Classify images, segment them, or detect objects in them.

    A classifier's top classes are printed, and written with -o. Segmenters and detectors write overlays, class maps and
    detections.json (COCO's format) into a folder.
    """
    with plain_errors():
        from tokamix.predict import load_predictor
        from tokamix.predict import predict as run
        from tokamix.predict.files import find_images

        source, images = _split(arguments) if run_ is None else (run_, arguments)
        files = find_images(images)
        predictor = load_predictor(
            source, device, model=model, score_threshold=score_threshold, top_k=top_k, batch_size=batch_size
        )
        _check_options(context, predictor.config.task, source)
        classify = predictor.config.task == "classify"
        target = output if classify or output else Path("predictions")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("predicting", total=len(files))

            def advance(prediction: "Prediction") -> None:
                progress.advance(bar)
                if not classify and prediction.error is None:
                    _print(f"{prediction.image}: {prediction.summary()}")

            predictions = run(predictor, list(files), output=target, sheet=sheet, on_prediction=advance)
        readable = [prediction for prediction in predictions if prediction.error is None]
        if classify and readable:
            console.print(_table(readable[:ROWS]))
            if len(readable) > ROWS:
                _print(f"... and {len(readable) - ROWS} more" + ("" if output else "; -o FILE.csv writes all of them"))
        for path in filter(None, (target, sheet)) if readable else ():
            _print(f"written: {path}")
        errors = Console(stderr=True)
        for prediction in predictions:
            if prediction.error is not None:
                errors.print(f"[bold red]error:[/] {escape(prediction.error)}", highlight=False, soft_wrap=True)
        if len(readable) < len(predictions):
            raise typer.Exit(1)


def _check_options(context: typer.Context, task: str, source: str) -> None:
    """Refuse options that have no effect on models of this task."""
    for name, needed in TASK_OPTIONS.items():
        if needed != task and is_given(context, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for {MODELS[needed]}, but {source} is {MODELS[task]}; leave it out")


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The model and the images; images alone are for the network that comes with the package."""
    from tokamix.data.decode import EXTENSIONS
    from tokamix.models.shipped import DEFAULT, shipped_weights
    from tokamix.runtimes import is_exported

    first = Path(arguments[0])
    if late := [name for name in arguments[1:] if is_exported(name)]:
        raise ValueError(f"{late[0]} is no image; name the model first: tokamix predict {late[0]} IMAGES")
    folder_of_images = first.is_dir() and not (first / "config.json").exists() and len(arguments) == 1
    if first.suffix.lower() in EXTENSIONS or arguments[0] == "-" or folder_of_images:
        classes = ", ".join(shipped_weights()[DEFAULT]["data"]["classes"])
        Console(stderr=True).print(
            f"No model given: {DEFAULT}, whose classes are {classes}.", style="dim", highlight=False
        )
        return DEFAULT, arguments
    if len(arguments) == 1:
        if not first.exists() and "/" in arguments[0]:
            raise ValueError(f"{arguments[0]} does not exist; tokamix predict MODEL IMAGES")
        raise ValueError(f"{arguments[0]} is no image; name images after the model: tokamix predict MODEL IMAGES")
    return arguments[0], arguments[1:]


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(predictions: list["Prediction"]) -> Table:
    """Image, best class and its score, and as many of the further classes as fit into the terminal's width."""
    rows = []
    for prediction in predictions:
        assert prediction.scores is not None
        percents = [f"{100 * score:.1f} %" for score in prediction.scores.tolist()]
        rest = ", ".join(f"{n} {s}" for n, s in zip(prediction.names[1:], percents[1:], strict=True))
        rows.append([_shorten(prediction.image), prediction.names[0], percents[0], rest])
    titles = ["image", "class", "score", "next"]
    used = sum(max(map(len, column)) + 2 for column in list(zip(titles, *rows, strict=True))[:3])
    room = max(10, console.width - used)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, justify="right" if title == "score" else "left")
    for *cells, rest in rows:
        table.add_row(*map(escape, cells), f"[dim]{escape(rest if len(rest) <= room else rest[: room - 1] + '…')}[/]")
    return table


def _shorten(path: str) -> str:
    """The end of a path, which names the image, in a third of the terminal's width."""
    width = max(20, console.width // 3)
    return path if len(path) <= width else f"…{path[1 - width :]}"
