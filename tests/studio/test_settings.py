"""What the studio may read, and who may reach it."""

from pathlib import Path

import pytest

from tokamix.studio.settings import StudioSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_this_machine_needs_no_password(host: str) -> None:
    assert StudioSettings(host=host).password is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_other_machines_need_a_password(host: str) -> None:
    with pytest.raises(ValueError, match="give a --password"):
        StudioSettings(host=host)
    assert "secret" not in repr(StudioSettings(host=host, password="secret"))


def test_paths_stay_below_the_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "runs", tmp_path / "private"
    for folder in (inside / "a", outside):
        folder.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "kept").symlink_to(inside / "a")
    settings = StudioSettings(folders=(inside,))
    assert settings.resolve("a") == settings.resolve("kept") == settings.resolve(str(inside / "a")) == inside / "a"
    bad = ["../private", "a/../../private", "link", "link/.", str(outside), "/etc/passwd", "~", "b", "a\0", "x" * 5000]
    for name in bad:
        with pytest.raises(ValueError, match="not below the folders"):
            settings.resolve(name)
    with pytest.raises(ValueError, match="name them with --folder"):
        StudioSettings().resolve("/etc/passwd")


def test_folders_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        StudioSettings(folders=(tmp_path / "runs",))
