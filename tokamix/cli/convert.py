"""`tokamix convert`: another mixer in a trained classifier, with its accuracy restored."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def convert(
    source: Annotated[str, typer.Argument(help="A run's folder, a pretrained timm model, or hf-hub:user/name.")],
    data: Annotated[str, typer.Option(help="The data that the model was trained on, as for `tokamix train`.")],
    to: Annotated[str, typer.Option(help="The new mixer, such as sima, super_token or weight_mixing.")] = "sima",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the converted model and the report.")
    ] = Path("runs/convert"),
    recipe: Annotated[
        str | None,
        typer.Option(help="A name of `tokamix recipes`, or a YAML file. Default: the run's own, or convert."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value replaces a value of the recipe; repeatable.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of transfer and fine-tuning. Default: a quarter of the original's.")
    ] = None,
    transfer_epochs: Annotated[
        int | None, typer.Option(help="Those of them that are attention transfer. Default: a fifth; 0 leaves it out.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step.")] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Side of the images in pixels. Default: the recipe's, or the model's own.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Blocks that keep softmax attention: those that are fitted worst.")] = 0,
    progressive: Annotated[
        bool, typer.Option("--progressive", help="Convert the blocks one after another while fine-tuning.")
    ] = False,
    teacher: Annotated[
        str,
        typer.Option(
            help="self, the original; none; or another teacher: a timm name, a run, name@file or an ONNX file."
        ),
    ] = "self",
    sizes: Annotated[str, typer.Option(help="Image sizes of the speed measurement.")] = "224,512,1024,2048",
    resume: Annotated[bool, typer.Option(help="Continue the conversion in the folder, or start over.")] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[int, typer.Option(min=0, metavar="<int>", help="Processes that decode images.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings and errors.")] = False,
) -> None:
    """Replace the attention of a trained classifier by another mixer, and restore its accuracy.

    Three phases: calibration in closed form, attention transfer, fine-tuning with distillation from the original. If
    the command is stopped, run it again: it resumes. On many GPUs: torchrun --nproc-per-node 8 -m tokamix convert ...
    """
    with plain_errors():
        import tokamix
        from tokamix.convert.report import PHASES

        shortcuts = {"batch_size": batch_size, "image_size": image_size}
        result = tokamix.convert(
            source,
            data,
            to,
            output,
            recipe=recipe,
            overrides=[*(set_ or ()), *(f"{key}={value}" for key, value in shortcuts.items() if value is not None)],
            epochs=epochs,
            transfer_epochs=transfer_epochs,
            keep=keep,
            progressive=progressive,
            teacher=teacher,
            sizes=_parse_sizes(sizes),
            resume=resume,
            device=device,
            workers=workers,
            quiet=quiet,
        )
        if quiet or os.environ.get("RANK", "0") != "0":
            return
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right")
        for phase, top1 in result.accuracy.items():
            table.add_row(PHASES[phase], f"{top1:.2f} %")
        console.print(table)
        if result.after:
            console.print(result.break_even_text(), highlight=False, soft_wrap=True)
        console.print(f"the model and conversion.md are in {result.folder}", highlight=False, soft_wrap=True)


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
        if any(size < 1 for size in sizes):
            raise ValueError
    except ValueError:
        raise ValueError(f"--sizes is {text!r}, but must be image sizes in pixels, such as 224,512") from None
    return sizes
