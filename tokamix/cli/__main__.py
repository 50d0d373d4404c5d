"""Runs the command line: `python -m tokamix.cli`."""

from tokamix.cli import app

app()
