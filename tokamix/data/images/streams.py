"""Data sets that are read from front to back: WebDataset's tar shards, and Hugging Face's data sets.

A stream is dealt out in lanes: the shards, shuffled for each epoch, are spread over a fixed number of lanes, and
position p of an epoch is the next picture of lane p mod lanes. A lane shuffles within a buffer, and starts again if
it is shorter than the others. So the order does not depend on the number of processes, and where that number divides
the number of lanes, each process reads only its own shards.

Resuming exactly means reading up to the place, without decoding: streams have no random access. If reading is slow too,
unpack the shards into folders.
"""

import itertools
import json
import random
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tokamix.data.decode import EXTENSIONS, DataError, decode
from tokamix.data.rng import key

LANES = 16
BUFFER = 2048  # pictures, over all lanes


class Item(NamedTuple):
    """An encoded picture on its way to a worker."""

    name: str
    label: int
    content: bytes


class ImageStream:
    """Pictures with labels in shards: `read` gives encoded ones, `decode` makes a picture of one."""

    def __init__(self, shards: Sequence[Any], size: int, classes: Sequence[str], sizes: Sequence[int] = ()) -> None:
        self.shards, self.size, self.sizes, self.classes = list(shards), size, list(sizes), tuple(classes)

    def __len__(self) -> int:
        return self.size

    def arrays(self) -> None:
        """A stream is never held in memory."""

    def items(self, shard: Any) -> Iterator[Item]:
        """The pictures of one shard."""
        raise NotImplementedError

    def count(self, rank: int, world_size: int) -> int:
        """How many pictures a rank reads when each is to be read exactly once."""
        if self._by_shard(world_size):
            return sum(self.sizes[rank::world_size])
        return len(range(rank, self.size, world_size))

    def read(self, seed: int, epoch: int, rank: int, world_size: int, shuffle: bool) -> Iterator[Item]:
        """A rank's pictures: endless and shuffled in training; else each exactly once over all ranks."""
        if shuffle:
            yield from self._lanes(seed, epoch, rank, world_size)
        elif self._by_shard(world_size):
            for shard in self.shards[rank::world_size]:
                yield from self._checked(shard)
        else:
            yield from itertools.islice(
                itertools.chain.from_iterable(map(self._checked, self.shards)), rank, None, world_size
            )

    def decode(self, item: Item, at_least: int | None = None) -> tuple[Image.Image, int]:
        """The picture and its label."""
        return decode(item.content, item.name, at_least), item.label

    def name_of(self, item: Item) -> str:
        """What to call it in messages."""
        return item.name

    def _by_shard(self, world_size: int) -> bool:
        return bool(self.sizes) and len(self.shards) >= world_size

    def _checked(self, shard: Any) -> Iterator[Item]:
        for item in self.items(shard):
            if not 0 <= item.label < len(self.classes):
                raise DataError(f"{item.name} has label {item.label}, but there are {len(self.classes)} classes")
            yield item

    def _lanes(self, seed: int, epoch: int, rank: int, world_size: int) -> Iterator[Item]:
        order = random.Random(key(seed, epoch, "shards")).sample(self.shards, len(self.shards))
        count = min(LANES, len(order))
        own = count % world_size == 0  # then the lanes of a rank are the same in each round

        def lane(i: int) -> Iterator[Item]:
            draw = random.Random(key(seed, epoch, "lane", i))
            while True:
                items = itertools.chain.from_iterable(map(self._checked, order[i::count]))
                yield from _shuffled(items, BUFFER // count, draw)

        lanes = {i: lane(i) for i in range(count) if not own or i % world_size == rank}
        for position in itertools.count():
            if own and position % world_size != rank:
                continue
            item = next(lanes[position % count])
            if position % world_size == rank:
                yield item


def _shuffled(items: Iterator[Item], size: int, draw: random.Random) -> Iterator[Item]:
    buffer = list(itertools.islice(items, size))
    for item in items:
        i = draw.randrange(size)
        yield buffer[i]
        buffer[i] = item
    draw.shuffle(buffer)
    yield from buffer


class TarShards(ImageStream):
    """WebDataset's form: members `key.jpg` and `key.cls` (or a "label" in `key.json`) follow each other in a tar.

    `classes.txt` (one name a line) and `sizes.json` ({"shard.tar": count}) beside the shards say what is in them;
    without these, local shards are searched once for both.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        names, sizes = _sidecar(urls[0], "classes.txt"), _sidecar(urls[0], "sizes.json")
        if sizes is not None:
            known = json.loads(sizes)
            missing = [url for url in urls if Path(url).name not in known]
            if missing:
                raise DataError(f"sizes.json does not say how many pictures {missing[0]} holds")
            counts = [int(known[Path(url).name]) for url in urls]
        if names is None or sizes is None:
            if remote := [url for url in urls if _is_remote(url)]:
                raise DataError(
                    f"{remote[0]} cannot be searched from afar: put sizes.json and classes.txt beside the shards"
                )
            labels = [[item.label for item in self.items(url, peek=True)] for url in urls]
            counts = [len(part) for part in labels]
            names = names or "\n".join(map(str, range(1 + max(itertools.chain([0], *labels)))))
        filled = [(url, count) for url, count in zip(urls, counts, strict=True) if count]
        super().__init__([u for u, _ in filled], sum(counts), names.split("\n"), [c for _, c in filled])

    def items(self, shard: str, peek: bool = False) -> Iterator[Item]:
        """The pictures of one tar file; with `peek` their names and labels alone, without reading the rest."""
        try:
            with _open(shard) as file, tarfile.open(fileobj=file, mode="r:*" if peek else "r|*") as tar:
                members = ((m.name, _content(tar, m, peek)) for m in tar if m.isfile())
                for stem, group in itertools.groupby(members, lambda member: _split(member[0])[0]):
                    yield _item(f"{shard}:{stem}", {_split(name)[1]: content for name, content in group})
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{shard} is corrupt, truncated or no tar file: {error}") from None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, peek: bool) -> bytes:
    file = None if peek and member.name.lower().endswith(EXTENSIONS) else tar.extractfile(member)
    return file.read() if file else b""


def _split(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _item(name: str, parts: Mapping[str, bytes]) -> Item:
    picture = next((content for extension, content in parts.items() if f".{extension}" in EXTENSIONS), None)
    if picture is None:
        raise DataError(f"{name} has no picture, only {', '.join(sorted(parts))}")
    try:
        label = int(parts["cls"]) if "cls" in parts else int(json.loads(parts["json"])["label"])
    except (KeyError, ValueError, TypeError):
        raise DataError(f"{name} has no label: expected a number in .cls, or as 'label' in .json") from None
    return Item(name, label, picture)


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


def _sidecar(url: str, name: str) -> str | None:
    try:
        with _open(url.rpartition("/")[0] + "/" + name) as file:
            return file.read().decode().strip()
    except OSError:
        return None


def expand(pattern: str) -> list[str]:
    """Names of a pattern with {0000..0009} or {a,b}."""
    if not (match := re.search(r"\{([^{}]*)\}", pattern)):
        return [pattern]
    inner = match[1]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", inner):
        width = len(numbers[1])
        choices: Iterable[str] = (f"{i:0{width}d}" for i in range(int(numbers[1]), int(numbers[2]) + 1))
    else:
        choices = inner.split(",")
    return [name for choice in choices for name in expand(pattern[: match.start()] + choice + pattern[match.end() :])]


class HubSplit(ImageStream):
    """One split of a data set of Hugging Face's `datasets`, streamed."""

    def __init__(self, split: Any, name: str, size: int | None) -> None:
        from datasets import ClassLabel
        from datasets import Image as ImageFeature

        features = split.features or {}
        pictures = [column for column, feature in features.items() if isinstance(feature, ImageFeature)]
        labels = [column for column, feature in features.items() if isinstance(feature, ClassLabel)]
        if not (pictures and labels):
            kinds = ", ".join(f"{column} ({type(feature).__name__})" for column, feature in features.items())
            raise DataError(
                f"{name} needs one column of type Image and one of type ClassLabel; it has {kinds or 'none'}"
            )
        self.name, self.column = name, pictures[0]
        self.label = "label" if "label" in labels else labels[0]
        split = split.select_columns([self.column, self.label]).cast_column(self.column, ImageFeature(decode=False))
        count = split.num_shards
        shards = [(i, split.shard(num_shards=count, index=i)) for i in range(count)]
        if size is None:  # nobody has written it down; read it once
            size = sum(1 for _ in split)
        super().__init__(shards, size, features[self.label].names)

    def items(self, shard: tuple[int, Any]) -> Iterator[Item]:
        """The pictures of one shard."""
        index, rows = shard
        for i, row in enumerate(rows):
            picture = row[self.column]
            name = f"{self.name}, picture {i} of shard {index}"
            content = picture["bytes"] if picture["bytes"] is not None else _read(picture["path"], name)
            yield Item(name, int(row[self.label]), content)


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from None
