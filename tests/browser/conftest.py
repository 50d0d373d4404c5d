"""The studio in a real browser: `make test-browser`. Not part of `make test`, which needs no browser.

One studio serves all tests. Each test has a page of its own, which fails the test on an error in the console and on a
request to another host.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.train import tiny, tiny_dense

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
START_SECONDS = 120
WAIT_MS = 30_000  # of one expectation; the machine may be busy
# what appears when a tab has loaded
READY = {
    "Look": "#look-board .predictions",
    "Compare": "#compare-summary p",
    "Train": "#run-status li",
    "Detect and segment": "#dense-run input",
}
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect these tests only if the folder is named."""
    return None if any("browser" in argument for argument in config.args) else True


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the studio: two classifiers, a detector and a segmenter in runs/, and photos of two classes."""
    folder = tmp_path_factory.mktemp("studio")
    tiny.run(folder / "runs" / "first", epochs=3, log_every=1)
    tiny.run(folder / "runs" / "second", epochs=3, log_every=1, lr=1e-3)
    settings: dict[str, Any] = {"iterations": 24, "eval_every": 24}
    scenes = {task: tiny_dense.tiny_scenes(task, train=4, val=0, side=64) for task in ("detect", "segment")}
    tiny_dense.run("detect", folder / "runs" / "detector", scenes["detect"], **settings)
    tiny_dense.run("segment", folder / "runs" / "segmenter", scenes["segment"], crop_size=48, **settings)
    for number, name in enumerate(("cat", "dog")):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (32, 32), (90 + 80 * number, 10 * i, 60)).save(folder / "photos" / name / f"{i}.png")
    return folder


@pytest.fixture(scope="session")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of shapes, which the detector and the segmenter were trained on."""
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    image = tiny_dense.tiny_scenes("detect", train=1, val=0, side=64).train.sample(0).image
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return path


@pytest.fixture(scope="session")
def studio(workspace: Path) -> Iterator[str]:
    """The address of a studio; it must end cleanly."""
    command = [sys.executable, "-m", "tokamix", "studio", "--folder", str(workspace), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    address, started = "", threading.Event()

    def read() -> None:
        nonlocal address
        for line in process.stdout or ():
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                address = found[0]
                started.set()
        started.set()

    threading.Thread(target=read, daemon=True).start()
    assert started.wait(START_SECONDS), "the studio does not start"
    assert address, "".join(lines)
    try:
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "".join(lines)
        assert "Traceback" not in "".join(lines), "".join(lines)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, "the browser tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any, studio: str) -> Iterator[Callable[..., Any]]:
    """Open the studio: `open_page(viewport=PHONE, color_scheme="dark", path="/?...")`.

    After the test no page may have logged an error or asked another host for anything.
    """
    problems: list[str] = []
    contexts = []

    def check(request: Any) -> None:
        if not request.url.startswith((f"{studio}/", "data:", "blob:")):
            problems.append(f"request to {request.url}")

    def open_one(path: str = "/", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, "accept_downloads": True, **options})
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("request", check)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda message: message.type == "error" and problems.append(f"console: {message.text}"))
        page.problems = problems  # a test that provokes an error removes it
        page.goto(studio + path)
        page.get_by_role("tab", name="Look").wait_for()
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems, problems


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    """A page on a desktop, in light colours."""
    return open_page()


def open_tab(page: Any, name: str) -> None:
    """Choose a tab and wait until what it loads is there."""
    page.get_by_role("tab", name=name).click()
    page.locator(READY[name]).first.wait_for()
    page.wait_for_timeout(300)  # of a fade


def choose(page: Any, label: str, option: Any) -> None:
    """Choose an option of a dropdown, by its text or a pattern."""
    page.get_by_role("combobox", name=label).click()
    page.get_by_role("option", name=option).click()


def upload(page: Any, where: str, file: Path) -> None:
    """Give a file to an upload field."""
    page.locator(f"{where} input[type=file]").set_input_files(file)
