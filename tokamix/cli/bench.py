"""`tokamix bench`: measurements of operators and models."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tokamix.cli._shared import console, is_given, plain_errors, print_line, runtime_table

MODEL_OPTIONS = ("sizes", "batch", "runtime", "seconds")


def bench(
    context: typer.Context,
    models: Annotated[
        list[str] | None, typer.Argument(help="Models, ours or timm's, that are compared in several runtimes.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="With models: sides of the images, as 224,512.")] = "224",
    batch: Annotated[str, typer.Option(help="With models: images of one call, as 1,8.")] = "1",
    runtime: Annotated[
        str,
        typer.Option(
            help="With models, separated by commas: eager, graphed, compile, graphs, onnx, onnx-int8, openvino,"
            " openvino-bf16, openvino-int8, aoti."
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(min=0, help="With models: time of each size and batch.")] = 10.0,
    suite: Annotated[
        str,
        typer.Option(
            help="Without models: ops, scaling, models, mixers, softmax, images, targets; h200: the first three."
        ),
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the CSV files.")] = Path("results"),
    device: Annotated[str, typer.Option(help="cuda or cpu. Default: cuda if available.")] = "",
    only: Annotated[str, typer.Option(help="With --suite: only labels that match this regular expression.")] = "",
) -> None:
    """Measure models in several runtimes, or a suite of operators and models, each after a correctness check.

    The models and runtimes of one size and batch run in turn, so that the load of the machine hits all alike. Results
    are printed and written as CSV files, those of models and of the suite softmax also as a plot.
    """
    with plain_errors():
        import torch

        from tokamix.bench.suites import H200, PLOTS, SUITES, environment, run

        if bool(models) == bool(suite):
            raise ValueError("name models to compare, such as stvit_small convnext_tiny, or a suite with --suite")
        given = [name for name in MODEL_OPTIONS if is_given(context, name)]
        if suite and given:
            raise ValueError(f"--{given[0]} is for models, which are named without --suite; leave it out")
        if models and only:
            raise ValueError("--only is for suites; leave it out, or name one with --suite")
        names = list(H200) if suite == "h200" else [suite]
        if suite and names[0] not in SUITES:
            raise ValueError(f"there is no suite {suite!r}; choose one of {', '.join(SUITES)}, h200")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in ("cuda", "cpu"):
            raise ValueError(f"cannot measure on device {device!r}; choose cuda or cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, and torch finds none; `tokamix info` shows why")
        if models:
            _bench_models(models, sizes, batch, runtime, device, seconds, output)
            return
        try:
            re.compile(only)
        except re.error as error:
            raise ValueError(f"--only {only!r} is not a regular expression: {error}") from None
        if suite in PLOTS and find_spec("matplotlib") is None:  # before the measurements, which take minutes
            raise ImportError("plots need matplotlib: pip install 'tokamix[bench]'")
        header = environment(device)
        print(header, end="", flush=True)
        if suite == "h200":  # the environment stated in docs/benchmarks.md
            output.mkdir(parents=True, exist_ok=True)
            (output / "environment.txt").write_text(header)
        for name in names:
            path = run(name, output, device, only, lambda line: print(line, flush=True))
            print(f"wrote {path}", flush=True)
            if name in PLOTS:
                PLOTS[name](path, path.with_suffix(".png"))
                print(f"wrote {path.with_suffix('.png')}", flush=True)


def _bench_models(
    names: list[str], sizes: str, batch: str, runtime: str, device: str, seconds: float, output: Path
) -> None:
    from tokamix.bench.runtimes import draw_rows, installed_runtimes, measure_runtimes, write_rows
    from tokamix.bench.suites import environment
    from tokamix.files import WriteError

    def numbers(option: str, text: str) -> list[int]:
        parts = text.split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"{option} is {text!r}, but must be numbers from 1 on, separated by commas")
        return [int(part) for part in parts]

    runtimes = [name.strip() for name in runtime.split(",")] if runtime else installed_runtimes(device)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # before the measurements, which take minutes
        raise WriteError(f"cannot write into {output}: {error.strerror or error}") from error
    print(environment(device), end="", flush=True)
    rows = measure_runtimes(
        names, numbers("--sizes", sizes), numbers("--batch", batch), runtimes, device, seconds, print_line
    )
    measured = write_rows(rows, output / "runtimes.csv")
    console.print(runtime_table(measured))
    draw_rows(measured, output / "runtimes.png")
    print(f"wrote {output / 'runtimes.csv'} and {output / 'runtimes.png'}")
