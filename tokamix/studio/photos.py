"""Photos: uploads under limits and without metadata, samples that need no network, and the few that are kept."""

import hashlib
import os
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tokamix.data.decode import decode_image
from tokamix.studio._gradio import gr
from tokamix.studio.settings import MEGABYTE, StudioSettings

FOLDER = Path(__file__).with_name("samples")
SAMPLES = ("temple", "flower", "parachute", "shapes")
MAX_SIDE = 1024  # of a photo that is kept; networks see less
MAX_PHOTOS = 32  # that are kept for all users together
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


def photo_input(**kwargs: Any) -> Any:
    """`gr.Image` that hands over the uploaded file's path and decodes nothing: `read_photo` does, under limits.

    Images inside of the request and addresses, which Gradio would download, are refused. Methods of the instance are
    replaced because Gradio writes a file into the package for each subclass.
    """
    image = gr.Image(type="filepath", image_mode=None, **kwargs)
    move = image.async_move_resource_to_block_cache

    def preprocess(payload: Any) -> str | None:
        if payload is None:
            return None
        if not payload.path or (payload.url or "").startswith("data:"):
            raise gr.Error("upload the image as a file", print_exception=False)
        return payload.path  # Gradio has checked that it lies in the folder of uploads

    async def move_file(path: Any) -> str | None:
        if str(path).lower().startswith(("http:", "https:")):
            raise gr.Error("addresses are not opened: upload the image as a file", print_exception=False)
        return await move(path)

    image.preprocess, image.async_move_resource_to_block_cache = preprocess, move_file
    return image


def read_photo(path: str | Path, settings: StudioSettings) -> Image.Image:
    """Decode an uploaded image: RGB, upright, at most 1024 px, without EXIF data such as the place where it was taken.

    The number of pixels is read from the header, before anything is decoded.
    """
    path = Path(path)
    size = path.stat().st_size
    if size > settings.max_upload_bytes:
        limit = settings.max_upload_bytes / MEGABYTE
        raise ValueError(f"the file has {size / MEGABYTE:.1f} MB; this studio takes at most {limit:g} MB")
    try:
        with Image.open(path, formats=FORMATS) as header:
            width, height = header.size
    except Image.DecompressionBombError:
        raise ValueError(f"the image has too many pixels: at most {settings.max_pixels:,} are taken") from None
    except Exception:  # decoders raise nearly anything on corrupt input
        raise ValueError("the file is not an image, or corrupt: upload a JPEG, PNG, WebP, GIF, BMP or TIFF") from None
    if width * height > settings.max_pixels:
        raise ValueError(
            f"the image has {width}x{height} pixels; this studio takes at most {settings.max_pixels:,}: shrink it"
        )
    image = decode_image(path, "the image", orient=True)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return Image.frombytes("RGB", image.size, image.tobytes())  # pixels only


class PhotoStore:
    """The latest photos by key, so that requests carry a short text; older ones are forgotten."""

    def __init__(self, settings: StudioSettings) -> None:
        self.settings = settings
        self._photos: OrderedDict[str, Image.Image] = OrderedDict()

    def add(self, path: str) -> str:
        """Keep an uploaded photo, delete its file, and return its key."""
        try:
            photo = read_photo(path, self.settings)
        finally:
            Path(path).unlink(missing_ok=True)
        return self.keep(photo)

    def keep(self, photo: Image.Image) -> str:
        """Keep a photo and return its key."""
        key = "upload-" + hashlib.blake2b(photo.tobytes(), key=_SECRET, digest_size=12).hexdigest()
        self._photos[key] = photo
        self._photos.move_to_end(key)
        while len(self._photos) > MAX_PHOTOS:
            self._photos.popitem(last=False)
        return key

    def __getitem__(self, key: str) -> Image.Image:
        if key in SAMPLES:
            return sample_photo(key)
        if key not in self._photos:
            raise ValueError("this photo is no longer kept: upload it again, or choose a sample")
        self._photos.move_to_end(key)
        return self._photos[key]


_SECRET = os.urandom(16)  # nobody finds another user's photo by computing its key


@cache
def sample_photo(name: str) -> Image.Image:
    """A sample: a photo of the package, or one that is generated."""
    if name == "parachute":
        return _draw_parachute()
    if name == "shapes":
        from torchvision.transforms.functional import to_pil_image

        from tokamix.data.shapes import Shapes

        return to_pil_image(Shapes(1, 192, seed=5, part="studio").sample(0).image)
    return decode_image(FOLDER / f"{name}.jpg")


def _draw_parachute(side: int = 512) -> Image.Image:
    """A striped parachute above a field."""
    image = Image.new("RGB", (side, side))
    draw = ImageDraw.Draw(image)
    for y in range(side):
        draw.line((0, y, side, y), fill=(70 + y // 5, 120 + y // 6, 200 + y // 12))
    draw.rectangle((0, int(0.86 * side), side, side), fill=(70, 120, 50))
    centre, top, wide = side / 2, 0.12 * side, 0.3 * side
    for colour, part in (("#d62728", 1.0), ("#f5f5f0", 0.66), ("#1f4fa3", 0.33)):
        draw.chord((centre - part * wide, top, centre + part * wide, top + 1.1 * wide), 180, 360, fill=colour)
    for i in range(7):
        x = centre + wide * (i / 3 - 1)
        draw.line((x, top + 0.55 * wide, centre, 0.62 * side), fill="#303030", width=2)
    draw.ellipse((centre - 9, 0.61 * side, centre + 9, 0.61 * side + 18), fill="#303030")
    draw.rectangle((centre - 11, 0.64 * side, centre + 11, 0.72 * side), fill="#303030")
    return image.resize((side // 2, side // 2), Image.Resampling.LANCZOS)
