"""Fixtures of the studio's tests."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tokamix.studio import StudioSettings, create_app


@pytest.fixture(scope="session")
def settings(
    tmp_path_factory: pytest.TempPathFactory, classifier_run: Path, detector_run: Path, segmenter_run: Path
) -> StudioSettings:
    """A folder with three runs and photos of two classes."""
    root = tmp_path_factory.mktemp("studio")
    for source in (classifier_run, detector_run, segmenter_run):
        shutil.copytree(source, root / "runs" / source.name)
    for number, name in enumerate(("cat", "dog")):
        (root / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), (90 * number, 60, 60)).save(root / "photos" / name / "a.png")
    return StudioSettings(folders=(root,), device="cpu")


@pytest.fixture(scope="session")
def handlers(settings: StudioSettings) -> dict[str, Callable[..., Any]]:
    """The functions behind the page by name, as the server calls them."""
    return {entry.name: entry.fn for entry in create_app(settings).fns.values() if entry.fn is not None}
