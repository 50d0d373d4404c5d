"""Runs the command line: `python -m tokamix`."""

from tokamix.cli import app

app()
