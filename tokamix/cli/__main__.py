"""Runs the command line: `python -m tokamix.cli`."""

from tokamix.cli import app

if __name__ == "__main__":
    app()
