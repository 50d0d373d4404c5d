"""`tokamix eval`: metrics of a trained model on a data set."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import METRICS, console, plain_errors


def eval_(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A run's folder, a checkpoint file, a pretrained timm model or hf-hub:user/name; several with --suite."
        ),
    ],
    data: Annotated[str, typer.Option(help="The data, as for `tokamix train`.")],
    split: Annotated[Literal["val", "train", "all"], typer.Option(help="Part of the data to evaluate on.")] = "val",
    model: Annotated[str | None, typer.Option(help="Name of the architecture, for a checkpoint file.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Image size in pixels. Default: the model's own.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an inference option: test_scales=[0.75,1], test_flip=true, window=512."),
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Precision of the forward passes. Default: the run's."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images of one forward pass. Default: 128, or 1.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for a classifier's confusion matrix, class accuracies and mistakes.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[
        Literal["raise", "skip"], typer.Option(help="What to do with images that cannot be decoded.")
    ] = "raise",
    suite: Annotated[
        Literal["robustness"] | None, typer.Option(help="Classifiers under occlusion, attacks and corruptions.")
    ] = None,
    tests: Annotated[
        str | None,
        typer.Option(
            help="Parts of the suite: occlusion, patch_drop, fgsm, pgd, corruptions, calibration. Default: all."
        ),
    ] = None,
    epsilons: Annotated[
        str | None, typer.Option(help="Strengths of the suite's attacks, in 1/255. Default: 0.5,1,2,4,8.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Images of the suite, drawn at random. Default: all.")] = None,
    imagenet: Annotated[
        list[str] | None,
        typer.Option(help="Further test sets of the suite: a=FOLDER, r=, sketch=, v2= or real=; repeatable."),
    ] = None,
) -> None:
    """Evaluate a trained model on a data set, or several models side by side in a suite.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix eval ...
    """
    with plain_errors():
        options: dict[str, Any] = {"model": model, "split": split, "image_size": image_size, "overrides": set_ or ()}
        options |= {"device": device, "workers": workers, "report": report}
        if suite is not None:
            if corrupt == "skip":
                raise ValueError("the suite stops at images that cannot be decoded; leave out --corrupt skip")
            options |= {"precision": precision or "fp32", "batch_size": batch_size or 128, "limit": limit}
            _run_suite(sources, data, tests, epsilons, imagenet or [], options)
            return
        given = {"--tests": tests, "--epsilons": epsilons, "--limit": limit, "--imagenet": imagenet}
        if unused := [name for name, value in given.items() if value]:
            raise ValueError(f"{unused[0]} belongs to a suite; add --suite robustness, or leave it out")
        if len(sources) > 1:
            raise ValueError(f"{len(sources)} models are given, but one is evaluated at a time without --suite")
        from tokamix.distributed import process_group
        from tokamix.evaluate import evaluate

        with process_group(device) as rank:
            result = evaluate(sources[0], data, precision=precision, batch_size=batch_size, corrupt=corrupt, **options)
        if rank != 0:
            return
        part = "all images" if split == "all" else f"split {split}"
        images = f"{result.num_images:,} of {result.total_images:,} images ({part})"
        _print_line(f"{result.source} on {result.data}: {images}, {result.precision} on {result.device}")
        for note in result.notes:
            _print_line(f"note: {note}")
        console.print(_table(result.metrics, result.num_classes))
        if report is not None:
            _print_line(f"the report is in {report}")


def _run_suite(
    sources: list[str],
    data: str,
    tests: str | None,
    epsilons: str | None,
    imagenet: list[str],
    options: dict[str, Any],
) -> None:
    """Run the robustness suite and print its table."""
    from tokamix.evaluate.robustness import TESTS, evaluate_robustness
    from tokamix.evaluate.robustness.report import summarize

    if epsilons is not None:
        options["epsilons"] = [_number(word) for word in epsilons.split(",")]
    folders = dict(entry.partition("=")[::2] for entry in imagenet)
    chosen = TESTS if tests is None else tuple(test.strip() for test in tests.split(","))
    with console.status("evaluating"):
        result = evaluate_robustness(sources, data, tests=chosen, imagenet=folders, **options)
    images = f"{result.num_images:,} of {result.total_images:,} images (split {result.split})"
    _print_line(f"{result.data}: {images}, {options['precision']}; accuracy in percent ± 95 % interval over the images")
    for row in result.models:
        for note in row.notes:
            _print_line(f"note: {row.title}: {note}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for row in result.models:
        table.add_column(row.title, justify="right", overflow="fold")
    for label, values in summarize(result):
        table.add_row(label, *(f"{mean:.1f} ±{max(high - mean, mean - low):.1f}" for mean, low, high in values))
    if result.models[0].calibration is not None:
        table.add_row("ECE", *(f"{row.calibration.ece:.1f}" for row in result.models if row.calibration))
    console.print(table)
    if options["report"] is not None:
        _print_line(f"the report is in {options['report']}")


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"--epsilons has {word!r}, which is not a number; write numbers such as 1,2,4") from None


def _print_line(text: str) -> None:
    """Print a line as it is, without markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(metrics: dict[str, float], num_classes: int) -> Table | str:
    if "top1" in metrics:
        top5 = f"  top-5 {metrics['top5']:.2f} %" if num_classes > 5 else ""  # otherwise it is always 100 %
        return f"top-1 {metrics['top1']:.2f} %{top5}  loss {metrics['loss']:.4f}"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for key, value in metrics.items():
        kind, _, name = key.partition("/")
        table.add_row(f"IoU of {name}" if kind == "iou" else METRICS.get(key, key.replace("_", " ")), f"{value:.2f} %")
    return table
