"""The first cases of `make fuzz`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("script", "count"), [("operators", 20), ("loaders", 6)])
def test_first_cases(script: str, count: int) -> None:
    command = [sys.executable, "-m", f"tests.fuzz.{script}", "--count", str(count)]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"0 of {count} cases wrong" in job.stdout
