"""Images on disk in every form that data sets come in."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokamix.inference import InferenceConfig
from tokamix.recipes import ClassifyRecipe


def noise(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def recipe(**values) -> ClassifyRecipe:
    return ClassifyRecipe(**{"name": "test", "image_size": 16, "batch_size": 8} | values)


def eval_config(**values) -> InferenceConfig:
    return InferenceConfig(**{"task": "classify", "class_names": (), "image_size": 16} | values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/ and val/ with three classes; the colour of an image says its class."""
    for part, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("ant", "bee", "cat")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.asarray(noise(label * 100 + i)) // 4
                pixels[..., label] += 150
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.{'jpg' if i % 2 else 'png'}")
    return tmp_path


def write_pack(path: Path, images: list[bytes], labels: list[int], classes: tuple[str, ...] = ("a", "b")) -> Path:
    offsets = np.cumsum([0, *map(len, images)])
    blob = np.frombuffer(b"".join(images), dtype=np.uint8)
    np.savez(path, blob=blob, offsets=offsets, labels=np.array(labels, dtype=np.int16), classes=np.array(classes, "S"))
    return path


def write_tar(path: Path, samples: list[dict[str, bytes]]) -> Path:
    """Each sample: extension -> content."""
    with tarfile.open(path, "w") as tar:
        for i, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"{path.stem}/{i:04d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(root: Path, part: str, shards: int, each: int, classes: int = 3) -> list[Path]:
    paths = []
    for shard in range(shards):
        samples = []
        for i in range(each):
            number = shard * each + i
            image = Image.new("RGB", (20, 20), (number % 256, number // 256, 0))  # its colour is its number
            label = str(number % classes).encode()
            samples.append(
                {"png": encoded(image), "cls": label}
                if i % 2
                else {"json": json.dumps({"label": int(label)}).encode(), "png": encoded(image)}
            )
        paths.append(write_tar(root / f"{part}-{shard:04d}.tar", samples))
    return paths
