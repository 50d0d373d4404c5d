"""The `tokamix` command."""

import contextlib
import logging
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

app = typer.Typer(
    help="Vision token mixers from five papers, inside timm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="a part of the name, or a shell pattern")] = "",
    grid: Annotated[bool, typer.Option(help="also the comparison grid, bodies x mixers")] = False,
) -> None:
    """List the models: parameters, MACs at 224 px, paper, and the accuracy the paper prints."""
    import timm

    import tokamix
    from tokamix.registry import sizes

    names = tokamix.list_models(pattern)
    if not (grid or pattern):
        names = [name for name in names if not timm.models.model_entrypoint(name).__module__.endswith(".bodies")]
    if not names:
        console.print(f"no model matches {pattern!r}; `tokamix models` lists them all")
        raise typer.Exit(1)
    caption = "GMACs at 224 px; top-1 on ImageNet as the paper prints it"
    table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
    table.add_column("model", no_wrap=True)
    for title in ("params (M)", "GMACs", "top-1"):
        table.add_column(title, justify="right", no_wrap=True)
    width = max(12, console.width - max(map(len, names)) - 32)
    table.add_column("paper", no_wrap=True, overflow="ellipsis", max_width=width)
    for name in track(names, "counting", console=console, transient=True):
        params, macs = sizes(name)
        cfg = timm.models.get_pretrained_cfg(name)
        top1 = next((n.removeprefix("top1=") for n in cfg.notes or () if n.startswith("top1=")), "")
        table.add_row(name, f"{params / 1e6:.2f}", f"{macs / 1e9:.2f}", top1, (cfg.paper_name or "").partition(":")[0])
    console.print(table)


@app.command()
def info() -> None:
    """Say what can run here, and why not."""
    import torch

    import tokamix
    from tokamix.ops import dispatch

    table = Table(box=None, show_header=False)
    table.add_row("tokamix", f"{tokamix.__version__}, {len(tokamix.list_models())} models")
    table.add_row("python", platform.python_version())
    for package in ("torch", "torchvision", "timm"):
        table.add_row(package, version(package))
    if torch.cuda.is_available():
        table.add_row("GPU", torch.cuda.get_device_name())
    else:
        built = torch.version.cuda or torch.version.hip
        table.add_row("GPU", f"none: {'no device was found' if built else 'this torch is built for the CPU alone'}")
    table.add_row("triton", version("triton") if dispatch.HAS_TRITON else "not installed: operators run eagerly")
    probe = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    reason = dispatch.why_not(probe)
    table.add_row("kernels", f"not used: {reason}" if reason else "used for float16, bfloat16 and float32")
    for extra, packages in sorted(_extras().items()):
        missing = [p for p in packages if not _installed(p)]
        hint = f"missing {', '.join(missing)}: pip install 'tokamix\\[{extra}]'" if missing else "installed"
        table.add_row(f"extra {extra}", hint)
    console.print(table)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="folder for the runs and the report")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each mixer")] = 1,
    resume: Annotated[bool, typer.Option(help="go on with what is in the folder, or start over")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="one epoch, to see that everything works")] = False,
) -> None:
    """Train softmax and five mixers on scans of digits, compare them, and write a page about it; a few minutes."""
    with _plain_errors():
        from tokamix.demo import run
        from tokamix.demo.report import accuracy_text, amount

        start = time.perf_counter()
        console.print("One small network, six ways for its tokens to talk, learning to read digits:")
        if resume and (output / "report.html").is_file():
            console.print(f"[dim]what is finished in {output} is not trained again; --no-resume starts over[/]")
        with console.status("training, each on a core of its own") as status:

            def say(text: str) -> None:
                console.print(f"  {text}", highlight=False)

            report, page = run(output, range(seeds), quick, resume, say)
            status.stop()
        table = Table(box=None, header_style="bold", caption_justify="left", pad_edge=False)
        table.add_column("token mixer")
        for title in ("accuracy", "params", "MACs", "exp calls", "CPU latency", "training"):
            table.add_column(title, justify="right", no_wrap=True)
        for result in report.results:
            costs = (amount(result.parameters), amount(result.growth[0].macs), amount(result.growth[0].exps))
            times = (f"{result.latency_ms:.1f} ms", f"{result.seconds:.0f} s")
            table.add_row(result.title, accuracy_text(result), *costs, *times)
        table.caption = (
            f"{report.train_images:,} scans to learn from, {report.test_images} to test on: differences below"
            f" {report.noise:.1f} points mean nothing"
        )
        every = Table(box=None, header_style="bold", pad_edge=False)
        every.add_column("every mixer, untrained")
        for title in ("params", "MACs", "exp calls", "CPU latency"):
            every.add_column(title, justify="right", no_wrap=True)
        for cost in report.costs:
            every.add_row(cost.mixer, *cost.cells())
        console.print("", table, "", every)
        console.print(f"\n{(time.perf_counter() - start) / 60:.1f} min; the whole story, with pictures: {page}")


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="ops, scaling, models, mixers, or h200 for all of them")] = "ops",
    output: Annotated[Path, typer.Option(help="folder for the CSV files")] = Path("results"),
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is one")] = "",
    only: Annotated[str, typer.Option(help="regular expression on what is measured")] = "",
) -> None:
    """Measure operators and models, each after a correctness check, into CSV files."""
    import torch

    from tokamix.bench.suites import SUITES, run

    chosen = list(SUITES) if suite == "h200" else [suite]
    if chosen[0] not in SUITES:
        console.print(f"there is no suite {suite!r}; choose one of {', '.join(SUITES)}, h200")
        raise typer.Exit(1)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    print(f"{gpu}, torch {torch.__version__}, python {platform.python_version()}", flush=True)
    for name in chosen:
        path = run(name, output, device, only, lambda line: print(line, flush=True))
        print(f"wrote {path}", flush=True)


@app.command()
def train(
    data: Annotated[str, typer.Option(help="a folder, .npz files, digits, shapes, CIFAR100, hf:user/name, wds:...tar")],
    model: Annotated[
        str | None, typer.Option(help="a model of `tokamix models` or timm; default: the recipe's")
    ] = None,
    recipe: Annotated[str, typer.Option(help="a name of `tokamix recipes`, or a YAML file")] = "small",
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value replaces a value of the recipe")] = None,
    output: Annotated[Path, typer.Option(help="the run's folder")] = Path("runs/last"),
    checkpoint: Annotated[
        str | None,
        typer.Option(help="weights to start from, of any classes, channels and size: a file, a run, hf-hub:user/name"),
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="start from timm's pretrained weights")] = False,
    resume: Annotated[bool, typer.Option(help="go on with the run in the folder, or start over")] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    workers: Annotated[int, typer.Option(help="processes that decode images")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[Literal["raise", "skip"], typer.Option(help="what to do with undecodable pictures")] = "raise",
    save_every: Annotated[int | None, typer.Option(help="steps between saved states; default: by the clock")] = None,
    log_every: Annotated[int, typer.Option(help="steps between lines of metrics.jsonl")] = 50,
    skip_nan: Annotated[int, typer.Option(help="leave out so many steps whose loss is not finite")] = 0,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="shard the model over the processes (FSDP2)")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="the same bits on a GPU too; slower")] = False,
    wandb: Annotated[str | None, typer.Option(help="a project of Weights & Biases to report to")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing but errors")] = False,
) -> None:
    """Train a model; the same command goes on after a stop.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix.cli train ...
    """
    with _plain_errors():
        import torch.distributed as dist

        from tokamix.train import train as run

        result = run(
            model,
            data,
            recipe,
            output,
            overrides=set_ or (),
            checkpoint=checkpoint,
            pretrained=pretrained,
            resume=resume,
            device=device,
            workers=workers,
            corrupt=corrupt,
            save_every=save_every,
            log_every=log_every,
            skip_nan=skip_nan,
            fsdp=fsdp,
            deterministic=deterministic,
            wandb=wandb,
            quiet=quiet,
        )
        if dist.is_initialized():
            dist.destroy_process_group()
        if not quiet and os.environ.get("RANK", "0") == "0":
            console.print(
                f"best top-1 {result.top1:.2f} % in epoch {result.best['epoch'] + 1}; everything is in {output}"
            )


@app.command(name="eval")
def eval_(
    source: Annotated[str, typer.Argument(help="a run's folder, a checkpoint file, or a pretrained model's name")],
    data: Annotated[str, typer.Option(help="the data, as for `tokamix train`; its validation part is used")],
    model: Annotated[str | None, typer.Option(help="the model's name, for a checkpoint file")] = None,
    image_size: Annotated[int | None, typer.Option(help="side in pixels; default: the model's own")] = None,
    batch_size: Annotated[int, typer.Option(help="images of one forward pass")] = 128,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    workers: Annotated[int, typer.Option(help="processes that decode images")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[Literal["raise", "skip"], typer.Option(help="what to do with undecodable pictures")] = "raise",
) -> None:
    """Measure the accuracy of a run, a checkpoint or a pretrained model."""
    with _plain_errors():
        from tokamix.evaluate import evaluate

        found = evaluate(
            source,
            data,
            model=model,
            image_size=image_size,
            batch_size=batch_size,
            device=device,
            workers=workers,
            corrupt=corrupt,
        )
        console.print(f"top-1 {found['top1']:.2f} %  top-5 {found['top5']:.2f} %  loss {found['loss']:.4f}")


@app.command()
def recipes(name: Annotated[str, typer.Argument(help="show all values of this one")] = "") -> None:
    """List the recipes with what they were taken from, or show one as the file that would hold it."""
    with _plain_errors():
        from tokamix.recipes import list_recipes, load_recipe

        if name:
            print(load_recipe(name).to_yaml(), end="")
            return
        caption = "top-1 as the paper prints it; `tokamix recipes NAME` shows every value"
        table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
        table.add_column("recipe", no_wrap=True)
        for title in ("px", "epochs", "top-1"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("source")
        for each in map(load_recipe, list_recipes()):
            top1 = "" if each.top1 is None else f"{each.top1:.1f}"
            table.add_row(each.name, str(each.image_size), str(each.epochs), top1, each.source)
        console.print(table)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What a user can cure is said in a sentence; what only we can keeps its traceback."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        if os.environ.get("TOKAMIX_TRACEBACK"):
            raise
        raise typer.Exit(1) from None


def _extras() -> dict[str, list[str]]:
    """The packages of each extra, as declared by the distribution itself."""
    extras: dict[str, list[str]] = {}
    for line in requires("tokamix") or []:
        requirement, _, marker = line.partition(";")
        if "extra ==" in marker and "tokamix[" not in requirement:
            extra = marker.split("extra ==")[1].strip(" '\"")
            extras.setdefault(extra, []).append(requirement.split("=")[0].split(">")[0].strip())
    return extras


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    app()
