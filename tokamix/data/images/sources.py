"""Where data comes from: `open_images` and the kinds of source it knows."""

import difflib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamix.data.decode import EXTENSIONS, DataError, decode
from tokamix.data.images.datasets import ArrayDataset, FileDataset, ImageDataset
from tokamix.data.images.streams import HubSplit, ImageStream, TarShards, expand
from tokamix.data.rng import generator
from tokamix.data.splits import DatasetSplits

TRAIN_NAMES, VAL_NAMES = ("train", "training"), ("val", "valid", "validation", "test", "testing")
ARRAY_BYTES = 4 << 30  # larger packs are decoded picture by picture
HELD_OUT = 0.2  # of each class, where nothing says what is for validation


def open_images(source: str, seed: int = 0) -> DatasetSplits:
    """Open a data set by name or path.

    - `digits`: scikit-learn's 1,797 scans of 8x8 px; `shapes`: generated scenes (`shapes:128` for 128 px).
    - a folder: `train/` and `val/` with a folder for each class, or folders for classes alone, then split here.
    - `a.npz,b.npz`: packs of encoded pictures; a file whose name ends in _val or _test is for validation.
    - `wds:train-{0000..0009}.tar,val-{0..1}.tar`: WebDataset's shards, local or remote.
    - `hf:user/name`, `hf:user/name:config` or `hf:folder`: Hugging Face's data sets, streamed.
    - `CIFAR10`, `CIFAR100`, `Flowers102`, `StanfordCars`, `ImageNet` and others of torchvision, by name; they lie in
      the folder TOKAMIX_DATA (default ~/.cache/tokamix), or in another one: `CIFAR100:/my/folder`.

    Args:
        source: see above.
        seed: of what `shapes` shows. A split made here has none: what is held out from one run is held out from all,
            so that nothing is ever evaluated on what it was trained on.
    """
    kind, _, rest = source.partition(":")
    train: ImageDataset | ImageStream
    val: ImageDataset | ImageStream
    if kind == "shapes":
        train, val = _open_shapes(rest, seed)
    elif source == "digits":
        train, val = _open_digits()
    elif kind == "wds":
        train, val = _open_shards(rest)
    elif kind == "hf":
        train, val = _open_hub(rest)
    elif source.endswith(".npz"):
        train, val = _open_packs(source)
    elif Path(source).expanduser().is_dir():
        train, val = _open_folder(Path(source).expanduser())
    elif kind.lower() in TORCHVISION:
        train, val = _open_torchvision(kind, rest)
    else:
        known = ["digits", "shapes", "wds:", "hf:", *(entry[0] for entry in TORCHVISION.values())]
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are a folder, a .npz file, {', '.join(known)}"
        raise DataError(f"there is no data {source!r}: it is neither a folder nor a known name; {hint}")
    if len(val.classes) > len(train.classes):
        raise DataError(f"{source}: {len(val.classes)} classes for validation, but {len(train.classes)} for training")
    return DatasetSplits(source, train, val, train.classes)


def data_folder() -> Path:
    """Where downloaded data sets lie: TOKAMIX_DATA, or ~/.cache/tokamix."""
    return Path(os.environ.get("TOKAMIX_DATA") or "~/.cache/tokamix").expanduser()


def hold_out(labels: Sequence[int] | np.ndarray | Tensor) -> tuple[list[int], list[int]]:
    """Indices for training and for validation: a fixed share of each class, at least one where there are two."""
    labels = torch.as_tensor(labels)
    draw = generator("split")
    train, val = [], []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=draw)].tolist()
        count = max(round(len(members) * HELD_OUT), int(len(members) > 1))
        val += members[:count]
        train += members[count:]
    return sorted(train), sorted(val)


def _open_digits() -> tuple[ImageDataset, ImageDataset]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("digits come with scikit-learn: pip install 'tokamix[demo]'") from None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8).mul(255 / 16).round().byte()  # 17 shades of grey
    labels = torch.from_numpy(labels)
    parts = hold_out(labels)
    train, val = (ArrayDataset(images[part], labels[part], [str(i) for i in range(10)]) for part in parts)
    return train, val


def _open_shapes(size: str, seed: int) -> tuple[ImageDataset, ImageDataset]:
    from tokamix.data.shapes import Shapes, check_side

    side = check_side(size, default=64)
    return Shapes(2000, side, seed, "train"), Shapes(500, side, seed, "val")


def _open_folder(root: Path) -> tuple[ImageDataset, ImageDataset]:
    parts = {name.lower(): root / name for name in sorted(os.listdir(root)) if (root / name).is_dir()}
    train = next((parts[name] for name in TRAIN_NAMES if name in parts), None)
    val = next((parts[name] for name in VAL_NAMES if name in parts), None)
    if train is None:
        classes, files, labels = _class_folders(root)
        return tuple(  # type: ignore[return-value]
            FileDataset([files[i] for i in part], [labels[i] for i in part], classes) for part in hold_out(labels)
        )
    classes, files, labels = _class_folders(train)
    if val is None:
        raise DataError(f"{root} has {train.name}/, but no val/ or test/; add one, or give {train} to have it split")
    val_classes, val_files, val_labels = _class_folders(val)
    if unknown := [name for name in val_classes if name not in classes]:
        raise DataError(f"{val / unknown[0]} is a class that {train} does not have")
    index = [classes.index(name) for name in val_classes]
    return FileDataset(files, labels, classes), FileDataset(val_files, [index[label] for label in val_labels], classes)


def _class_folders(root: Path) -> tuple[list[str], list[Path], list[int]]:
    """Classes, files and labels of a folder of folders."""
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{root} has no folders for classes; put the pictures of each class into a folder of its name")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            Path(folder) / file
            for folder, _, names in os.walk(root / name, followlinks=True)
            for file in names
            if file.lower().endswith(EXTENSIONS) and not file.startswith(".")
        )
        if not found:
            raise DataError(
                f"the class folder {root / name} has no pictures ({', '.join(EXTENSIONS)}); fill or remove it"
            )
        files += found
        labels += [label] * len(found)
    return classes, files, labels


def _open_packs(source: str) -> tuple[ImageDataset, ImageDataset]:
    paths = [Path(part.strip()).expanduser() for part in source.split(",")]
    is_val = [path.stem.lower().rpartition("_")[2] in VAL_NAMES for path in paths]
    if all(is_val):
        raise DataError(f"{source} holds only validation packs; add one for training, separated by a comma")
    train = _join([_read_pack(path) for path, val in zip(paths, is_val, strict=True) if not val])
    if any(is_val):
        return train, _join([_read_pack(path) for path, val in zip(paths, is_val, strict=True) if val])
    return tuple(_part(train, part) for part in hold_out(train.labels))  # type: ignore[return-value]


class PackDataset(ImageDataset):
    """Encoded pictures in one array of bytes; decoded once if they have one size, else when they are asked for."""

    def __init__(self, contents: Sequence[np.ndarray], labels: Any, classes: Sequence[str], name: str) -> None:
        self.contents, self.name = contents, name
        self._arrays: tuple[Tensor, Tensor] | None = None
        self._tried = False
        super().__init__(labels, classes)

    def picture(self, i: int, at_least: int | None = None) -> Any:
        """Picture i, decoded."""
        return decode(self.contents[i].tobytes(), self.name_of(i), at_least)

    def name_of(self, i: int) -> str:
        """Its place in the pack."""
        return f"picture {i} of {self.name}"

    def arrays(self) -> tuple[Tensor, Tensor] | None:
        """All pictures, decoded once, if they have one size and are not too many to keep."""
        if not self._tried:
            images, self._tried = self._decoded(), True
            self._arrays = None if images is None else (images, self.labels)
        return self._arrays

    def _decoded(self) -> Tensor | None:
        width, height = self.picture(0).size
        if 3 * width * height * len(self) > ARRAY_BYTES:
            return None
        images = torch.empty(len(self), 3, height, width, dtype=torch.uint8)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for block in torch.arange(len(self)).split(1024):
                pixels = [np.asarray(picture) for picture in pool.map(self.picture, block.tolist())]
                if any(p.shape[:2] != (height, width) for p in pixels):
                    return None
                images[block] = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        return images


def _read_pack(path: Path) -> PackDataset:
    try:
        with np.load(path) as pack:
            blob, offsets, labels = pack["blob"], pack["offsets"], pack["labels"]
            classes = [name.decode() if isinstance(name, bytes) else str(name) for name in pack["classes"]]
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except KeyError as error:
        raise DataError(
            f"{path} is no pack of pictures: {error.args[0]}; expected blob, offsets, labels, classes"
        ) from None
    except Exception as error:  # zip, NumPy and the decompressor each have their own
        raise DataError(f"{path} is corrupt, truncated or no .npz file: {error}") from None
    if len(offsets) != len(labels) + 1 or offsets[-1] > len(blob) or (np.diff(offsets) < 0).any():
        raise DataError(f"{path} is inconsistent: {len(labels)} labels, {len(offsets)} offsets, {len(blob)} bytes")
    contents = [blob[a:b] for a, b in itertools.pairwise(offsets)]
    return PackDataset(contents, labels, classes, str(path))


def _join(packs: list[PackDataset]) -> PackDataset:
    if any(pack.classes != packs[0].classes for pack in packs):
        raise DataError(f"{packs[0].name} and {packs[-1].name} have other classes; they cannot be joined")
    if len(packs) == 1:
        return packs[0]
    contents = [content for pack in packs for content in pack.contents]
    labels = torch.cat([pack.labels for pack in packs])
    return PackDataset(contents, labels, packs[0].classes, "+".join(pack.name for pack in packs))


def _part(pack: PackDataset, indices: list[int]) -> PackDataset:
    return PackDataset([pack.contents[i] for i in indices], pack.labels[indices], pack.classes, pack.name)


def _open_shards(source: str) -> tuple[ImageStream, ImageStream]:
    names = [name for pattern in _comma_separated(source) for name in expand(pattern.strip())]
    local = [name for name in names if "://" not in name and not name.startswith("pipe:")]
    if missing := [name for name in local if not Path(name).is_file()]:
        raise DataError(f"there is no shard {missing[0]}")
    val = [name for name in names if any(word in Path(name).stem.lower() for word in ("val", "test"))]
    train = [name for name in names if name not in val]
    if not (train and val):
        raise DataError(
            f"wds:{source} names no shards for {'training' if val else 'validation'}; add such as ,val-{{0..3}}.tar"
        )
    return TarShards(train), TarShards(val)


def _comma_separated(text: str) -> list[str]:
    """Split at commas outside of braces."""
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _open_hub(source: str) -> tuple[ImageStream, ImageStream]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"hf:{source} needs datasets: pip install 'tokamix[data]'") from None
    name, _, config = source.partition(":")
    try:
        splits = load_dataset(name, config or None, streaming=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"hf:{source} cannot be opened: {reason}") from None
    train = next((split for split in TRAIN_NAMES if split in splits), None)
    val = next((split for split in VAL_NAMES if split in splits), None)
    if train is None or val is None:
        raise DataError(f"hf:{source} has the splits {', '.join(splits)}; training and validation are needed")

    def part(split: str) -> HubSplit:
        info = (splits[split].info.splits or {}).get(split)
        return HubSplit(splits[split], f"hf:{source} ({split})", info.num_examples if info else None)

    return part(train), part(val)


# torchvision's class, and its arguments for training and for validation; several for one part are joined
TORCHVISION: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    name.lower(): (name, train, val)
    for names, train, val in (
        (("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"), [{"train": True}], [{"train": False}]),
        # papers on transfer train on both small parts and report the large one
        (("Flowers102",), [{"split": "train"}, {"split": "val"}], [{"split": "test"}]),
        (("Food101", "GTSRB", "STL10", "SVHN", "StanfordCars"), [{"split": "train"}], [{"split": "test"}]),
        (("OxfordIIITPet",), [{"split": "trainval"}], [{"split": "test"}]),
        (("ImageNet", "Imagenette"), [{"split": "train"}], [{"split": "val"}]),
    )
    for name in names
}
NOT_DOWNLOADABLE = ("ImageNet", "StanfordCars")


def _open_torchvision(name: str, folder: str) -> tuple[ImageDataset, ImageDataset]:
    from torchvision import datasets

    name, *parts = TORCHVISION[name.lower()]
    make = getattr(datasets, name)
    root = Path(folder).expanduser() if folder else data_folder()

    def load(arguments: dict[str, Any]) -> Any:
        try:
            return make(root, **arguments)
        except (RuntimeError, OSError):  # it is not there
            return _download(make, name, root, arguments)

    train, val = (_from_torchvision([load(arguments) for arguments in part]) for part in parts)
    return train, val


def _download(make: Callable[..., Any], name: str, root: Path, part: dict[str, Any]) -> Any:
    where = f"{name} is not in {root}; set TOKAMIX_DATA to the folder that has it, or write {name}:/folder"
    if name in NOT_DOWNLOADABLE:
        raise DataError(f"{where} (it cannot be downloaded)")
    try:
        return make(root, download=True, **part)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{where} (downloading failed: {reason})") from None


def _from_torchvision(parts: list[Any]) -> ImageDataset:
    """Our kind of data set from what torchvision's hold: an array of pixels, or the paths of files."""

    def held(part: Any, *names: str) -> Any:
        return next((getattr(part, name) for name in names if getattr(part, name, None) is not None), None)

    files: list[Any] = []
    labels: list[int] = []
    for part in parts:
        samples = held(part, "samples", "_samples")  # (path, label)
        if samples:
            files += [path for path, _ in samples]
            labels += [label for _, label in samples]
        else:
            files += held(part, "_image_files", "_images") or []
            labels += [int(label) for label in held(part, "targets", "labels", "_labels")]
    names = held(parts[0], "classes") or [str(i) for i in range(1 + max(labels))]
    classes = [name if isinstance(name, str) else name[0] for name in names]
    if files:
        return FileDataset(files, labels, classes)
    images = torch.cat([torch.as_tensor(part.data) for part in parts])
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
    return ArrayDataset(images, labels, classes)
