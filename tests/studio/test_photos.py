"""Uploads under limits, without metadata; samples without a network."""

import io
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tokamix.studio.photos import MAX_PHOTOS, MAX_SIDE, SAMPLES, PhotoStore, read_photo, sample_photo
from tokamix.studio.settings import StudioSettings

SETTINGS = StudioSettings(max_upload_bytes=200_000, max_pixels=1_000_000)


def save(path: Path, size: tuple[int, int] = (60, 40), **options) -> Path:
    Image.new("RGB", size, "red").save(path, **options)
    return path


def test_samples() -> None:
    assert len(SAMPLES) >= 3
    for name in SAMPLES:
        photo = sample_photo(name)
        assert photo.mode == "RGB"
        assert min(photo.size) >= 160
        assert len(photo.getcolors(2**24)) > 100


def test_photos_are_upright_and_without_metadata(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    exif.get_ifd(0x8825)[2] = (52.0, 31.0, 12.0)  # GPS latitude
    path = save(tmp_path / "photo.jpg", exif=exif, comment=b"home")
    assert b"Exif" in path.read_bytes()
    photo = read_photo(path, SETTINGS)
    assert photo.size == (40, 60)
    assert not photo.getexif()
    assert not photo.info
    stream = io.BytesIO()
    photo.save(stream, "JPEG")
    assert b"Exif" not in stream.getvalue()
    assert b"home" not in stream.getvalue()


def test_large_photos_shrink(tmp_path: Path) -> None:
    assert read_photo(save(tmp_path / "photo.png", (2000, 400)), SETTINGS).size == (MAX_SIDE, 205)


def test_too_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(b"\x89PNG" + bytes(300_000))
    with pytest.raises(ValueError, match=r"has 0\.3 MB; this studio takes at most 0\.19"):
        read_photo(path, SETTINGS)


@pytest.mark.parametrize("size", [(1001, 1000), (40_000, 40_000)])
def test_too_many_pixels_are_not_decoded(tmp_path: Path, size: tuple[int, int], monkeypatch) -> None:
    """40,000 x 40,000 pixels of one colour are a file of 200 kB, and 4.8 GB when decoded."""
    path = tmp_path / "bomb.png"
    Image.new("1", (8, 8)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")  # the header's size
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)
    monkeypatch.setattr("tokamix.studio.photos.decode_image", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="pixels"):
        read_photo(path, SETTINGS)


@pytest.mark.parametrize(
    "content", [b"", b"plain text", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"\xff\xd8\xff\xe0" * 9]
)
def test_only_images(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not an image, or corrupt") as raised:
        read_photo(path, SETTINGS)
    assert str(tmp_path) not in str(raised.value)


def test_store_keeps_the_latest_and_deletes_files(tmp_path: Path) -> None:
    store = PhotoStore(SETTINGS)
    keys = []
    for number in range(MAX_PHOTOS + 1):
        path = save(tmp_path / "photo.png", (10 + number, 10))
        keys.append(store.add(str(path)))
        assert not path.exists()
    assert store[keys[-1]].size == (10 + MAX_PHOTOS, 10)
    with pytest.raises(ValueError, match="no longer kept"):
        store[keys[0]]
    path.write_text("no image")
    with pytest.raises(ValueError, match="not an image"):
        store.add(str(path))
    assert not path.exists()
    assert store["temple"] is sample_photo("temple")
