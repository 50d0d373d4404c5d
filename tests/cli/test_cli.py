"""The command line, as a user calls it."""

import itertools
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import typer
from PIL import Image
from rich.text import Text
from typer.testing import CliRunner

import tokamix
from tokamix.bench.suites import SUITES
from tokamix.cli import app
from tokamix.cli.info import _data_folder, _extras, _kernels
from tokamix.mixers import list_mixers
from tokamix.models.bodies import BODIES
from tokamix.ops import dispatch

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def call(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--help", "Usage: tokamix [OPTIONS] COMMAND"),
        ("train --help", "torchrun --nproc-per-node 8 -m tokamix train"),
        ("trian", "Did you mean 'train', 'transfer'?"),
        ("train --dta digits", "--data"),
        ("--version", tokamix.__version__),
    ],
)
def test_answers_without_importing_torch(arguments: str, text: str) -> None:
    """Processor time, not time on the clock: the machine may be busy."""
    code = (
        "import sys, time\n"
        "from tokamix.cli import app\n"
        "try: app(prog_name='tokamix')\n"
        "except SystemExit: pass\n"
        "print('seconds', time.process_time())\n"
        "print('heavy', [m for m in ('torch', 'timm', 'numpy') if m in sys.modules])\n"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    environment = {**os.environ, "COLUMNS": "160"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert text in result.stdout + result.stderr
    assert "heavy []" in result.stdout
    assert float(result.stdout.partition("seconds ")[2].split()[0]) < 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_sentences(name: str) -> None:
    """Every option and argument says what it is, in the same form."""
    parameters = [p for p in COMMANDS[name].params if p.name != "help"]
    assert parameters
    for parameter in parameters:
        text = getattr(parameter, "help", None) or ""
        assert re.fullmatch(r"([A-Z0-9]|cuda or cpu|key=value|[a-z]+_tiny|self, |y,x |knn, ).*\.", text), (name, text)
        assert "; default" not in text, (name, text)
        assert Text.from_markup(text).plain == text, "rich takes words in brackets for markup, and leaves them out"


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"export"}))  # export's long options need more
def test_help_fits_into_80_columns(name: str) -> None:
    """No option, value or sentence is cut off; the lines of a paragraph are filled."""
    text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
    assert "…" not in text
    description = text.partition("╭")[0].splitlines()
    for line, following in itertools.pairwise(line.strip() for line in description):
        if line and following and not line.startswith("Usage"):
            assert len(line) + 1 + len(following.split()[0]) > 77, line


@pytest.mark.parametrize("module", ["tokamix", "tokamix.cli"])
def test_runs_as_a_module(module: str) -> None:
    result = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"tokamix {tokamix.__version__}\n"


def test_models() -> None:
    out = call("models", "stvit")
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["stvit_small"])
    assert row[1:4] == ["25.50", "4.34", "83.6"]
    assert "more combine" not in out
    assert "error: no model matches 'nothing-like-it'" in call("models", "nothing-like-it", code=1)
    assert "# pyramid_nano_sima.imagenette" in call("models", "pyramid_nano_sima.imagenette")


def test_models_counts_the_hidden_ones() -> None:
    shown, hidden = map(int, re.findall(r"(\d+) models; (\d+) more", call("models"))[0])
    assert shown + hidden == len(tokamix.list_models())
    assert hidden == len(BODIES) * len(list_mixers())


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamix.cli.info.requires", lambda name: ['scikit-learn; extra == "demo"'])
    out = call("info")
    for word in ("tokamix", "torch", "CPU features", "GPU", "triton", "kernels", "data folder", "extra demo"):
        assert word in out
    with dispatch.use_backend("eager"):
        assert "not used: TOKAMIX_BACKEND=eager" in call("info")


@pytest.mark.parametrize(
    ("forced", "reason", "text"),
    [
        (None, None, "used for float16, bfloat16 and float32"),
        (None, "Triton is not installed", "not used: Triton is not installed"),
        ("triton", "tensors are on cpu", "TOKAMIX_BACKEND=triton, but tensors are on cpu: operators raise errors"),
        ("triton", None, "always used, or an error"),
    ],
)
def test_info_on_kernels(forced: str | None, reason: str | None, text: str) -> None:
    assert _kernels(reason, forced) == text


def test_info_on_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.9", 'mkdocstrings[python]<2,>=1; extra == "docs"', 'a-b.c; extra == "docs"']
    monkeypatch.setattr("tokamix.cli.info.requires", lambda name: lines)
    assert _extras() == {"docs": ["mkdocstrings", "a-b.c"]}


def test_info_from_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tokamix.cli.info.requires", requires)
    assert "extras not known: tokamix runs from a source tree and is not installed" in " ".join(call("info").split())


def test_info_with_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_forced", "bogus")  # the value of TOKAMIX_BACKEND
    assert call("info", code=1).startswith("error: unknown backend 'bogus': choose one of eager, triton")


def test_info_on_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMIX_DATA", str(tmp_path))
    assert _data_folder() == f"{tmp_path} (TOKAMIX_DATA): writable"
    monkeypatch.setenv("TOKAMIX_DATA", str(tmp_path / "new"))
    assert _data_folder().endswith("does not exist yet")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKAMIX_DATA", str(tmp_path / "file"))
    assert _data_folder().endswith("is not a folder")


def test_info_checks_data(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{i}.png")
    out = call("info", "--data", str(tmp_path))
    assert "2 classes" in out
    assert "train: 6 images, 2 classes present; 6 of them decoded" in out
    assert "val: 2 images, 2 classes present" in out
    assert "no problem found" in out
    for name in ("cat", "dog"):  # of one image, nothing can be held out
        (tmp_path / "few" / name).mkdir(parents=True)
        (tmp_path / "few" / name / "0.png").write_bytes((tmp_path / "val" / name / "0.png").read_bytes())
    out = call("info", "--data", str(tmp_path / "few"))
    assert "there are no validation images, which training needs" in " ".join(out.split())
    assert "no problem found" not in out
    (tmp_path / "val" / "dog" / "0.png").write_bytes(b"")
    broken = call("info", "--data", str(tmp_path), code=1)
    assert f"error: {tmp_path / 'val' / 'dog' / '0.png'} is empty" in broken.replace("\n", "")
    (tmp_path / "val" / "cat" / "0.png").write_bytes(b"x")
    broken = call("info", "--data", str(tmp_path), code=1)
    assert "val: 2 images, 2 classes present; 2 of 2 cannot be decoded" in broken
    assert broken.count("0.png") == 2
    assert "did you mean digits?" in call("info", "--data", "digitz", code=1)
    assert "train: 512 images; 512 of them decoded" in call("info", "--data", "shapes", "--task", "detect")


def test_bench(tmp_path: Path) -> None:
    out = call("bench", "--suite", "ops", "--device", "cpu", "--only", "context_broadcast", "--output", str(tmp_path))
    assert "context_broadcast eager: B 128, C 384, 197 tokens: forward_ms" in out
    assert (tmp_path / "ops.csv").read_text().startswith("label,op,case,tokens,backend,forward_ms")
    assert {f"columnar_small_{m} infer 224" for m in list_mixers()} == {label for label, _ in SUITES["mixers"]("cpu")}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--suite all",
            "there is no suite 'all'; choose one of ops, scaling, models, mixers, softmax, images, ",
        ),
        ("--device cpu", "name models to compare, such as stvit_small convnext_tiny, or a suite with --suite"),
        ("stvit_small --suite ops", "name models to compare"),
        ("--suite ops --device cuda", "--device cuda needs a GPU, and torch finds none"),
        ("--suite ops --device tpu", "cannot measure on device 'tpu'; choose cuda or cpu"),
        ("--suite ops --device cpu --only (", "--only '(' is not a regular expression"),
    ],
)
def test_bench_errors_are_one_sentence(arguments: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = call("bench", *arguments.split(), code=1)
    assert out.startswith(f"error: {text}")
    assert "Traceback" not in out


@pytest.mark.parametrize("traceback", ["", "1"])
def test_a_missing_extra_is_one_sentence(traceback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback is shown where TOKAMIX_TRACEBACK asks for it."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = CliRunner().invoke(app, ["info", "--data", "digits"], env={"TOKAMIX_TRACEBACK": traceback})
    assert result.exit_code == 1
    assert "tokamix[demo]" in result.output
    assert isinstance(result.exception, ImportError if traceback else SystemExit)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"GOMP_SPINCOUNT": "100"}, "100")],
)
def test_waiting_threads_spin_briefly(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    """Unless the user has set how they wait; also where the command ends with an error."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    monkeypatch.setattr(os, "environ", environment | given)
    call("train", "--data", "no/such/folder", code=1)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
