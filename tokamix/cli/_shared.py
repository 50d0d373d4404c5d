"""What several commands share: the console, names of metrics, and errors as one sentence."""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from tokamix.bench.runtimes import RuntimeRow
    from tokamix.compare import Report

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(width=1000)  # files and pipes get whole lines
WIDE = 120  # columns of a terminal that fit every column of the widest tables
# texts of PyTorch's errors on the GPU and the CPU
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")
METRICS = {"top1": "top-1", "miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}
METRICS |= {"knn": "k-NN", "effective_rank": "effective rank", "vqa": "VQA accuracy"}


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that users can fix as one sentence; bugs of ours keep their traceback.

    TOKAMIX_TRACEBACK=1 shows the traceback of every error.
    """
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
    except (RuntimeError, MemoryError) as error:
        if "DataLoader worker" in str(error):  # PyTorch raises this wherever the program is at that moment
            text = "a data worker died, usually for want of memory; use fewer --workers or a smaller batch"
            Console(stderr=True).print(f"[bold red]error:[/] {text}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        text = "out of memory; use smaller images or a smaller batch (--image-size, --batch-size)"
        Console(stderr=True).print(f"[bold red]error:[/] {text}", highlight=False, soft_wrap=True)
        if os.environ.get("TOKAMIX_TRACEBACK"):
            raise
        raise typer.Exit(1) from None


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option of a command was set by the user."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def print_line(text: str) -> None:
    """Print a line at once, as it is."""
    print(text, flush=True)


def runtime_table(rows: "Sequence[RuntimeRow]") -> Table:
    """Latency of models in runtimes, and, where the terminal is wide enough, their cost."""
    titles = ["model", "runtime", "size", "batch", "ms", "±", "images/s", "x eager", "error"]
    if console.width >= WIDE:
        titles += ["GB", "J/image", "params", "MACs", "exp"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("model", "runtime") else "right", no_wrap=True)
    for row in rows:
        energy = "" if math.isnan(row.joules_per_image) else f"{row.joules_per_image:.3f}"
        cells = (
            *(row.model, row.runtime, str(row.size), str(row.batch), f"{row.milliseconds:.1f}", f"{row.spread:.0%}"),
            *(f"{row.images_per_second:.0f}", "" if math.isnan(row.speedup) else f"{row.speedup:.2f}"),
            *(f"{row.error:.0e}", f"{row.memory_gb:.2f}", energy),
            *(f"{row.parameters / 1e6:.1f} M", f"{row.macs / 1e9:.2f} G", f"{row.exps / 1e6:.2f} M"),
        )
        table.add_row(*cells[: len(titles)])
    return table


def print_comparison(report: "Report") -> None:
    """Print the tables of a comparison: the trained mixers, and the cost of all."""
    from tokamix.compare.report import accuracy_text, amount

    trained = Table(box=None, header_style="bold", caption_justify="left", pad_edge=False)
    trained.add_column("token mixer")
    for title in ("accuracy", "params", "MACs", "exp calls", f"{report.device} latency", "training"):
        trained.add_column(title, justify="right", no_wrap=True)
    for result in report.results:
        costs = (amount(result.parameters), amount(result.costs[0].macs), amount(result.costs[0].exps))
        times = (f"{result.latency_ms:.1f} ms", f"{result.seconds:.0f} s")
        trained.add_row(result.title, accuracy_text(result), *costs, *times)
    trained.caption = (
        f"{report.train_images:,} training images, {report.test_images:,} validation images: differences below"
        f" {report.noise:.1f} points mean nothing"
    )
    untrained = Table(box=None, header_style="bold", pad_edge=False)
    untrained.add_column("all mixers, untrained")
    for title in ("params", "MACs", "exp calls", f"{report.device} latency"):
        untrained.add_column(title, justify="right", no_wrap=True)
    for cost in report.costs:
        untrained.add_row(cost.mixer, *cost.cells())
    console.print("", trained, "", untrained)
