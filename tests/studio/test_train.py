"""The tab Train: what it shows of runs, and which runs it starts, stops and resumes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamix.studio import StudioSettings, create_app, jobs, train
from tokamix.studio._gradio import gr
from tokamix.train.output.lock import lock_folder
from tokamix.train.output.watch import read_run

pytestmark = pytest.mark.xdist_group("studio")  # they share runs and the page


def named(settings: StudioSettings, name: str) -> str:
    return str(settings.folders[0].resolve() / "runs" / name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of the processes that would be started."""
    commands: list[list[str]] = []
    monkeypatch.setattr(jobs.Jobs, "start", lambda self, arguments, begun: commands.append(arguments))
    return commands


def test_opening_shows_the_latest_run(handlers: dict[str, Callable[..., Any]], settings: StudioSettings) -> None:
    runs, data, timer, text, *_, key, _ = handlers["open_train"](None)
    assert len(runs["choices"]) == 3
    assert len(runs["value"]) == 1
    assert data["value"].endswith("photos")
    assert timer["active"] is True
    assert "finished" in text
    assert key


def test_two_runs_are_compared(handlers: dict[str, Callable[..., Any]], settings: StudioSettings) -> None:
    chosen = [named(settings, "classifier"), named(settings, "segmenter")]
    text, _, _, pictures, _, key, colours = handlers["watch"](chosen, "")
    assert len(text.splitlines()) == 2
    assert "**classifier** (columnar_tiny_softmax): finished, epoch 6 of 6, best top-1 accuracy" in text
    assert set(colours) == {"classifier", "segmenter"}
    assert pictures["visible"] is True
    again = handlers["watch"](chosen, key)
    assert all(update == gr.skip() for update in again)  # nothing has changed, nothing is drawn again


def test_no_run(handlers: dict[str, Callable[..., Any]]) -> None:
    text, _, _, pictures, *_ = handlers["watch"]([], "")
    assert text == "Choose a run, or start one."
    assert pictures["visible"] is False


def test_one_run_shows_training_and_validation(settings: StudioSettings) -> None:
    status = read_run(named(settings, "classifier"))
    table = train.frame([status], [status.loss()])
    assert set(table["curve"]) == {"training", "validation"}
    assert table["epoch"].max() == 6


def test_paths_outside_are_refused(handlers: dict[str, Callable[..., Any]], started: list[list[str]]) -> None:
    for path in ("/etc", "../..", "runs/../../.."):
        with pytest.raises(gr.Error, match="is not below the folders of this studio"):
            handlers["watch"]([path], "")
        with pytest.raises(gr.Error, match="is not below the folders of this studio"):
            handlers["start_run"](path, "classify", "pyramid_nano_sima", 3, False)
        with pytest.raises(gr.Error, match="is not below the folders of this studio"):
            handlers["resume_run"]([path])
    assert started == []


def test_a_linked_picture_is_not_shown(classifier_run: Path, tmp_path: Path) -> None:
    """A link out of the folders in a run's folder is not followed."""
    outside = tmp_path / "secret.png"
    shutil.copy(classifier_run / "curves.png", outside)
    inside = shutil.copytree(classifier_run, tmp_path / "inside" / "run")
    (inside / "mistakes.png").unlink()
    (inside / "mistakes.png").symlink_to(outside)
    app = create_app(StudioSettings(folders=(tmp_path / "inside",)))
    watch = next(entry.fn for entry in app.fns.values() if entry.name == "watch")
    with pytest.raises(gr.Error, match="is not below the folders of this studio"):
        watch([str(inside)], "")


def test_start(handlers: dict[str, Callable[..., Any]], settings: StudioSettings, started: list[list[str]]) -> None:
    update = handlers["start_run"]("photos", "classify", "pyramid_nano_sima", 1000, True)
    root = settings.folders[0].resolve()
    folder = root / "runs" / "photos-pyramid_nano_sima"
    assert update["value"] == [str(folder)]
    (arguments,) = started
    assert arguments[:2] == ["--data", str(root / "photos")]
    assert arguments[arguments.index("--epochs") + 1] == str(train.MAX_EPOCHS)
    assert arguments[arguments.index("--output") + 1] == str(folder)
    assert "--pretrained" in arguments
    assert arguments[-2:] == ["--device", "cpu"]
    for task, model in (("steal", "pyramid_nano_sima"), ("classify", "--help")):
        with pytest.raises(gr.Error, match="the studio does not train"):
            handlers["start_run"]("photos", task, model, 3, False)


def test_resume(
    handlers: dict[str, Callable[..., Any]], settings: StudioSettings, started: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises(gr.Error, match="choose the run"):
        handlers["resume_run"]([])
    with pytest.raises(gr.Error, match="classifier is finished; only a stopped run"):
        handlers["resume_run"]([named(settings, "classifier")])
    stopped = shutil.copytree(named(settings, "classifier"), tmp_path / "runs" / "stopped")
    (stopped / "state" / "state.safetensors").unlink()
    text = (stopped / "environment.json").read_text()
    (stopped / "environment.json").write_text(text.replace('"data": "tiny"', '"data": "shapes"'))
    app = create_app(StudioSettings(folders=(tmp_path,)))
    resume = next(entry.fn for entry in app.fns.values() if entry.name == "resume_run")
    resume([str(stopped)])
    assert started == [["--resume", str(stopped), "--data", "shapes"]]
    with lock_folder(stopped), pytest.raises(gr.Error, match="stopped is running"):
        resume([str(stopped)])


def test_stop_without_a_run(handlers: dict[str, Callable[..., Any]]) -> None:
    with pytest.raises(gr.Error, match="no run of this studio is being trained"):
        handlers["stop_run"]()


def test_folders_of_new_runs(tmp_path: Path) -> None:
    settings = StudioSettings(folders=(tmp_path,))
    assert train.next_folder(settings, "a") == tmp_path / "runs" / "a"
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert train.next_folder(settings, "a") == tmp_path / "runs" / "a-2"
    with pytest.raises(ValueError, match="start the studio with --folder"):
        train.next_folder(StudioSettings(), "a")


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (0, "0 s")])
def test_durations(seconds: float, text: str) -> None:
    assert train.format_seconds(seconds) == text
