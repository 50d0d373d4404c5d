"""The tab Look in the browser: photos, models, tokens, links, and what is refused."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.browser.conftest import PHONE, upload

USERS = 10


def heat(page: Any) -> str:
    """The heat maps of the page."""
    return "".join(page.locator("#look-board img.heat").evaluate_all("images => images.map(image => image.src)"))


def click_token(page: Any, x: float, y: float) -> None:
    """Click on the first photo at fractions of its sides."""
    photo = page.locator("#look-board .stack").first
    box = photo.bounding_box()
    photo.click(position={"x": x * box["width"], "y": y * box["height"]})


def expect_token(page: Any, x: float, y: float) -> None:
    """Wait until the pictures are those of a token."""
    script = "([x, y]) => { const d = document.querySelector('.board').dataset;"
    script += " return Math.abs(d.x - x) < 0.03 && Math.abs(d.y - y) < 0.03 }"
    page.wait_for_function(script, arg=[x, y])


@pytest.fixture
def page(page: Any) -> Any:
    page.locator("#look-board .predictions").first.wait_for()
    return page


def test_a_click_changes_the_figures_of_three_models(page: Any) -> None:
    expect(page.locator("#look-board section").first.locator("figure")).to_have_count(3)
    before = heat(page)
    click_token(page, 0.2, 0.8)
    expect_token(page, 0.2, 0.8)
    assert heat(page) != before
    expect(page).to_have_url(re.compile("token=0.8"))


def test_upload(page: Any, photo: Path) -> None:
    """An uploaded photo replaces the sample, and other predictions appear."""
    picture = page.locator("#look-board img.photo").first
    before = picture.get_attribute("src")
    upload(page, "#look-photo", photo)
    expect(picture).not_to_have_attribute("src", before)


def test_sliders_and_models(page: Any) -> None:
    before = heat(page)
    layer = page.get_by_label(re.compile("^number input for Layer"))
    layer.fill("1")
    layer.press("Tab")
    page.wait_for_function(
        "before => [...document.querySelectorAll('#look-board img.heat')].map(i => i.src).join('') !== before",
        arg=before,
    )
    page.locator("#look-models").get_by_role("button", name=re.compile("^Remove")).last.click()
    expect(page.locator("#look-board section").first.locator("figure")).to_have_count(2)


def test_a_link_restores_the_view(open_page: Callable[..., Any]) -> None:
    query = (
        "photo=flower&models=pyramid_nano_weight_mixing.imagenette&pictures=mixing_row&layer=2&head=1&token=0.25,0.75"
    )
    page = open_page(f"/?{query}")
    page.locator("#look-board .predictions").first.wait_for()
    expect_token(page, 0.75, 0.25)
    expect(page.locator("#look-board section")).to_have_count(2)
    expect(page.get_by_label(re.compile("^number input for Layer"))).to_have_value("2")
    expect(page.get_by_role("radio", name="flower")).to_be_checked()


def test_download(page: Any) -> None:
    with page.expect_download() as download:
        page.locator("#look-save").click()
    with Image.open(download.value.path()) as image:
        assert image.format == "PNG"
        assert min(image.size) > 500


def test_keyboard_alone(page: Any) -> None:
    """Tab reaches the pictures, arrows move the token; tabs of the page are reached and opened too."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')?.startsWith('Pictures. ')"):
            break
    else:
        raise AssertionError("the focus does not reach the pictures")
    before = heat(page)
    start = float(page.locator(".board").get_attribute("data-y"))
    page.keyboard.press("ArrowDown")
    page.wait_for_function("start => document.querySelector('.board').dataset.y > start + 0.01", arg=start)
    page.wait_for_function(
        "before => [...document.querySelectorAll('#look-board img.heat')].map(i => i.src).join('') !== before",
        arg=before,
    )
    page.get_by_role("tab", name="Look").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Compare")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#compare-summary")).to_contain_text("results have both")


def test_phone(open_page: Callable[..., Any]) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    page.locator("#look-board .predictions").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    photo = page.locator("#look-board .stack").first
    photo.scroll_into_view_if_needed()
    box = photo.bounding_box()
    photo.tap(position={"x": 0.8 * box["width"], "y": 0.3 * box["height"]})
    expect_token(page, 0.8, 0.3)


def huge_image(path: Path) -> Path:
    """A PNG of few bytes and 900 million pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = (30_000).to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    pixels = zlib.compress(bytes(3751) * 1000)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("text.png", "not an image"), ("pixels.png", "pixels"), ("bytes.png", "20 MB|size|too large|413")],
)
def test_bad_files_get_a_sentence(page: Any, tmp_path: Path, name: str, sentence: str) -> None:
    path = tmp_path / name
    if name == "text.png":
        path.write_text("this is no image")
    elif name == "pixels.png":
        huge_image(path)
    else:
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(21 * 2**20))
    before = page.locator("#look-board img.photo").first.get_attribute("src")
    upload(page, "#look-photo", path)
    expect(page.get_by_test_id("toast-body").first).to_contain_text(re.compile(sentence, re.IGNORECASE))
    assert page.locator("#look-board img.photo").first.get_attribute("src") == before
    page.problems[:] = [text for text in page.problems if "413" not in text]  # the refusal itself is logged
    click_token(page, 0.3, 0.3)
    expect_token(page, 0.3, 0.3)  # the page goes on


def test_ten_users_at_once(open_page: Callable[..., Any]) -> None:
    """All of them are served, each with the token that was clicked there."""
    pages = [open_page(viewport={"width": 800, "height": 600}) for _ in range(USERS)]
    for page in pages:
        page.locator("#look-board .predictions").first.wait_for()
    places = [(0.1 + 0.08 * number, 0.9 - 0.08 * number) for number in range(USERS)]
    for page, (x, y) in zip(pages, places, strict=True):
        click_token(page, x, y)
    for page, (x, y) in zip(pages, places, strict=True):
        expect_token(page, x, y)
