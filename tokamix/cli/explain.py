"""`tokamix explain`: the papers' figures for a photo and one or more models."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from tokamix.cli._shared import console, plain_errors


def explain(
    photo: Annotated[Path, typer.Argument(help="Image file.")],
    model: Annotated[str, typer.Option(help="A run's folder, a timm name, or hf-hub:user/name.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Weights file, if --model names an architecture.")] = None,
    compare: Annotated[str, typer.Option(help="Further models, separated by commas.")] = "",
    token: Annotated[
        str, typer.Option(help="y,x of the explained token, in fractions of the image's height and width.")
    ] = "0.5,0.5",
    layer: Annotated[
        str | None, typer.Option(help="Index (from 0) or name of the layer that is explained. Default: a late one.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of images for statistics by layer.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of one forward pass, for --data.")] = 16,
    formats: Annotated[
        str, typer.Option("--format", help="Formats of the figures: png, svg and pdf, with commas.")
    ] = "png",
    theme: Annotated[
        Literal["light", "dark"], typer.Option(help="Colours of the figures; the page has both.")
    ] = "light",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures and the page.")] = Path(
        "explained"
    ),
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
) -> None:
    """Show what token mixers do with a photo: figures, and one self-contained HTML page.

    Where a token samples, which super tokens form, what the attention sees: the figures of the papers, for any model of
    tokamix and timm.
    """
    with plain_errors():
        position = _parse_token(token)
        from tokamix.explain import explain as run
        from tokamix.explain.explainer import is_untrained

        models = [model, *(name.strip() for name in compare.split(",") if name.strip())]
        for name in models if checkpoint is None else models[1:]:
            if is_untrained(name):
                _print(f"note: {name} has no pretrained weights; the pictures are those of an untrained network")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bars: dict[str, TaskID] = {}

            def advance(what: str, done: int, total: int) -> None:
                if what not in bars:
                    bars[what] = progress.add_task(what, total=total)
                progress.update(bars[what], completed=done, total=total)

            result = run(
                photo,
                models,
                output,
                checkpoint=checkpoint,
                position=position,
                layer=int(layer) if layer is not None and layer.lstrip("-").isdigit() else layer,
                data=data,
                batch_size=batch_size,
                formats=[form.strip() for form in formats.split(",") if form.strip()],
                theme=theme,
                device=device,
                progress=advance,
            )
        for values in result.statistics.values():
            for reason in values.skipped:
                _print(f"note: left out: {reason}")
        _print(f"{len(result.files)} figures and the page: {result.page}")


def _parse_token(text: str) -> tuple[float, float]:
    try:
        y, x = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--token {text!r} is not y,x: give two fractions of the image, such as 0.5,0.5") from None
    if not (0 <= y <= 1 and 0 <= x <= 1):
        raise ValueError(f"--token {text} is outside of the image: give fractions from 0 to 1, such as 0.5,0.5")
    return y, x


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
