"""The first cases of `make fuzz`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, run_script


def test_operators() -> None:
    """In a new interpreter: Triton's interpreter is switched on before anything is imported."""
    command = [sys.executable, "-m", "tests.fuzz.operators", "--count", "20"]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "0 of 20 cases wrong" in job.stdout


@pytest.mark.xdist_group("processes")
def test_loaders(tmp_path: Path) -> None:
    code, output = finish(tmp_path / "log", run_script, ROOT / "tests" / "fuzz" / "loaders.py", ROOT, "--count", "6")
    assert code == 0, output
    assert "0 of 6 cases wrong" in output
