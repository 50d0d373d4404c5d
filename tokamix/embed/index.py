"""A folder of features: what made them, the features in shards, and the paths of their images.

index.json                 model, preprocessing, data, and the fingerprint of the weights
shard-00000.safetensors    `features` (n, D) and, where the data has labels, `labels` (n,); or shard-00000.npy
shard-00000.json           the paths of the shard's images, and their labels
index.parquet              path, label, shard and row of every image, if asked for
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tokamix.embed.search import nearest
from tokamix.files import write_atomically, write_json, write_tensors

FORMAT = 1
Settings = dict[str, Any]


class FeatureIndex:
    """The features of a folder, read shard by shard.

    Args:
        folder: written by `tokamix.embed`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.settings = read_settings(self.folder)
        if not self.settings:
            raise FileNotFoundError(f"{folder} has no features: it has no index.json; `tokamix embed` makes them")
        if missing := self.missing():
            raise ValueError(
                f"{folder} has {self.settings['shards'] - len(missing)} of {self.settings['shards']} shards; run the"
                " same `tokamix embed` command again to complete it"
            )
        self.sizes = [len(self.names(shard)["paths"]) for shard in range(self.settings["shards"])]

    def __len__(self) -> int:
        return sum(self.sizes)

    def missing(self) -> list[int]:
        """Numbers of the shards that are not written yet."""
        return [
            shard
            for shard in range(self.settings["shards"])
            if not shard_path(self.folder, shard, self.settings).is_file()
        ]

    def names(self, shard: int) -> dict[str, list[Any]]:
        """Paths and labels of the images of a shard."""
        return json.loads((self.folder / f"shard-{shard:05}.json").read_text(encoding="utf-8"))

    def features(self) -> Iterator[Tensor]:
        """The features (n, D) of each shard."""
        for shard, size in enumerate(self.sizes):
            if size:
                yield read_shard(shard_path(self.folder, shard, self.settings))

    def path(self, number: int) -> str:
        """Path of an image by its number over all shards."""
        for shard, size in enumerate(self.sizes):
            if number < size:
                return self.names(shard)["paths"][number]
            number -= size
        raise IndexError(f"the index has {len(self)} images")

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Cosine similarities and numbers (M, k) of the images most similar to each query (M, D), best first."""
        if queries.shape[1] != self.settings["dimensions"]:
            raise ValueError(
                f"the query has {queries.shape[1]} features, but those of {self.folder} have"
                f" {self.settings['dimensions']}: the index was made by another model"
            )
        parts = (F.normalize(part.to(queries.device).float(), dim=1) for part in self.features())
        return nearest(F.normalize(queries.float(), dim=1), parts, k)


def shard_path(folder: Path, shard: int, settings: Settings) -> Path:
    """The file with the features of a shard."""
    return folder / f"shard-{shard:05}.{settings['file_format']}"


def write_shard(
    folder: Path, shard: int, features: Tensor, paths: list[str], labels: list[int], settings: Settings
) -> None:
    """Write a shard; the features come last, so that their file stands for a complete shard."""
    names: dict[str, Any] = {"paths": paths}
    tensors = {"features": features.contiguous()}
    if settings["labels"]:
        names["labels"], tensors["labels"] = labels, torch.tensor(labels, dtype=torch.int64)
    write_json(folder / f"shard-{shard:05}.json", names)
    path = shard_path(folder, shard, settings)
    if settings["file_format"] == "npy":
        # a file, not a path: numpy would add a suffix
        write_atomically(path, lambda temporary: _save_array(temporary, features.numpy()))
    else:
        write_tensors(path, tensors)


def read_shard(path: Path) -> Tensor:
    """Read the features of a shard."""
    try:
        return torch.from_numpy(np.load(path)) if path.suffix == ".npy" else load_file(path)["features"]
    except Exception as error:  # safetensors and numpy have their own
        raise ValueError(f"{path} is damaged ({error}); delete it and run `tokamix embed` again") from None


def read_settings(folder: Path) -> Settings:
    """Read index.json; {} if there is none."""
    path = folder / "index.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings["format"] != FORMAT:
            raise ValueError(f"its format is {settings['format']}, not {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another version ({error})") from None
    return settings


def check_settings(folder: Path, settings: Settings) -> None:
    """Refuse to continue features of another model or with other settings."""
    before = read_settings(folder)
    if before and not any(folder.glob("shard-*")):  # it failed before it had any features
        return
    if before and before["fingerprint"] != settings["fingerprint"]:
        raise ValueError(
            f"{folder} holds features of another model, {before['source']}; use another folder (-o), or delete it"
        )
    before, now = _flatten(before), _flatten(settings)
    changed = [key for key in now if before and before.get(key) != now[key]]
    if changed and changed[0] in ("names", "shards", "images"):
        raise ValueError(
            f"the images of {settings['data']} are not those that {folder} was made for: some were added, removed or"
            " renamed; use another folder (-o), or delete it"
        )
    if changed:
        key = changed[0]
        raise ValueError(
            f"{folder} holds features with different settings: {key} was {before.get(key)!r} and is {now[key]!r};"
            " use the same ones, or another folder (-o)"
        )


def _flatten(settings: Settings) -> Settings:
    """The settings with those of the preprocessing beside the others."""
    return {key: value for key, value in settings.items() if key != "inference"} | settings.get("inference", {})


def write_parquet(folder: Path) -> Path:
    """Write index.parquet of a complete index: path, label, shard and row of each image."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError("index.parquet needs pyarrow: pip install 'tokamix[data]', or leave out --parquet") from None
    index = FeatureIndex(folder)

    def write(temporary: Path) -> None:
        kinds = {"path": pyarrow.string(), "label": pyarrow.int64(), "shard": pyarrow.int32(), "row": pyarrow.int32()}
        with pyarrow.parquet.ParquetWriter(temporary, pyarrow.schema(kinds.items())) as writer:
            for shard, size in enumerate(index.sizes):
                names = index.names(shard)
                labels = names.get("labels", [None] * size)
                columns = [names["paths"], labels, [shard] * size, list(range(size))]
                arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, kinds.values(), strict=True)]
                writer.write_table(pyarrow.table(dict(zip(kinds, arrays, strict=True))))

    write_atomically(folder / "index.parquet", write)
    return folder / "index.parquet"


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights of a model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)
