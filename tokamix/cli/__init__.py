"""The `tokamix` command."""

from tokamix.cli._cli import app

__all__ = ["app"]
