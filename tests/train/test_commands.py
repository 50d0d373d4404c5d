"""`tokamix train`, `eval` and `recipes`, as a user calls them."""

import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from tests.train.loop.test_resume import Stop, stop_at
from tests.train.tiny import TINY, assert_same_bits, run, tiny_data
from tokamix.cli import app
from tokamix.inference import read_precision
from tokamix.recipes import list_recipes, load_recipe
from tokamix.train import train
from tokamix.train.loop.engine import NotFiniteError
from tokamix.train.output.progress import Display

SMALL = "--epochs 2 --batch-size 256 --image-size 8 --set model_kwargs.dim=16 --set model_kwargs.depth=1"
SMALL += " --device cpu --recipe digits --data digits"


def call(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_one_class_is_refused(tmp_path: Path) -> None:
    """Its accuracy would be 100 % from the start."""
    (tmp_path / "cat").mkdir()
    for i in range(10):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / "cat" / f"{i}.png")
    out = call("train", "--data", str(tmp_path), "--device", "cpu", "--output", str(tmp_path / "run"), code=1)
    assert (
        "has only the classes ['cat'], and a classifier needs at least two; add a folder for each further class" in out
    )
    assert not (tmp_path / "run").exists()


def test_train_eval_and_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("sklearn")
    out = call("train", *SMALL.split(), "--output", str(tmp_path / "a"))
    assert f"columnar_tiny_softmax on digits: 2 epochs of 5 steps, in {tmp_path / 'a'}" in out
    assert "epochs changed from 25 to 2, so the schedule scales: warmup_epochs 1 -> 0.08" in caplog.text
    assert "epoch 2/2 train loss" in out
    assert f"the run is in {tmp_path / 'a'}" in out
    top1 = out.partition("best top-1 ")[2].split()[0]
    assert f"top-1 {top1} %" in call("eval", str(tmp_path / "a"), "--data", "digits", "--device", "cpu")
    assert f"the run in {tmp_path / 'a'} is complete, there is nothing left to train" in call(
        "train", *SMALL.split(), "--output", f"{tmp_path}/a"
    )
    other = call("train", *SMALL.split(), "--set", "lr=1", "--output", str(tmp_path / "a"), code=1)
    assert "lr was 0.002 and is 1.0" in other
    assert "Traceback" not in other
    # the run's own recipe repeats it
    again = call("train", "--data", "digits", "--recipe", f"{tmp_path}/a/recipe.yaml", "--output", f"{tmp_path}/b")
    assert f"best top-1 {top1} %" in again
    assert "--pretrained and --no-pretrained contradict" in call(
        "train", "--data", "digits", "--pretrained", "--no-pretrained", code=1
    )
    assert "--resume and --no-resume contradict" in call(
        "train", *SMALL.split(), "--resume", "a", "--no-resume", code=1
    )
    assert "has no saved state to resume" in call("train", *SMALL.split(), "--resume", f"{tmp_path}/c", code=1)


def test_runs_number_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished or foreign folder is never used again; an unfinished run with the same settings is resumed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "train").mkdir(parents=True)
    (tmp_path / "runs" / "train" / "notes.txt").write_text("not a run")
    finished = run(None, epochs=2)
    assert finished.folder == Path("runs/train-2")
    for output, settings in ((None, {"save_every": 3}), ("runs/train-4", {"lr": 1e-3})):  # with a saved state, without
        with monkeypatch.context() as patch:
            stop_at(patch, 4)
            with pytest.raises(Stop):
                run(output, epochs=2, **settings)
    assert run(None, epochs=2, save_every=3).folder == Path("runs/train-3")
    assert run(None, epochs=2, lr=1e-3).folder == Path("runs/train-4")
    assert run(None, epochs=2).folder == Path("runs/train-5")
    assert_same_bits(tmp_path / "runs" / "train-2", tmp_path / "runs" / "train-3")
    assert run(None, epochs=2, resume=False).folder == Path("runs/train-6")
    assert sorted(path.name for path in (tmp_path / "runs" / "train").iterdir()) == ["notes.txt"]


def test_resume_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is the run's own."""
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            run(tmp_path / "a", epochs=2, save_every=3)
    result = train(None, tiny_data(), resume=tmp_path / "a", device="cpu", quiet=True)
    assert (result.folder, len(result.epochs)) == (tmp_path / "a", 2)
    assert_same_bits(tmp_path / "a", run(tmp_path / "c", epochs=2, save_every=3).folder)
    with pytest.raises(ValueError, match="name two folders; leave --output out"):
        train(None, tiny_data(), output=tmp_path / "b", resume=tmp_path / "a", device="cpu")


def test_resuming_a_fine_tuning_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved state replaces them."""
    start = run(tmp_path / "start", epochs=2).folder
    settings = {"epochs": 2, "save_every": 3, "finetune": True, "checkpoint": start}
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            run(tmp_path / "a", **settings)
    train(None, tiny_data(), resume=tmp_path / "a", device="cpu", quiet=True)
    assert_same_bits(tmp_path / "a", run(tmp_path / "b", **settings).folder)


def test_resuming_keeps_the_precision_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 was asked for; a recipe alone has no effect on a CPU."""
    (tmp_path / "recipe.yaml").write_text(TINY.to_yaml())
    common = {"device": "cpu", "quiet": True, "save_every": 3}
    for name, overrides in (("bf16", ["precision=bf16"]), ("fp32", [])):
        with monkeypatch.context() as patch:
            stop_at(patch, 4)
            with pytest.raises(Stop):
                train(None, tiny_data(), str(tmp_path / "recipe.yaml"), tmp_path / name, overrides=overrides, **common)
        assert read_precision(train(None, tiny_data(), resume=tmp_path / name, **common).folder) == name


@pytest.mark.parametrize("names", [{"top1": "top-1"}, {"box_ap": "box AP", "mask_ap": "mask AP"}], ids=len)
def test_lines_fit_80_columns(tmp_path: Path, names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    display = Display("model on data", tmp_path, 300, 1251, 0, names, quiet=False)
    metrics = {key: 47.123 for name in names for key in (name, f"ema_{name}")}
    train_row = {"epoch": 299, "loss": 2.3456, "images_per_second": 12345.6}
    with display.console.capture() as capture:
        row = {**metrics, "epoch": 299, "train_loss": 2.3, "loss": 1.2, "seconds": 1234.5, "images_per_second": 12345.6}
        display.report(train_row)
        display.epoch(row, is_best=True)
        display.console.print(display.bar)
    lines = capture.get().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 299/300  train loss 2.3000  val loss 1.2000")
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert lines[1].rstrip().endswith("left")
    assert "img/s" in lines[1] or len(names) > 1


def test_errors_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("--output", str(tmp_path / "a"), "--device", "cpu")
    assert "did you mean digits?" in call("train", "--data", "digitz", *here, code=1)
    assert "did you mean lr" in call("train", "--data", "digits", "--set", "lrr=1", *here, code=1)
    assert "there is no recipe 'digitss'" in call("train", "--data", "digits", "--recipe", "digitss", *here, code=1)
    assert "did you mean stvit_small" in call("train", "--data", "digits", "--model", "stvit_smal", *here, code=1)
    assert "there is no model 'nothing'" in call("eval", "nothing", "--data", "digits", code=1)

    for option, value, least in (("log-every", 0, 1), ("save-every", -3, 1), ("workers", -1, 0), ("skip-nan", -1, 0)):
        out = call("train", "--data", "digits", f"--{option}={value}", *here, code=1)
        assert f"is {value}, but must be at least {least}; change --{option}" in out
    assert "PyTorch finds no MPS device" in call("train", "--data", "digits", *here[:2], "--device", "mps", code=1)
    out = call("train", "--data", "digits", "--model", "stvit_small", "--pretrained", *here, code=1)
    assert "there are no pretrained weights for stvit_small; leave out --pretrained" in out
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in call("train", *SMALL.split(), "--output", f"{tmp_path}/file", code=1)

    def fill_memory(*args, **kwargs):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(sys.modules["tokamix.train"], "train", fill_memory)
    assert "error: out of memory; use smaller images" in call("train", "--data", "digits", *here, code=1)

    def lose_worker(*args, **kwargs):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    monkeypatch.setattr(sys.modules["tokamix.train"], "train", lose_worker)
    assert "error: a data worker died" in call("train", "--data", "digits", *here, code=1)

    def fail(*args, **kwargs):
        raise NotFiniteError("the loss is not finite at step 3")

    monkeypatch.setattr(sys.modules["tokamix.train"], "train", fail)
    assert call("train", "--data", "digits", *here, code=1) == "error: the loss is not finite at step 3"


def test_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at least every 30 s, also during an evaluation."""
    monkeypatch.setattr(sys.modules[Display.__module__], "INTERVAL", 0.05)
    display = Display("model on data", tmp_path, 2, 100, 0, {"top1": "top-1"}, quiet=False)
    lines: list[str] = []
    monkeypatch.setattr(display.console, "print", lambda text, **options: lines.append(text))
    with display:
        display.report({"epoch": 1, "loss": 2.3456, "images_per_second": 12345.6})
        display.step(100)
        until = time.monotonic() + 10
        while len(lines) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert lines[1] == "epoch 1/2  step 100/100  loss 2.3456  12,346 img/s"


@pytest.mark.parametrize("width", [80, 160])
def test_recipes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamix.cli.recipes.console", Console(width=width))
    out = call("recipes")
    assert all(f" {name} " in out for name in list_recipes())
    assert "ATMNet, Tables 1 and 9: ATMNet-xT" in out
    assert ("300 epochs" in out) == (width == 160)
    assert load_recipe("digits").to_yaml().split() == call("recipes", "digits").split()
    assert "did you mean digits" in call("recipes", "digit", code=1)


def test_the_bar_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time left, speed, loss and accuracy, on a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    shown: list[str] = []
    real = Display.__exit__

    def leave(self: Display, *args) -> None:
        shown.append(str(self.bar.tasks[0].fields["text"]))
        shown.append(self.bar.tasks[0].description)
        assert self.bar.finished
        real(self, *args)

    monkeypatch.setattr(Display, "__exit__", leave)
    run(tmp_path / "a", data=tiny_data(), quiet=False, log_every=2)
    assert "loss" in shown[0]
    assert "img/s" in shown[0]
    assert "top-1" in shown[0]
    assert shown[1] == "epoch 3/3"


def test_folder_with_a_damaged_image(tmp_path: Path) -> None:
    """The error names it; `--corrupt skip` skips it; `--workers` decode."""
    for name, shade in (("dark", 40), ("bright", 200)):
        for part in ("train", "val"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (20, 20), (shade + i,) * 3).save(tmp_path / part / name / f"{i}.png")
    (tmp_path / "train" / "dark" / "3.png").write_bytes(b"no picture")
    arguments = f"train --data {tmp_path} --device cpu --workers 1 --model columnar_tiny_sima --output {tmp_path}/run"
    settings = "epochs=1 warmup_epochs=0 batch_size=8 image_size=16 precision=fp32 compile=false mixup=0 cutmix=0"
    settings += " model_kwargs.dim=16 model_kwargs.depth=1 model_kwargs.num_heads=2 model_kwargs.patch_size=4"
    command = [*arguments.split(), *(word for setting in settings.split() for word in ("--set", setting))]
    assert "3.png" in call(*command, code=1)
    out = call(*command, "--corrupt", "skip", "--set", "select=last")
    assert "last top-1" in out.partition("epoch 1/1")[2]
    assert "% in epoch 1 (averaged weights); the run is in" in out
    assert "best" not in out


def test_train_a_segmenter(tmp_path: Path) -> None:
    settings = "iterations=2 eval_every=2 warmup_iterations=0 batch_size=4 crop_size=32 scale=none"
    flags = [word for setting in settings.split() for word in ("--set", setting)]
    common = ["train", "--data", "shapes:32", "--device", "cpu", "--workers", "0", "--output", str(tmp_path / "a")]
    out = call(*common, "--task", "segment", "--recipe", "shapes_segment", *flags)
    assert "semantic_fpn with test_resnet on shapes:32: 1 epoch of 2 steps" in out
    assert "mIoU" in out
    assert f"the run is in {tmp_path / 'a'}" in out
    wrong = call(*common, "--task", "detect", "--recipe", "shapes_segment", code=1)
    assert "the recipe shapes_segment is for task segment, not detect" in wrong
    assert "semantic_fpn, upernet" in call(*common, "--recipe", "shapes_segment", "--set", "method=fcn", code=1)
    assert "names no model" in call(*common, "--task", "detect", code=1)
