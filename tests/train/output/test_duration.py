"""The time left of a run, and the advice for long ones."""

import importlib
from pathlib import Path

import pytest

from tests.train.tiny import TINY, run
from tokamix.train.output.duration import LONG, Duration, format_duration
from tokamix.train.setup.threads import macs_per_second

module = importlib.import_module("tokamix.train.output.duration")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def measured(duration: Duration, clock: list[float], *seconds: float) -> Duration:
    """Take steps of these lengths."""
    duration.begin()
    for update, length in enumerate(seconds, 1):
        clock[0] += length
        duration.step(update)
    return duration


def test_the_time_left_covers_the_whole_run(clock: list[float]) -> None:
    """All steps and evaluations; the first step, which may compile, is not measured."""
    duration = Duration(TINY.replace(epochs=10, eval_every=5, ema=0.9), 20, val_images=48)
    assert measured(duration, clock, 60.0).left(1) is None
    assert not duration.is_settled
    measured(duration, clock, 2.0)
    assert duration.is_settled
    # an evaluation of 3 batches is 2 passes at a third of the time of training
    assert duration.left(2) == pytest.approx(198 * 2.0 + 2 * (3 * 2 / 3) * 2.0)
    duration.evaluation = 30.0
    assert duration.left(2) == pytest.approx(198 * 2.0 + 2 * 30.0)
    assert [round(duration.left(update)) for update in (100, 101, 200)] == [260, 228, 30]
    assert duration.describe(2) == "about 8 min left: 198 steps, now of 2 s, and 2 evaluations"


def test_images_that_grow_take_longer(clock: list[float]) -> None:
    """Half of the run has half the side, a quarter of the work."""
    recipe = TINY.replace(epochs=10, image_size=64, start_size=32, full_size_from=0.5)
    duration = measured(Duration(recipe, 20, val_images=0), clock, 1.0, 1.0)
    assert duration.left(2) == pytest.approx(98 * 1.0 + 100 * 4.0, rel=0.03)


def test_long_runs_get_advice(clock: list[float]) -> None:
    """What to set, and how long it takes then; before the first step only if it takes long at the very least."""
    duration = Duration(TINY.replace(epochs=10), 100, val_images=0)
    assert duration.advice(0) is None
    duration.expect(1e12, lambda: 1e11)
    text = "at the CPU's present speed this run takes {}; it is shorter with --set epochs={} ({}), a smaller --model"
    assert duration.least_step == 30.0
    assert duration.advice(0).startswith(text.format("at least 8.3 h", 3, "at least 2.5 h"))
    measured(duration, clock, 500.0, 100.0)
    assert duration.advice(2).startswith(text.format("about 27.7 h", 1, "about 2.8 h"))
    assert "--set iterations=" in measured(Duration(TINY.replace(iterations=1000), 1000, 0), clock, 1, 60).advice(2)
    short = Duration(TINY, 5, val_images=37)
    short.expect(1e6, lambda: pytest.fail("the speed is not measured for short runs"))
    assert measured(short, clock, 1.0, 1.0).advice(2) is None
    assert macs_per_second() > module.SLOWEST


def test_a_run_says_once_how_long_it_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "MEASURED", 0.0)
    run(tmp_path / "a", quiet=False)
    out = capsys.readouterr().out
    assert out.count(" left: 13 steps, now of ") == 1
    assert "and 3 evaluations" in out
    assert not caplog.messages
    monkeypatch.setattr(module, "LONG", 1e-9)
    run(tmp_path / "b", quiet=True)  # a warning is not silenced
    assert [message.partition(" takes about ")[0] for message in caplog.messages] == [
        "at the CPU's present speed this run"
    ]
    assert not capsys.readouterr().out


def test_units() -> None:
    shown = [format_duration(seconds) for seconds in (0.4, 89, 91, 5399, LONG, 3 * 86400)]
    assert shown == ["0 s", "89 s", "2 min", "90 min", "3.0 h", "3.0 days"]
