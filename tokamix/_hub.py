"""Access to the Hugging Face Hub that fails at once without a network."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@contextmanager
def hub_access(name: str) -> Iterator[None]:
    """Download files of `name` inside; without a network use cached files, or raise OSError.

    huggingface_hub alone retries each file for a minute, also cached ones. Its own offline mode, which
    HF_HUB_OFFLINE=1 enables, does not.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _has_network()
    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set" if before else f"there is no connection to {constants.ENDPOINT}"
        raise OSError(f"{name} cannot be downloaded, {reason}, and it is not in the cache") from None
    finally:
        constants.HF_HUB_OFFLINE = before


def _has_network() -> bool:
    """Whether the Hub's address can be resolved; a proxy resolves it itself."""
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True
