"""The `tokamix` command: one function per command, each in its own file.

No module here imports torch before a command runs, so that `--help` and typing errors answer at once.
"""

import io
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import tokamix
from tokamix._openmp import limit_spinning
from tokamix.cli.bench import bench
from tokamix.cli.compare import compare
from tokamix.cli.convert import convert
from tokamix.cli.demo import demo
from tokamix.cli.embed import embed
from tokamix.cli.eval import eval_
from tokamix.cli.explain import explain
from tokamix.cli.export import export
from tokamix.cli.info import info
from tokamix.cli.models import models
from tokamix.cli.neighbours import neighbours
from tokamix.cli.pick import pick
from tokamix.cli.predict import predict
from tokamix.cli.probe import probe
from tokamix.cli.recipes import recipes
from tokamix.cli.studio import studio
from tokamix.cli.study import study
from tokamix.cli.train import train
from tokamix.cli.transfer import transfer

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tokamix {tokamix.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Vision token mixers from five papers, inside timm."""
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):  # names of files may hold what the terminal's encoding does not have
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _help(command: Callable[..., None]) -> str:
    """The docstring without the line breaks inside its paragraphs, which terminals of other widths would show."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").split("\n\n"))


for name, command in (
    ("train", train),
    ("eval", eval_),
    ("predict", predict),
    ("embed", embed),
    ("neighbours", neighbours),
    ("probe", probe),
    ("export", export),
    ("transfer", transfer),
    ("explain", explain),
    ("studio", studio),
    ("models", models),
    ("recipes", recipes),
    ("compare", compare),
    ("convert", convert),
    ("demo", demo),
    ("study", study),
    ("bench", bench),
    ("pick", pick),
    ("info", info),
):
    app.command(name, help=_help(command))(command)
