"""`tokamix embed`: the features of all images of a folder or data set."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokamix.cli._shared import console, plain_errors


def embed(
    source: Annotated[
        str, typer.Argument(help="A run's folder, a checkpoint file, a pretrained timm model, or hf-hub:user/name.")
    ],
    data: Annotated[str, typer.Argument(help="A folder of images, .npz files, wds:...tar or another data set.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the features.")] = Path("features"),
    pool: Annotated[
        Literal["model", "token", "avg", "concat"],
        typer.Option(help="Features: the model's own, class token, mean, or SimA's 4 vectors side by side."),
    ] = "model",
    layer: Annotated[int | None, typer.Option(help="Block or stage for pool token and avg; -1 is the last.")] = None,
    split: Annotated[
        Literal["all", "train", "val"], typer.Option(help="Part of a data set that is no folder.")
    ] = "all",
    model: Annotated[str | None, typer.Option(help="Name of the architecture, for a checkpoint file.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Image size in pixels. Default: the model's own.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Precision of the forward passes. Default: the run's."),
    ] = None,
    dtype: Annotated[Literal["fp32", "fp16"], typer.Option(help="Type of the written features.")] = "fp32",
    file_format: Annotated[
        Literal["safetensors", "npy"], typer.Option("--format", help="Format of the shards.")
    ] = "safetensors",
    parquet: Annotated[bool, typer.Option("--parquet", help="Also write index.parquet.")] = False,
    shard_size: Annotated[int, typer.Option(min=1, help="Images of a shard.")] = 50_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of one forward pass.")] = 128,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[
        Literal["raise", "skip"], typer.Option(help="What to do with images that cannot be decoded.")
    ] = "raise",
) -> None:
    """Write the features of all images. If it is stopped, the same command continues.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix embed ...
    """
    with plain_errors():
        from tokamix.distributed import process_group
        from tokamix.embed import embed as run

        columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            process_group(device) as rank,
            Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ):
            bar = progress.add_task("", visible=rank == 0)
            index = run(
                source,
                data,
                output,
                model=model,
                split=split,
                pool=pool,
                layer=layer,
                image_size=image_size,
                precision=precision,
                dtype=dtype,
                file_format=file_format,
                parquet=parquet,
                shard_size=shard_size,
                batch_size=batch_size,
                device=device,
                workers=workers,
                corrupt=corrupt,
                on_images=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        if rank == 0:
            shape = f"{len(index):,} images, {index.settings['dimensions']} features each"
            console.print(f"written: {output} ({shape})", highlight=False, markup=False, soft_wrap=True)
