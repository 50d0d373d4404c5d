"""Every file under examples/ runs on a CPU, in a folder of its own."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import finish, run_script
from tests.test_docs import check_command
from tokamix.data import shapes

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # torchrun of this environment
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def run(*command: str, folder: Path, **environment: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.xdist_group("processes")
def test_own_mixer(tmp_path: Path) -> None:
    """In its own process: a registered mixer stays registered."""
    code, output = finish(tmp_path / "log", run_script, EXAMPLES / "own_mixer.py", tmp_path)
    assert code == 0, output
    assert "strips" in output.splitlines()[-1]


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "own_mixer.py"))
def test_python_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file runs and prints something; it is evaluated on fewer images than the user has."""
    monkeypatch.setitem(shapes.COUNTS, "val", 8)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def test_notebook(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook has the form of nbformat 4.5 without saved outputs, and its code cells run in order."""
    book = json.loads((EXAMPLES / name).read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    cells = ["".join(cell["source"]) for cell in code]
    assert sum(cell.startswith("%") for cell in cells) == 1  # the installation
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for i, cell in enumerate(cells):
        if not cell.startswith("%"):
            exec(compile(cell, f"{name}, code cell {i}", "exec"), scope)
    assert capsys.readouterr().out


def test_many_gpus(tmp_path: Path) -> None:
    """Two processes train one model."""
    small = ("--set", "model_kwargs.depth=1", "--set", "model_kwargs.dim=32")
    assert "top-1" in run("bash", str(EXAMPLES / "many_gpus.sh"), "2", *small, folder=tmp_path)
    assert json.loads((tmp_path / "runs/many_gpus/environment.json").read_text())["processes"] == 2


def test_many_machines(tmp_path: Path) -> None:
    """The SLURM script calls torchrun with a command that exists; SLURM itself is replaced by two scripts."""
    for name, text in {"scontrol": "echo node0", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PATH']}"
    words = run("bash", str(EXAMPLES / "many_machines.sh"), folder=tmp_path, PATH=path, **slurm).split()
    assert words[0] == "torchrun"
    assert "node0:29500" in words
    check_command(words)


def test_all_examples_are_listed() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in page for path in EXAMPLES.iterdir() if path.name != "README.md")
