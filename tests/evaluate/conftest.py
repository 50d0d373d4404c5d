"""Fixtures of the evaluation tests."""

from pathlib import Path

import pytest
from PIL import Image

from tests.train.tiny import tiny_data


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of `tiny_data()` in folders named by class; a fifth is held out for validation."""
    folder = tmp_path_factory.mktemp("images")
    data = tiny_data().train
    for i in range(40):
        path = folder / f"class {int(data.labels[i])}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(data.images[i].permute(1, 2, 0).numpy()).save(path)
    return folder
