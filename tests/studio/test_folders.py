"""What the page may name: runs, data sets and tables below the studio's folders, and nothing else."""

import os
from pathlib import Path

import pytest

from tokamix.studio import StudioSettings, folders

pytestmark = pytest.mark.xdist_group("studio")  # they share runs and the page


def test_runs(settings: StudioSettings) -> None:
    found = dict(folders.list_runs(settings))
    root = settings.folders[0]
    assert {label.removeprefix(f"{root.name}/") for label in found} == {
        "runs/classifier",
        "runs/detector",
        "runs/segmenter",
    }
    assert {Path(path).name for _, path in folders.list_runs(settings, ("segment", "detect"))} == {
        "detector",
        "segmenter",
    }


def test_data(settings: StudioSettings) -> None:
    """A folder of class folders is data, a run is not."""
    found = [path for _, path in folders.list_data(settings)]
    assert found == [str(settings.folders[0].resolve() / "photos"), "shapes", "digits"]
    assert folders.resolve_data(settings, "shapes") == "shapes"
    assert folders.resolve_data(settings, "photos") == found[0]
    for other in ("/etc", "../..", "hf:user/name", "wds:a.tar", "CIFAR10"):
        with pytest.raises(ValueError, match="is not below the folders of this studio"):
            folders.resolve_data(settings, other)


def test_train_and_val(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / "set" / part / "a").mkdir(parents=True)
    assert folders.list_data(StudioSettings(folders=(tmp_path,)))[0][1] == str(tmp_path.resolve() / "set")


def test_links_hidden_and_deep_folders_are_left_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.csv").write_text("model,top1\na,1\n")
    inside = tmp_path / "inside"
    (inside / ".hidden").mkdir(parents=True)
    (inside / ".hidden" / "a.csv").write_text("model,top1\na,1\n")
    deep = inside / "1/2/3/4/5"
    deep.mkdir(parents=True)
    (deep / "b.csv").write_text("model,top1\na,1\n")
    (inside / "c.csv").write_text("model,top1\na,1\n")
    os.symlink(outside, inside / "link")
    os.symlink(outside / "secret.csv", inside / "d.csv")
    assert [path.name for path in folders.list_tables(StudioSettings(folders=(inside,)))] == ["c.csv"]


def test_a_huge_tree_does_not_block_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "a.csv").write_text("model\n")
    monkeypatch.setattr(folders, "MAX_FOLDERS", 4)
    assert len(folders.list_tables(StudioSettings(folders=(tmp_path,)))) == 3  # the root is the first of the four
