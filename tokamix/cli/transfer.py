"""`tokamix transfer`: one pretrained classifier, fine-tuned on several data sets."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def transfer(
    source: Annotated[
        str, typer.Argument(help="A run's folder, a checkpoint file, a pretrained timm model, or hf-hub:user/name.")
    ],
    to: Annotated[
        list[str],
        typer.Option(help="Data sets, separated by commas, such as flowers102,cars or folder:PATH; repeatable."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the runs and results.csv.")] = Path(
        "runs/transfer"
    ),
    model: Annotated[str | None, typer.Option(help="Name of the architecture, for a checkpoint file.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe for all data sets. Default: AMixer's transfer recipe of each.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs; the schedule scales with them.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per optimizer step, over all processes.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value replaces a value of the recipe; repeatable.")
    ] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start over instead of resuming.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode images.")] = None,
) -> None:
    """Fine-tune a pretrained classifier on several data sets and print one table.

    If the command is stopped, run it again: it resumes.
    On many GPUs: torchrun --nproc-per-node 8 -m tokamix transfer ...
    """
    with plain_errors():
        import torch.distributed as dist

        import tokamix
        from tokamix.train.setup.threads import default_workers

        shortcuts = {"epochs": epochs, "batch_size": batch_size, "image_size": image_size}
        rows = tokamix.transfer(
            source,
            to,
            output,
            model=model,
            recipe=recipe,
            overrides=[*(set_ or ()), *(f"{key}={value}" for key, value in shortcuts.items() if value is not None)],
            resume=not no_resume,
            device=device,
            workers=default_workers(device) if workers is None else workers,
            quiet=False,
        )
        if dist.is_initialized():
            dist.destroy_process_group()
        if os.environ.get("RANK", "0") != "0":
            return
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("data", overflow="fold")
        for title in ("classes", "train", "val", "recipe", "epochs", "last top-1", "best top-1"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            counts = (f"{row.classes:,}", f"{row.train_images:,}", f"{row.val_images:,}")
            table.add_row(row.data, *counts, row.recipe, str(row.epochs), f"{row.last:.2f} %", f"{row.best:.2f} %")
        console.print(table)
        console.print(
            f"the best epoch is chosen on the validation images, so it is optimistic; runs and results.csv: {output}",
            highlight=False,
            soft_wrap=True,
        )
