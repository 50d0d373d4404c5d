"""The command line, as a user calls it."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tokamix.bench.suites import SUITES
from tokamix.cli import app
from tokamix.demo import ENTRANTS
from tokamix.mixers import list_mixers
from tokamix.ops.dispatch import use_backend


def call(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_models() -> None:
    out = call("models", "stvit")
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["stvit_small"])
    assert row[1:4] == ["25.50", "4.34", "83.6"]
    assert "no model matches 'nothing-like-it'" in call("models", "nothing-like-it", code=1)


def test_info() -> None:
    out = call("info")
    for word in ("tokamix", "torch", "GPU", "triton", "kernels", "extra demo"):
        assert word in out
    with use_backend("eager"):
        assert "not used: TOKAMIX_BACKEND=eager" in call("info")


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("eager", "not used: TOKAMIX_BACKEND=eager"),
        ("triton", "tensors are on cpu, the kernels need CUDA: operators raise errors"),
        ("bogus", "unknown backend 'bogus': choose one of eager, triton"),
    ],
)
def test_info_on_a_forced_backend(backend: str, says: str) -> None:
    forced = {"TOKAMIX_BACKEND": backend, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    command = [sys.executable, "-m", "tokamix.cli", "info"]
    result = subprocess.run(command, env={**os.environ, **forced}, capture_output=True, text=True, check=False)
    assert says in result.stdout + result.stderr
    assert result.returncode == (backend == "bogus")


def test_demo(tmp_path) -> None:
    """Trains, and tells the same numbers in a table and on a page; a folder keeps one demo."""
    pytest.importorskip("sklearn")
    out = call("demo", "--quick", "--output", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    table = out.partition("token mixer")[2]
    for entrant in ENTRANTS:
        assert entrant.title in page
        row = next(line for line in table.splitlines() if line.startswith(entrant.title))
        accuracy, parameters = row.removeprefix(entrant.title).split()[:3:2]
        assert f"<td>{accuracy}\u00a0%</td><td>{parameters}" in page
    listed = out.partition("every mixer, untrained")[2].split()
    assert all(mixer in listed and f"<code>{mixer}</code>" in page for mixer in list_mixers())
    assert len(list(tmp_path.rglob("last.safetensors"))) == len(ENTRANTS) == 6
    again = " ".join(
        call("demo", "--output", str(tmp_path), code=1).split()
    )  # lines break where the folder's name ends
    assert "is not trained again" in again
    assert "holds a run with other settings" in again


def test_bench(tmp_path) -> None:
    out = call("bench", "--suite", "ops", "--device", "cpu", "--only", "sima eager.* 197", "--output", str(tmp_path))
    assert "sima eager: B 128, 6 heads of 64, 197 tokens: forward_ms" in out
    assert (tmp_path / "ops.csv").read_text().startswith("op,case,tokens,backend,forward_ms")
    assert "there is no suite 'all'" in call("bench", "--suite", "all", code=1)
    assert {f"columnar_small_{m} infer 224" for m in list_mixers()} == {label for label, _ in SUITES["mixers"]("cpu")}
