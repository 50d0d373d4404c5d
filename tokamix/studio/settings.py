"""What is decided when the studio starts: address, folders, password and limits."""

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

MEGABYTE = 2**20


@dataclass(frozen=True)
class StudioSettings:
    """Settings of the studio. The page can change none of them.

    Attributes:
        host: address to listen on; other than this machine's own only with a password.
        port: 0 takes a free one.
        folders: the only folders whose runs and files the page may name; links out of them are refused.
        password: asked for before the page is shown, with any user name; None: no password.
        max_upload_bytes: largest uploaded file.
        max_pixels: of an uploaded image, read from its header before it is decoded.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        open_browser: whether to open the page in the browser.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    folders: tuple[Path, ...] = ()
    password: str | None = field(default=None, repr=False)
    max_upload_bytes: int = 20 * MEGABYTE
    max_pixels: int = 40_000_000
    device: str | None = None
    open_browser: bool = False

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.password:
            raise ValueError(
                f"{self.host} can be reached by other machines: give a --password, or set TOKAMIX_STUDIO_PASSWORD"
            )
        for folder in self.folders:
            if not folder.is_dir():
                raise ValueError(f"there is no folder {folder}")

    def resolve(self, name: str) -> Path:
        """The path that a text from the page names, if it exists below one of `folders`; ValueError otherwise.

        Links are followed first, so that none leads out of the folders.
        """
        for folder in self.folders:
            root = folder.resolve()
            path = Path(os.path.realpath(root / name)) if "\0" not in name else root / "\0"
            if path.is_relative_to(root) and _exists(path):
                return path
        allowed = ", ".join(map(str, self.folders)) or "none; name them with --folder"
        raise ValueError(f"{name!r} is not below the folders of this studio ({allowed})")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
