"""What several commands share: the console and the form of errors."""

import contextlib
import logging
import os
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
METRICS = {"top1": "top-1", "miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
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
