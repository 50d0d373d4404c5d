"""The `tokamix` command: one function per command, each in its own file."""

import typer

from tokamix.cli.bench import bench
from tokamix.cli.demo import demo
from tokamix.cli.eval import eval_
from tokamix.cli.info import info
from tokamix.cli.models import models
from tokamix.cli.predict import predict
from tokamix.cli.recipes import recipes
from tokamix.cli.train import train

app = typer.Typer(
    help="Vision token mixers from five papers, inside timm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (models, info, demo, bench, train, predict, recipes):
    app.command()(command)
app.command("eval")(eval_)
