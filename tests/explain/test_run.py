"""`tokamix explain` and `tokamix.explain`."""

import html
import re

import numpy as np
import pytest
from PIL import Image

import tokamix
from tests.command import call


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "cat & dog.png")
    return folder / "cat & dog.png"


def test_command(photo, classifier_run, tmp_path) -> None:
    out = tmp_path / "out"
    options = ("--token", "0.2,0.7", "--layer", "0", "--data", photo.parent, "-o", out)
    text = call("explain", photo, "--model", classifier_run, "--device", "cpu", *options)
    assert f"figures and the page: {out / 'index.html'}" in text
    figures = sorted(path.name for path in out.glob("*.png"))
    assert {"overview.png", "depth.png", "mixing_rows.png"} <= set(figures)
    assert int(re.search(r"(\d+) figures", text)[1]) == len(figures)
    page = (out / "index.html").read_text()
    assert "cat &amp; dog.png" in page
    command = f"tokamix explain 'cat & dog.png' --model {classifier_run} --data FOLDER --token 0.2,0.7"
    assert f"Made by <code>{html.escape(command)}</code>" in page
    assert not re.search(r'(src|srcset)="(?!data:)', page)  # self-contained
    assert page.count("<section>") == len(figures) + 1


def test_bad_input(photo, classifier_run, tmp_path) -> None:
    model = ("--model", classifier_run, "--device", "cpu", "-o", tmp_path)
    assert "--token '3' is not y,x" in call("explain", photo, *model, "--token", "3", code=1)
    assert "--token 3,0.5 is outside of the image" in call("explain", photo, *model, "--token", "3,0.5", code=1)
    assert "there is no layer 99: the model has" in call("explain", photo, *model, "--layer", "99", code=1)
    assert "not as 'gif'" in call("explain", photo, *model, "--format", "gif", code=1)
    assert "nothing.png does not exist" in call("explain", tmp_path / "nothing.png", *model, code=1)
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    assert "broken.jpg" in call("explain", broken, *model, code=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no images" in call("explain", photo, *model, "--data", empty, code=1)
    assert "there is no model" in call("explain", photo, "--model", "columnar_tiny_nothing", code=1)
    assert not list(tmp_path.glob("*.png"))
    with pytest.raises(ValueError, match="explain needs at least one model"):
        tokamix.explain(photo, [])


def test_untrained_models_are_named(photo, tmp_path) -> None:
    text = call("explain", photo, "--model", "columnar_tiny_sima", "--layer", "99", "-o", tmp_path, code=1)
    assert "note: columnar_tiny_sima has no pretrained weights" in text
