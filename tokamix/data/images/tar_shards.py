"""WebDataset shards: tar files of images with labels."""

import itertools
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokamix.data.decode import EXTENSIONS, DataError
from tokamix.data.images.streams import ImageStream, Item


def open_shards(source: str) -> tuple[ImageStream, ImageStream]:
    """Open the shards of patterns, separated by commas; names with "val" or "test" are for validation."""
    names = [name for pattern in _split_at_commas(source) for name in expand(pattern.strip())]
    if missing := [name for name in names if not _is_remote(name) and not Path(name).is_file()]:
        raise DataError(f"the shard {missing[0]} does not exist")
    val = [name for name in names if any(word in Path(name).stem.lower() for word in ("val", "test"))]
    train = [name for name in names if name not in val]
    if not (train and val):
        raise DataError(
            f"wds:{source} has no shards for {'training' if val else 'validation'}; add some, such as ,val-{{0..3}}.tar"
        )
    shards = TarShards(train)
    return shards, TarShards(val, shards.classes)


class TarShards(ImageStream):
    """WebDataset's format: members `key.jpg` and `key.cls` (or a "label" in `key.json`) follow each other in a tar.

    The class names are read from `classes.txt` (one name a line) beside the shards, the numbers of images from
    `sizes.json` ({"shard.tar": count}); without these files, local shards are searched once for both.

    Args:
        urls: of the shards.
        classes: names if there is no `classes.txt`; default: numbers.
    """

    def __init__(self, urls: Sequence[str], classes: Sequence[str] = ()) -> None:
        names, sizes = _read_beside(urls[0], "classes.txt"), _read_beside(urls[0], "sizes.json")
        if sizes is not None:
            counts = _parse_sizes(sizes, urls)
        if names is None or sizes is None:
            if remote := [url for url in urls if _is_remote(url)]:
                raise DataError(f"{remote[0]} is remote: put sizes.json and classes.txt beside the shards")
            labels = [[item.label for item in self.items(url, peek=True)] for url in urls]
            counts = [len(part) for part in labels]
            count = 1 + max(itertools.chain([0], *labels))
            names = names or "\n".join([*classes[:count], *map(str, range(len(classes), count))])
        if not sum(counts):
            raise DataError(f"{urls[0]} has no images" if len(urls) == 1 else f"{urls[0]} to {urls[-1]} have no images")
        filled = [(url, count) for url, count in zip(urls, counts, strict=True) if count]
        super().__init__([u for u, _ in filled], sum(counts), names.split("\n"), [c for _, c in filled])

    def items(self, shard: str, peek: bool = False) -> Iterator[Item]:
        """The images of one tar file; with `peek` only names and labels, without reading the images."""
        try:
            with _open(shard) as file, tarfile.open(fileobj=file, mode="r:*" if peek else "r|*") as tar:
                members = ((m.name, _content(tar, m, peek)) for m in tar if m.isfile())
                for stem, group in itertools.groupby(members, lambda member: _split_name(member[0])[0]):
                    yield _item(f"{shard}:{stem}", {_split_name(name)[1]: content for name, content in group})
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{shard} is corrupt, truncated or not a tar file: {error}") from None


def _parse_sizes(text: str, urls: Sequence[str]) -> list[int]:
    """The number of images of each shard, from the content of sizes.json."""
    try:
        sizes = json.loads(text)
    except ValueError:
        sizes = None
    beside = f"the sizes.json of {urls[0]}"
    if not isinstance(sizes, dict):
        raise DataError(f'{beside} is broken; expected {{"shard.tar": number of images, ...}}')
    counts: list[Any] = [sizes.get(Path(url).name) for url in urls]
    for url, count in zip(urls, counts, strict=True):
        if count is None:
            raise DataError(f"sizes.json has no number of images for {url}")
        if type(count) is not int or not 0 <= count < 2**40:
            raise DataError(f"{beside} has {count!r} for {Path(url).name}, but must have a number of images")
    return counts


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, peek: bool) -> bytes:
    file = None if peek and member.name.lower().endswith(EXTENSIONS) else tar.extractfile(member)
    return file.read() if file else b""


def _split_name(name: str) -> tuple[str, str]:
    """The key and the extension of a member."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _item(name: str, parts: Mapping[str, bytes]) -> Item:
    image = next((content for extension, content in parts.items() if f".{extension}" in EXTENSIONS), None)
    if image is None:
        raise DataError(f"{name} has no image, only {', '.join(sorted(parts))}")
    try:
        label = int(parts["cls"]) if "cls" in parts else int(json.loads(parts["json"])["label"])
    except (KeyError, ValueError, TypeError):
        raise DataError(f"{name} has no label: expected a number in .cls, or as 'label' in .json") from None
    return Item(name, label, image)


def _is_remote(url: str) -> bool:
    return "://" in url or url.startswith("pipe:")


def _open(url: str) -> Any:
    if not _is_remote(url):
        return open(url, "rb")
    try:
        from webdataset import gopen
    except ImportError:
        raise ImportError(f"reading {url} needs webdataset: pip install 'tokamix[data]'") from None
    return gopen(url)


def _read_beside(url: str, name: str) -> str | None:
    """The content of a file in the folder of a shard, or None if it does not exist."""
    folder, slash, base = url.rpartition("/")
    if url.startswith("pipe:") and not slash:  # a command such as "cat shard.tar"
        folder, slash, _ = base.rpartition(" ")
    try:
        with _open(folder + slash + name) as file:
            return file.read().decode().strip()
    except OSError:
        return None
    except UnicodeDecodeError:
        raise DataError(f"{folder + slash + name} is not a text file in UTF-8") from None


def expand(pattern: str) -> list[str]:
    """Expand {0000..0009} and {a,b} in a pattern."""
    if not (match := re.search(r"\{([^{}]*)\}", pattern)):
        return [pattern]
    inner = match[1]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", inner):
        width = len(numbers[1])
        choices: Iterable[str] = (f"{i:0{width}d}" for i in range(int(numbers[1]), int(numbers[2]) + 1))
    else:
        choices = inner.split(",")
    return [name for choice in choices for name in expand(pattern[: match.start()] + choice + pattern[match.end() :])]


def _split_at_commas(text: str) -> list[str]:
    """Split at commas outside of braces."""
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
