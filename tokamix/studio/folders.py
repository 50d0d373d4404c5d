"""What lies below the folders of the studio: runs, data sets, tables of results."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tokamix.data.decode import EXTENSIONS
from tokamix.studio.settings import StudioSettings
from tokamix.train.output.watch import is_run

DEPTH = 4  # levels of folders that are searched
MAX_FOLDERS = 2000  # so that a huge tree does not block the page
GENERATED = ("shapes", "digits")  # data sets that need no files
Choices = list[tuple[str, str]]  # what the page shows, and the path


def list_runs(settings: StudioSettings, tasks: tuple[str, ...] = ()) -> Choices:
    """Folders of runs, the latest first; `tasks` keeps the trained models of these tasks only."""
    found = [(folder, label) for folder, label in _walk(settings) if is_run(folder)]
    if tasks:
        found = [(folder, label) for folder, label in found if _task(folder) in tasks and has_weights(folder)]
    found.sort(key=lambda item: (item[0] / "environment.json").stat().st_mtime, reverse=True)
    return [(label, str(folder)) for folder, label in found]


def has_weights(folder: Path) -> bool:
    """Whether a run has weights to predict with."""
    return (folder / "model.safetensors").is_file()


def list_data(settings: StudioSettings) -> Choices:
    """Folders of images in class folders, with masks or with annotations; and the generated data sets."""
    own = [(label, str(folder)) for folder, label in _walk(settings) if not is_run(folder) and _holds_data(folder)]
    return [*own, *((name, name) for name in GENERATED)]


def list_tables(settings: StudioSettings) -> list[Path]:
    """CSV files; links, which may lead out of the folders, are left out."""
    files = (path for folder, _ in _walk(settings) if not is_run(folder) for path in sorted(folder.glob("*.csv")))
    return [path for path in files if not path.is_symlink()]


def resolve_data(settings: StudioSettings, source: str) -> str:
    """A data set that the page may train on; ValueError for others."""
    return source if source in GENERATED else str(settings.resolve(source))


def _walk(settings: StudioSettings) -> Iterator[tuple[Path, str]]:
    """Folders and their labels, parents first; hidden folders, links and the inside of runs are left out."""
    count = 0
    for root in dict.fromkeys(folder.resolve() for folder in settings.folders):
        for path, names, _ in os.walk(root):
            folder = Path(path)
            depth = len(folder.relative_to(root).parts)
            inside = depth >= DEPTH or is_run(folder)
            names[:] = [] if inside else sorted(name for name in names if not name.startswith("."))
            yield folder, str(Path(root.name) / folder.relative_to(root))
            count += 1
            if count >= MAX_FOLDERS:
                return


def _task(folder: Path) -> str:
    try:
        return json.loads((folder / "environment.json").read_text())["settings"]["task"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _holds_data(folder: Path) -> bool:
    """Whether at least two folders inside hold images: classes, or images and masks; or there are train and val."""
    inside = [entry for entry in _entries(folder) if entry.is_dir() and not is_run(Path(entry))]
    if {"train", "val"} <= {entry.name for entry in inside}:
        return True
    return sum(any(Path(e.name).suffix.lower() in EXTENSIONS for e in _entries(entry)) for entry in inside) >= 2


def _entries(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
