"""The `tokamix` command."""

import platform
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    import torch

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
def demo(model: Annotated[str, typer.Option(help="which model to run")] = "stvit_small") -> None:
    """List the models, run one on a photo that ships with scikit-learn, and every mixer in the same small body."""
    models()
    if find_spec("sklearn") is None:
        console.print("the demo's photo comes with scikit-learn: pip install 'tokamix\\[demo]'")
        raise typer.Exit(1)
    import torch
    from PIL import Image
    from sklearn.datasets import load_sample_image
    from timm.data import create_transform, resolve_model_data_config

    import tokamix

    network = tokamix.create_model(model).eval()
    photo = Image.fromarray(load_sample_image("china.jpg"))
    image = create_transform(**resolve_model_data_config(network))(photo)[None]
    with torch.inference_mode():
        start = time.perf_counter()
        logits = network(image)
        seconds = time.perf_counter() - start
        maps = network.forward_intermediates(image, intermediates_only=True)
    console.print(f"\n{model} on a photo of {photo.width}x{photo.height} px, resized to {tuple(image.shape[2:])}:")
    for info, features in zip(network.feature_info, maps, strict=True):
        console.print(f"  {info['module']:<10} stride {info['reduction']:>2}   features {tuple(features.shape)}")
    console.print(
        f"  logits {tuple(logits.shape)} in {seconds * 1e3:.0f} ms; the weights are random, nothing was downloaded"
    )
    _compare_mixers(image)


def _compare_mixers(image: "torch.Tensor", body: str = "columnar_tiny") -> None:
    """Every registered mixer in one body: what it costs on this image and this machine."""
    import torch

    import tokamix
    from tokamix.bench.timing import median_ms
    from tokamix.mixers import list_mixers

    console.print(f"\nOne body ({body}), many mixers, on the same photo:")
    table = Table(box=None, header_style="bold")
    table.add_column("mixer", no_wrap=True)
    for title in ("params (M)", "GMACs", "exp (1000s)", "ms, CPU"):
        table.add_column(title, justify="right")
    for mixer in track(list_mixers(), "running", console=console, transient=True):
        network = tokamix.build(body, mixer).eval()
        params = sum(p.numel() for p in network.parameters())
        macs, exps = tokamix.count_macs(network), tokamix.count_exp(network).total()
        with torch.inference_mode():
            ms = median_ms(partial(network, image), "cpu", seconds=0.3)
        table.add_row(mixer, f"{params / 1e6:.2f}", f"{macs / 1e9:.2f}", f"{exps / 1e3:,.0f}", f"{ms:.0f}")
    console.print(table)


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
