"""The tab Detect and segment: predictions of run folders on photos."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.train.tiny_dense import tiny_scenes
from tokamix.studio import StudioSettings, dense
from tokamix.studio._gradio import gr


@pytest.fixture
def photo(tmp_path: Path) -> str:
    scene = tiny_scenes("detect", train=1, val=0, side=64).train.sample(0)
    Image.fromarray(scene.image.permute(1, 2, 0).numpy()).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def named(settings: StudioSettings, name: str) -> str:
    return str(settings.folders[0].resolve() / "runs" / name)


def test_opening_lists_detectors_and_segmenters(handlers: dict[str, Callable[..., Any]]) -> None:
    runs, hint = handlers["open_dense"](None)
    assert {Path(path).name for _, path in runs["choices"]} == {"detector", "segmenter"}
    assert runs["value"]
    assert hint["visible"] is False


def test_detector(handlers: dict[str, Callable[..., Any]], settings: StudioSettings, photo: str) -> None:
    """A higher threshold shows fewer objects, without another forward pass."""
    everything, text = handlers["show"](named(settings, "detector"), photo, 0.05)
    calls = dense._predict.cache_info().misses
    assert everything["visible"] is True
    assert text.startswith("Found: ")
    _, nothing = handlers["show"](named(settings, "detector"), photo, 0.999)
    assert nothing == "Found: nothing."
    assert dense._predict.cache_info().misses == calls


def test_segmenter(handlers: dict[str, Callable[..., Any]], settings: StudioSettings, photo: str) -> None:
    _, text = handlers["show"](named(settings, "segmenter"), photo, 0.3)
    assert "%" in text


def test_bad_input(handlers: dict[str, Callable[..., Any]], settings: StudioSettings, photo: str) -> None:
    assert handlers["show"](None, None, 0.3)[1] == ""
    with pytest.raises(gr.Error, match="choose a trained model first"):
        handlers["show"](None, photo, 0.3)
    with pytest.raises(gr.Error, match="is not below the folders of this studio"):
        handlers["show"]("/etc", photo, 0.3)


def test_samples_differ() -> None:
    first, second = dense.draw_sample(), dense.draw_sample()
    assert first.size == (dense.SAMPLE_SIDE, dense.SAMPLE_SIDE)
    assert first.tobytes() != second.tobytes()
