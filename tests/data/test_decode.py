"""Every odd image is decoded properly, or named in one sentence."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import encoded, noise
from tokamix.data import DataError, decode_image
from tokamix.data.decode import image_files, read_oriented_image


def pixel(image: Image.Image) -> tuple[int, ...]:
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_formats(form: str, tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(encoded(Image.new("RGB", (9, 5), (200, 30, 60)), form))
    image = decode_image(file)
    assert image.size == (9, 5)
    assert np.allclose(pixel(image), (200, 30, 60), atol=6)


def test_image_files_of_a_folder(tmp_path: Path) -> None:
    """Subfolders and links to folders are searched, once each; hidden files, other files and folders are no images."""
    cats = tmp_path / "photos" / "cats"
    for file in (cats / "b.JPG", cats / "._b.jpg", cats / "notes.txt", tmp_path / "dogs" / "a.png"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    (cats / "folder.jpg").mkdir()
    (cats / "all").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "dogs").symlink_to(tmp_path / "dogs")
    photos = tmp_path / "photos"
    assert image_files(photos) == [cats / "b.JPG", photos / "dogs" / "a.png"]


def test_image_files_of_folders_with_links_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one, other in ("ab", "ba"):
        (tmp_path / one).mkdir()
        (tmp_path / one / f"{one}.png").touch()
        (tmp_path / one / "link").symlink_to(tmp_path / other)
    expected = ["a/a.png", "a/link/b.png", "b/b.png", "b/link/a.png"]
    assert image_files(tmp_path) == [tmp_path / name for name in expected]
    monkeypatch.chdir(tmp_path)
    assert image_files(Path(".")) == [Path(name) for name in expected]


def test_a_wrong_name_does_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "really_a_jpeg.png"
    file.write_bytes(encoded(noise(0), "JPEG"))
    assert decode_image(file).size == (40, 32)


def test_cmyk() -> None:
    image = decode_image(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.allclose(pixel(image), (255, 0, 0), atol=4)


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (0x1234, 0x12), (0x8000, 128), (0xFFFF, 255)])
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bits_are_scaled_not_clipped(value: int, expected: int, form: str) -> None:
    image = decode_image(encoded(Image.fromarray(np.full((4, 4), value, np.uint16)), form))
    assert pixel(image) == (expected,) * 3


def test_16_bit_colour() -> None:
    """Pillow writes none, so the file is put together here."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = b"\0" + struct.pack(">3H", 0xC800, 0x1E00, 0x3C00) * 4
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", 4, 4, 16, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(row * 4)) + chunk(b"IEND", b"")
    assert pixel(decode_image(png)) == (200, 30, 60)


def test_32_bit_integers_and_floats_say_their_range() -> None:
    with pytest.raises(DataError, match=r"x\.tif has pixels from 0 to 100000; save it with 8 or 16 bits"):
        decode_image(encoded(Image.fromarray(np.array([[0, 100_000]], np.int32)), "TIFF"), "x.tif")
    with pytest.raises(DataError, match=r"x\.tif has floating-point pixels"):
        decode_image(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "x.tif")


def test_palette_and_transparency() -> None:
    palette = Image.new("RGB", (8, 8), (200, 30, 60)).quantize(4)
    assert np.allclose(pixel(decode_image(encoded(palette))), (200, 30, 60), atol=2)
    palette.info["transparency"] = palette.getpixel((0, 0))
    buffer = io.BytesIO()
    palette.save(buffer, "PNG", transparency=palette.getpixel((0, 0)))
    assert pixel(decode_image(buffer.getvalue())) == (255, 255, 255)
    assert pixel(decode_image(encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0))))) == (255, 255, 255)
    assert pixel(decode_image(encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 255))))) == (10, 20, 30)
    assert pixel(decode_image(encoded(Image.new("LA", (4, 4), (7, 255))))) == (7, 7, 7)
    assert pixel(decode_image(encoded(Image.new("1", (4, 4), 1)))) == (255, 255, 255)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    buffer = io.BytesIO()
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:])
    assert np.allclose(pixel(decode_image(buffer.getvalue())), (255, 0, 0), atol=6)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_truncated(form: str, share: float, tmp_path: Path) -> None:
    content = encoded(noise(0, 64, 64), form)
    file = tmp_path / "half.png"
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"half\.png is (corrupt or truncated: |not an image)"):
        decode_image(file)


def test_not_an_image(tmp_path: Path) -> None:
    file = tmp_path / "x.jpg"
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.jpg is empty \(0 bytes\)$"):
        decode_image(file)
    file.write_bytes(b"<html>404 not found</html>")
    with pytest.raises(DataError, match=r"x\.jpg is not an image, or corrupt$"):
        decode_image(file)
    file.write_bytes(encoded(noise(0))[:80] + bytes(range(256)) * 4)
    with pytest.raises(DataError, match=r"x\.jpg is (corrupt or truncated|not an image)"):
        decode_image(file)
    with pytest.raises(DataError, match=r"y\.jpg does not exist"):
        decode_image(tmp_path / "y.jpg")


def test_gigantic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=r"big\.png is too large: Image size \(4000 pixels\) exceeds limit of 2000"):
        decode_image(encoded(Image.new("RGB", (80, 50))), "big.png")


def test_a_large_jpeg_is_decoded_small_but_never_too_small() -> None:
    content = encoded(noise(0, 1600, 900), "JPEG")
    assert decode_image(content).size == (1600, 900)
    assert decode_image(content, min_size=400).size == (800, 450)
    assert decode_image(content, min_size=300).size == (800, 450)
    assert decode_image(content, min_size=100).size == (200, 113)
    assert decode_image(encoded(noise(0, 200, 100)), min_size=10).size == (200, 100)


def test_a_broken_exif_tag_is_ignored(tmp_path: Path) -> None:
    """A sample's image is shown as it is stored where its EXIF cannot be read."""
    noise(0, 5, 4).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00junk")
    assert read_oriented_image(tmp_path / "a.jpg").shape == (3, 4, 5)
    assert decode_image(tmp_path / "a.jpg").size == (5, 4)
