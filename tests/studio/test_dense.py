"""The tab Detect and segment: predictions of run folders on photos."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.train.tiny_dense import tiny_scenes
from tokamix.studio import StudioSettings, dense
from tokamix.studio._gradio import gr

pytestmark = pytest.mark.xdist_group("studio")  # they share runs and the page


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


def test_detector(settings: StudioSettings, photo: str) -> None:
    """A higher threshold shows fewer objects, without another forward pass."""
    tab = dense.Dense(settings)
    key = tab.photos.keep(Image.open(photo))
    everything, text = tab.draw(named(settings, "detector"), key, 0.05)
    assert everything["visible"] is True
    assert everything["alt_text"].startswith("The photo with ")
    assert text.startswith("Found: ")
    _, nothing = tab.draw(named(settings, "detector"), key, 0.999)
    assert nothing == "Found: nothing."
    assert tab.predict.cache_info().misses == 1


def test_upload_and_sample(handlers: dict[str, Callable[..., Any]], settings: StudioSettings, photo: str) -> None:
    """The uploaded file is deleted once it is read, and the field is empty for the next one."""
    key, field, picture, text = handlers["take_dense_photo"](photo, named(settings, "segmenter"), 0.3)
    assert key.startswith("upload-")
    assert field is None
    assert picture["visible"] is True
    assert "%" in text
    assert not Path(photo).exists()
    other, _, _ = handlers["use_sample"](named(settings, "segmenter"), 0.3)
    assert other != key
    assert handlers["show_dense"](named(settings, "segmenter"), key, 0.3)[1] == text


def test_bad_input(handlers: dict[str, Callable[..., Any]], settings: StudioSettings, tmp_path: Path) -> None:
    assert handlers["show_dense"](None, "", 0.3)[1] == ""
    with pytest.raises(gr.Error, match="choose a trained model first"):
        handlers["use_sample"](None, 0.3)
    with pytest.raises(gr.Error, match="is not below the folders of this studio"):
        handlers["use_sample"]("/etc", 0.3)
    with pytest.raises(gr.Error, match="no longer kept"):
        handlers["show_dense"](named(settings, "detector"), "upload-of-another", 0.3)
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(gr.Error, match="is not an image"):
        handlers["take_dense_photo"](str(tmp_path / "text.png"), named(settings, "detector"), 0.3)


def test_samples_differ() -> None:
    first, second = dense.draw_sample(), dense.draw_sample()
    assert first.size == (dense.SAMPLE_SIDE, dense.SAMPLE_SIDE)
    assert first.tobytes() != second.tobytes()
