"""The tab Compare: results of all sources, plots of two quantities, measurements."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_runtimes import Small
from tokamix.bench import runtimes
from tokamix.studio import StudioSettings, compare
from tokamix.studio._gradio import gr

pytestmark = pytest.mark.xdist_group("studio")  # they share runs and the page


def test_opening_shows_the_first_source(handlers: dict[str, Callable[..., Any]]) -> None:
    sources, plot, sentence, table, colours = handlers["open_compare"]([], "accuracy", "exps", [])
    assert sources["value"] == ["shipped, imagenette"]
    assert sources["choices"] == ["shipped, imagenette", "shipped, cifar100", "papers"]
    assert plot.color == "network"
    assert set(colours) == {name.removeprefix("pyramid_nano_") for name in table["model"]}
    assert sentence == "6 of 6 results have both accuracy (%) and exp calls (millions)."
    assert "memory (GB)" not in table.columns  # not known of any of them
    assert table["accuracy (%)"].iloc[0] == 90.24


def test_files_below_the_folders(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("model,top1,milliseconds\nnet,50,2\n")
    results = compare.collect_results(StudioSettings(folders=(tmp_path,)), [])
    assert results[-1].source == "mine.csv"
    _, sentence, table, _ = compare.draw(results, ["mine.csv"], "accuracy", "milliseconds")
    assert sentence.startswith("1 of 1 results")
    assert list(table["model"]) == ["net"]


def test_axes_without_points(handlers: dict[str, Callable[..., Any]]) -> None:
    _, sentence, *_ = handlers["redraw"](["papers"], "accuracy", "exps", [])
    assert sentence.startswith("None of the")
    _, sentence, table, _ = handlers["redraw"]([], "accuracy", "exps", [])
    assert sentence == "Choose results above."
    assert table.empty
    with pytest.raises(gr.Error, match="there is no quantity 'beauty'"):
        handlers["redraw"](["papers"], "beauty", "exps", [])


def test_many_models_are_coloured_by_source() -> None:
    results = compare.collect_results(StudioSettings(), [])
    plot, *_, colours = compare.draw(results, ["papers"], "accuracy", "macs")
    assert (plot.color, list(colours)) == ("source", ["papers"])
    plot, *_, colours = compare.draw(results, ["shipped, cifar100"], "accuracy", "macs")
    assert plot.color == "network"
    assert len(colours) == 6


def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "create_for_size", lambda name, size: Small().eval())
    monkeypatch.setattr(compare, "SECONDS", 0.0)
    said = []
    progress = lambda part, desc: said.append((part, desc))  # noqa: E731
    rows = compare.measure_models(["pyramid_nano_sima.imagenette"], 32, 2, "cpu", progress)
    assert rows[0].source == "measured here"
    assert rows[0].milliseconds > 0
    assert math.isnan(rows[0].accuracy)  # it was measured at 96 px, not at 32
    assert said
    _, sentence, *_ = compare.draw(
        compare.collect_results(StudioSettings(), [row.as_dict() for row in rows]),
        ["measured here"],
        "images_per_second",
        "milliseconds",
    )
    assert sentence.startswith("1 of 1")
    with pytest.raises(ValueError, match="choose a model"):
        compare.measure_models([], 32, 2, "cpu", progress)
    with pytest.raises(ValueError, match="choose up to 6 models"):
        compare.measure_models(["a"] * 7, 32, 2, "cpu", progress)


def test_a_model_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes log the failure; the page says it."""
    monkeypatch.setattr(runtimes, "create_for_size", lambda name, size: Small().eval())
    monkeypatch.setattr(runtimes, "_create_call", lambda *args: 1 / 0)
    with pytest.raises(ValueError, match=r"nothing could be measured.*ZeroDivisionError"):
        compare.measure_models(["a"], 32, 1, "cpu", lambda part, desc: None)
