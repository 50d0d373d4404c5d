"""`tokamix eval`: the accuracy of a run, a checkpoint or a pretrained model."""

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import METRICS, console, plain_errors


def eval_(
    source: Annotated[str, typer.Argument(help="a run's folder, a checkpoint file, or a pretrained model's name")],
    data: Annotated[str, typer.Option(help="the data, as for `tokamix train`; its validation part is used")],
    model: Annotated[str | None, typer.Option(help="the model's name, for a checkpoint file")] = None,
    image_size: Annotated[int | None, typer.Option(help="side in pixels; default: the model's own")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="for segmenters: test_scales=[0.75,1], test_flip=true, window=512")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="images of one forward pass; default: 128, or 1")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    workers: Annotated[int, typer.Option(help="processes that decode images")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[Literal["raise", "skip"], typer.Option(help="what to do with undecodable pictures")] = "raise",
) -> None:
    """Measure the accuracy of a run, a checkpoint or a pretrained model.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix eval ...
    """
    from tokamix.distributed import process_group

    with plain_errors(), process_group(device) as rank:
        from tokamix.dense.saved import load_dense_config
        from tokamix.evaluate import evaluate

        if config := load_dense_config(source):
            for option, given in (("--model", model), ("--image-size", image_size)):
                if given is not None:
                    cure = "leave it out" if option == "--model" else "use --set scale=[1333,800]"
                    raise ValueError(f"{option} is for classifiers, and {source} holds a {config['task']}er; {cure}")
            dense = _eval_dense(source, data, set_ or (), batch_size or 1, device, workers, corrupt)
            if rank == 0:
                console.print(dense)
            return
        if set_:
            raise ValueError(f"--set is for segmenters and detectors, which {source} does not hold")
        found = evaluate(
            source,
            data,
            model=model,
            image_size=image_size,
            batch_size=batch_size or 128,
            device=device,
            workers=workers,
            corrupt=corrupt,
        )
        if rank == 0:
            console.print(f"top-1 {found['top1']:.2f} %  top-5 {found['top5']:.2f} %  loss {found['loss']:.4f}")


def _eval_dense(
    source: str,
    data: str,
    settings: Sequence[str],
    batch_size: int,
    device: str | None,
    workers: int,
    corrupt: Literal["raise", "skip"],
) -> Table:
    """A segmenter's or detector's numbers: one line, then the classes or sizes."""
    from tokamix.evaluate.dense import evaluate_dense

    reading: dict[str, Any] = {"batch_size": batch_size, "device": device, "workers": workers, "corrupt": corrupt}
    found = evaluate_dense(source, data, overrides=settings, **reading)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for key, value in found.items():
        kind, _, name = key.partition("/")
        table.add_row(f"IoU of {name}" if kind == "iou" else METRICS.get(key, key.replace("_", " ")), f"{value:.2f} %")
    return table
