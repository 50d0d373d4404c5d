"""The `tokamix` command."""

from tokamix.cli.main import app

__all__ = ["app"]
