"""Runs that are stopped and resumed."""

import json
import os
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from tests.processes import finish
from tests.train.kill_loop import kill_repeatedly
from tests.train.tiny import TINY, assert_same_bits, run, state_of, tiny_data
from tokamix.train import RunResult
from tokamix.train import run as train_run
from tokamix.train.loop import engine
from tokamix.train.loop.engine import Engine
from tokamix.train.loop.state import read_state, write_state


class Stop(Exception):
    """Stops a run in a test."""


def stop_at(monkeypatch: pytest.MonkeyPatch, update: int, act=None) -> None:
    """Stop the run before this step."""
    real = Engine._train_step

    def step(self: Engine, batches) -> None:
        if self.update == update:
            if act is None:
                raise Stop
            act()
        real(self, batches)

    monkeypatch.setattr(Engine, "_train_step", step)


SETTINGS = {
    "plain": {"deterministic": True},
    "everything": {
        "ema": 0.9,
        "accumulate": 2,
        "mixup": 0.8,
        "cutmix": 1.0,
        "drop_path": 0.2,
        "drop_path_later": {2: 0.4},
        "drop_rate": 0.1,
        "random_erasing": 0.25,
        "crop_padding": 1,
        "hflip": 0.5,
        "clip_grad": 1.0,
        "layer_decay": 0.8,
        "repeated_augmentation": 2,
    },
    "sgd": {"optimizer": "sgd", "ema": 0.5},
    "lamb": {"optimizer": "lamb", "schedule": "constant", "channels_last": True, "grad_checkpointing": True},
    "batch norm": {"network": "test_resnet", "model_kwargs": {}, "ema": 0.9, "image_size": 16},
}


# within the first epoch, and before the third; each setting has its own state, so one stop is enough for most
STOPS = [("plain", 4), ("everything", 4), ("everything", 10), ("sgd", 10), ("lamb", 4), ("batch norm", 10)]


@pytest.mark.parametrize(("name", "update"), STOPS)
def test_resuming_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Callable[..., RunResult], name: str, update: int
) -> None:
    settings = {"save_every": 3, **SETTINGS[name]}
    whole = reference(**settings)
    stop_at(monkeypatch, update)
    with pytest.raises(Stop):
        run(tmp_path, **settings)
    monkeypatch.undo()
    torch.manual_seed(123)  # the state of the process must not matter
    torch.rand(7)
    resumed = run(tmp_path, **settings)
    assert_same_bits(whole.folder, resumed.folder)
    timing = ("images_per_second", "seconds")
    rows = [[{k: v for k, v in row.items() if k not in timing} for row in r.epochs] for r in (whole, resumed)]
    assert rows[0] == rows[1]
    assert whole.best == resumed.best


def test_decoded_data_resumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that workers decode and augment with timm, and shards that are streamed."""
    data = tiny_data()
    for part in ("train", "val"):
        images, labels = getattr(data, part).arrays()
        with tarfile.open(tmp_path / f"{part}-0.tar", "w") as tar:
            for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
                folder = tmp_path / "files" / part / f"class {label}"
                folder.mkdir(parents=True, exist_ok=True)
                to_pil_image(image).save(folder / f"{i}.png")
                tar.add(folder / f"{i}.png", f"{i:04}.png")
                (tmp_path / "label").write_text(str(label))
                tar.add(tmp_path / "label", f"{i:04}.cls")
    shards = f"wds:{tmp_path}/train-0.tar,{tmp_path}/val-0.tar"
    settings = {"save_every": 4, "augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.25, "epochs": 2, "hflip": 0.5}
    for name, source, workers in (("files", str(tmp_path / "files"), 1), ("shards", shards, 0)):
        whole, broken = tmp_path / name / "whole", tmp_path / name / "broken"
        run(whole, data=source, workers=workers, **settings)
        stop_at(monkeypatch, 7)
        with pytest.raises(Stop):
            run(broken, data=source, workers=workers, **settings)
        monkeypatch.undo()
        run(broken, data=source, workers=1 - workers, **settings)
        assert_same_bits(whole, broken)


def test_the_fp16_scaler_resumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaler that grows every second step, on the CPU, where Accelerate would not make one."""
    real = train_run.create_accelerator

    def with_scaler(*args, **kwargs):
        accelerator = real(*args, **kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return accelerator

    def patched() -> None:
        monkeypatch.setattr(train_run, "create_accelerator", with_scaler)

    patched()
    run(tmp_path / "whole", save_every=3, clip_grad=1.0)
    stop_at(monkeypatch, 7)
    with pytest.raises(Stop):
        run(tmp_path / "broken", save_every=3, clip_grad=1.0)
    monkeypatch.undo()
    patched()
    run(tmp_path / "broken", save_every=3, clip_grad=1.0)
    assert_same_bits(tmp_path / "whole", tmp_path / "broken")
    states = [read_state(tmp_path / name / "state" / "state.safetensors")[1] for name in ("whole", "broken")]
    assert states[0]["scaler"] == states[1]["scaler"]
    assert states[0]["scaler"]["scale"] == 8.0 * 2**7


def test_same_seed_same_result(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, seed=seed, drop_path=0.2, epochs=2)
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(tmp_path / "a", tmp_path / "c")


def test_logging_and_saving_do_not_affect_the_result(tmp_path: Path) -> None:
    run(tmp_path / "a", save_every=1, log_every=1, epochs=2)
    run(tmp_path / "b", epochs=2)
    a, b = state_of(tmp_path / "a"), state_of(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("cost", "expected"), [(0, [3, 5, 8, 10, 13, 15]), (20, [3, 15])])
def test_saved_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: int, expected: list[int]) -> None:
    """Once a minute and after each evaluation, less often where saving takes long, and at the end."""
    saves, now = [], [0.0]
    save, step = Engine._save, Engine._train_step

    def timed_step(self: Engine, batches) -> None:
        now[0] += 25
        step(self, batches)

    def timed_save(self: Engine) -> None:
        now[0] += cost
        saves.append(self.update)
        save(self)

    monkeypatch.setattr(Engine, "_train_step", timed_step)
    monkeypatch.setattr(Engine, "_save", timed_save)
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    run(tmp_path / "a")
    assert saves == expected


@pytest.mark.xdist_group("processes")
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """The real command in real processes, killed repeatedly; they are forked so that the imports happen once."""
    code, output = finish(tmp_path / "log", kill_repeatedly, tmp_path)
    assert code == 0, output
    report = json.loads(output.splitlines()[-1])
    assert report["kills"] >= 3
    assert report["resumed"] >= 2
    assert {p.name for p in (tmp_path / "whole").iterdir()} == {p.name for p in (tmp_path / "killed").iterdir()}
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")
    files = sorted(p.name for p in (tmp_path / "killed").rglob("*.part"))
    assert not files, f"left over: {files}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Callable[..., RunResult], number: int
) -> None:
    handler = signal.getsignal(number)
    stop_at(monkeypatch, 7, act=lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped")
    monkeypatch.undo()
    assert signal.getsignal(number) is handler
    rest = read_state(tmp_path / "stopped" / "state" / "state.safetensors")[1]
    assert (rest["epoch"], rest["step"]) == (1, 3)
    run(tmp_path / "stopped")
    assert_same_bits(reference().folder, tmp_path / "stopped")


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path / "a", epochs=2)
    monkeypatch.setattr(Engine, "_train_step", lambda *_: pytest.fail("trained"))
    second = run(tmp_path / "a", epochs=2)
    assert second.best == first.best
    assert second.epochs == first.epochs


def test_changed_settings_are_named(tmp_path: Path) -> None:
    run(tmp_path / "a", epochs=2)
    with pytest.raises(ValueError, match=r"different settings: epochs was 2 and is 3, lr was 0.005 and is 0.001"):
        run(tmp_path / "a", epochs=3, lr=1e-3)
    with pytest.raises(ValueError, match=r"model was 'columnar_tiny_softmax' and is 'columnar_tiny_sima'"):
        run(tmp_path / "a", epochs=2, network="columnar_tiny_sima")
    with pytest.raises(ValueError, match=r"5 steps per epoch, but now there are 4: the data has changed"):
        run(tmp_path / "a", epochs=2, data=tiny_data(train=64))
    assert run(tmp_path / "a", epochs=3, lr=1e-3, resume=False).epochs[-1]["epoch"] == 3


def test_damaged_state(tmp_path: Path) -> None:
    run(tmp_path / "a", epochs=2)
    state = tmp_path / "a" / "state" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"is damaged or not the state of a run .*--no-resume"):
        run(tmp_path / "a", epochs=2)
    write_state(state, {"model": {}}, {"format": 99})
    with pytest.raises(ValueError, match="has format 99"):
        run(tmp_path / "a", epochs=2)
    run(tmp_path / "a", epochs=2, resume=False)


def test_lines_after_the_saved_state_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(monkeypatch, 9)
    with pytest.raises(Stop):
        run(tmp_path / "a", save_every=4, log_every=1)
    monkeypatch.undo()
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tr')  # cut off by a kill
    run(tmp_path / "a", save_every=4, log_every=1)
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if row["event"] == "train"] == list(range(1, 16))
    assert [row["epoch"] for row in rows if row["event"] == "epoch"] == [1, 2, 3]


def test_recipe_yaml_is_a_recipe(tmp_path: Path) -> None:
    from tokamix.recipes import load_recipe

    run(tmp_path / "a", epochs=2)
    kept = load_recipe(str(tmp_path / "a" / "recipe.yaml"))
    assert kept.lr == TINY.lr
    assert kept.epochs == 2
