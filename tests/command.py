"""Run a command of `tokamix` in this process."""

from typer.testing import CliRunner

from tokamix.cli import app


def call(*args: object, code: int = 0, stdin: str | None = None) -> str:
    """Run a command, check its exit code, and return its output on one line."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())
