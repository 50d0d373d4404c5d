"""The `tokamix` command."""

import contextlib
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any, Literal

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
WIDE = 120  # characters of a terminal in which there is room for everything
METRICS = {"top1": "top-1", "miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="a part of the name, or a shell pattern")] = "",
    grid: Annotated[bool, typer.Option(help="also the comparison grid, bodies x mixers")] = False,
) -> None:
    """List the models: parameters, MACs at 224 px, paper, and the accuracy the paper prints."""
    import timm

    import tokamix
    from tokamix.models._registry import sizes

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
    with _plain_errors():
        table.add_row("kernels", _kernels_used(dispatch.why_not(probe), dispatch.forced()))
    for extra, packages in sorted(_extras().items()):
        missing = [p for p in packages if not _installed(p)]
        hint = f"missing {', '.join(missing)}: pip install 'tokamix\\[{extra}]'" if missing else "installed"
        table.add_row(f"extra {extra}", hint)
    console.print(table)


def _kernels_used(reason: str | None, forced: str | None) -> str:
    if forced == "eager":
        return "not used: TOKAMIX_BACKEND=eager"
    if forced == "triton":
        return f"TOKAMIX_BACKEND=triton, but {reason}: operators raise errors" if reason else "always used, or an error"
    return f"not used: {reason}" if reason else "used for float16, bfloat16 and float32"


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
    suite: Annotated[str, typer.Option(help="ops, scaling, models, mixers, or h200 for the first three")] = "ops",
    output: Annotated[Path, typer.Option(help="folder for the CSV files")] = Path("results"),
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is one")] = "",
    only: Annotated[str, typer.Option(help="regular expression on what is measured")] = "",
) -> None:
    """Measure operators and models, each after a correctness check, into CSV files."""
    import torch

    from tokamix.bench.suites import H200, SUITES, environment, run

    chosen = list(H200) if suite == "h200" else [suite]
    if chosen[0] not in SUITES:
        console.print(f"there is no suite {suite!r}; choose one of {', '.join(SUITES)}, h200")
        raise typer.Exit(1)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = environment(device)
    print(where, end="", flush=True)
    if suite == "h200":  # what docs/benchmarks.md says of its tables
        output.mkdir(parents=True, exist_ok=True)
        (output / "environment.txt").write_text(where)
    for name in chosen:
        path = run(name, output, device, only, lambda line: print(line, flush=True))
        print(f"wrote {path}", flush=True)


@app.command()
def train(
    data: Annotated[
        str,
        typer.Option(
            help="a folder, .npz files, digits, shapes, CIFAR100, hf:user/name, wds:...tar; to segment or detect:"
            " shapes, or a folder with masks or COCO's annotations"
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="a model of `tokamix models` or timm; default: the recipe's")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="a name of `tokamix recipes`, or a YAML file; default: small for the task")
    ] = None,
    task: Annotated[
        Literal["classify", "segment", "detect"] | None, typer.Option(help="what is learned; default: the recipe's")
    ] = None,
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
            task=task,
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
            words = f"best {METRICS[result.metric]} {result.score:.2f} % in epoch {result.best['epoch'] + 1}"
            console.print(f"{words}; everything is in {output}")


@app.command(name="eval")
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

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix.cli eval ...
    """
    from tokamix.distributed import together

    with _plain_errors(), together(device) as rank:
        from tokamix.dense.saved import read_config
        from tokamix.evaluate import evaluate

        if config := read_config(source):
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


@app.command()
def predict(
    images: Annotated[list[str], typer.Argument(help="pictures, or folders of them")],
    run: Annotated[str, typer.Option(help="the folder of a run of `tokamix train --task segment` or `detect`")],
    output: Annotated[Path, typer.Option(help="folder for the results")] = Path("predictions"),
    score: Annotated[float, typer.Option(min=0, max=1, help="leave detections below it out")] = 0.3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
) -> None:
    """Segment pictures, or find things in them: overlays, classes of pixels, and detections in COCO's form."""
    with _plain_errors():
        from tokamix.predict import find_pictures
        from tokamix.predict import predict as run_predict

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        found = find_pictures(images)
        problems = run_predict(run, found, output, device=device, score=score, say=say)
        errors = Console(stderr=True)
        for problem in problems:
            errors.print(f"[bold red]error:[/] {escape(problem)}", highlight=False, soft_wrap=True)
        done = "nothing was done" if len(problems) == len(found) else f"everything is in {output}"
        console.print(done, highlight=False, soft_wrap=True)
        if problems:
            raise typer.Exit(1)


@app.command()
def recipes(
    name: Annotated[str, typer.Argument(help="show all values of this one")] = "",
    model: Annotated[str | None, typer.Option(help="the model whose row to show, of a recipe for several")] = None,
) -> None:
    """List the recipes with what they were taken from, or show one as the file that would hold it."""
    with _plain_errors():
        from tokamix.recipes import list_recipes, load_recipe, recipe_rows
        from tokamix.recipes.tables import duration, printed

        if name:
            print(load_recipe(name, model=model).to_yaml(), end="")
            return
        caption = "top-1, mIoU, box and mask AP as the paper prints them; `tokamix recipes NAME` shows every value"
        table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
        rows = [
            {
                "recipe": each.name,
                "model": each.model or "any",
                "length": duration(each),
                "printed": printed(each),
                "px": str(each.image_size if each.task == "classify" else (each.scale or ("",))[-1]),
                "source": each.source,
            }
            for known in list_recipes()
            for each in recipe_rows(known)
        ]
        shown = list(rows[0]) if console.width >= WIDE else ["recipe", "source"]
        for title in shown:
            named = title in ("recipe", "model", "length")  # whole, whatever becomes of the others
            widest = max(len(row[title]) for row in rows) if named else None
            justify: Literal["left", "right"] = "right" if title in ("length", "px") else "left"
            table.add_column(title, justify=justify, min_width=widest, no_wrap=named)
        for cells in dict.fromkeys(tuple(row[title] for title in shown) for row in rows):
            table.add_row(*cells)
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
