"""The images of an index that are most similar to a photo, as a list and as a contact sheet."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_pil_image

from tokamix.data import ImageStream, decode_image
from tokamix.data.decode import convert_to_rgb
from tokamix.data.images.transforms import create_eval_transform
from tokamix.embed.features import FeatureExtractor
from tokamix.embed.index import FeatureIndex, fingerprint
from tokamix.embed.run import open_splits
from tokamix.files import write_atomically
from tokamix.inference import InferenceConfig, autocast, choose_device, evaluation_mode, load_model
from tokamix.predict.draw import GREY, INK, captioned_sheet
from tokamix.predict.files import sheet_format


@dataclass(frozen=True)
class Neighbour:
    """An image of an index and its cosine similarity to the photo."""

    path: str
    similarity: float


def find_neighbours(
    photo: str | Path | Image.Image,
    index: str | Path | FeatureIndex,
    k: int = 11,
    *,
    source: str | Path | nn.Module | None = None,
    device: str | None = None,
) -> list[Neighbour]:
    """Find the k images of an index that are most similar to a photo, the best first.

    Args:
        photo: an image file or a PIL image.
        index: a folder written by `tokamix.embed`.
        k: number of images; fewer if the index has fewer.
        source: the model that made the index; default: the one that it names.
        device: "cpu" or "cuda"; default: a GPU if there is one.
    """
    if k < 1:
        raise ValueError(f"k is {k}, but must be at least 1")
    index = index if isinstance(index, FeatureIndex) else FeatureIndex(index)
    settings, where = index.settings, choose_device(device)
    source = settings["source"] if source is None else source
    network = source if isinstance(source, nn.Module) else load_model(source, model=settings["model"])[0]
    if fingerprint(network) != settings["fingerprint"]:
        raise ValueError(
            f"{index.folder} was made by another model than {source if isinstance(source, str | Path) else 'this one'}:"
            " its weights differ; make the index again, or name the model that made it (--source)"
        )
    config = InferenceConfig.from_dict(settings["inference"])
    image = convert_to_rgb(photo) if isinstance(photo, Image.Image) else decode_image(Path(photo))
    transform = create_eval_transform(config.image_size, config.crop_pct, config.interpolation, config.crop_mode)
    pixels = torch.as_tensor(transform(image.convert("L" if config.in_chans == 1 else "RGB"))).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
    extractor = FeatureExtractor(network, settings["pool"], settings["layer"]).to(where)
    precision = "fp32" if where.type == "cpu" and settings["precision"] == "fp16" else settings["precision"]
    with torch.no_grad(), evaluation_mode(extractor), autocast(where, precision):
        query = extractor(((pixels - mean) / std)[None].to(where)).float()
    similarity, numbers = index.search(query, k)
    return [Neighbour(index.path(n), s) for n, s in zip(numbers[0].tolist(), similarity[0].tolist(), strict=True)]


def write_neighbours(path: str | Path, photo: str | Path, neighbours: list[Neighbour], index: str | Path) -> None:
    """Write a contact sheet: the photo, then its neighbours with their similarities and names."""
    form = sheet_format(Path(path))
    settings = FeatureIndex(index).settings
    found = _read_images(settings["data"], settings["split"], [neighbour.path for neighbour in neighbours])
    images = [decode_image(Path(photo)), *(found[neighbour.path] for neighbour in neighbours)]
    captions = [[("the photo", INK), (Path(photo).name, GREY)]]
    captions += [[(f"{one.similarity:.3f}", INK), (Path(one.path).name, GREY)] for one in neighbours]
    sheet = captioned_sheet(images, captions, title=f"most similar of {len(FeatureIndex(index)):,} images")
    write_atomically(Path(path), lambda temporary: sheet.save(temporary, format=form))


def _read_images(data: str, split: str | None, names: Iterable[str]) -> dict[str, Image.Image]:
    """Images of the data of an index by their names."""
    if split is None:
        return {name: decode_image(Path(data) / name) for name in names}
    wanted = set(names)
    found: dict[str, Image.Image] = {}
    for prefix, dataset in open_splits(data, split):
        matches: Iterable[tuple[str, Any]]
        if isinstance(dataset, ImageStream):
            items = dataset.read(0, 0, 0, 1, shuffle=False)
            matches = ((item.name, dataset.decode(item)[0]) for item in items if item.name in wanted)
        else:
            numbers = (i for i in range(len(dataset)) if prefix + dataset.name_of(i) in wanted)
            matches = ((prefix + dataset.name_of(i), dataset.image(i)) for i in numbers)
        for name, image in matches:
            found[name] = image if isinstance(image, Image.Image) else to_pil_image(image)
    if missing := wanted - found.keys():
        raise ValueError(f"{data} no longer has {min(missing)}, which the index names; make the index again")
    return found
