"""From the bytes of a picture to RGB, or to one sentence that names the file."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

MAGIC = {b"\xff\xd8": ("JPEG",), b"\x89PNG": ("PNG",), b"RIFF": ("WEBP",)}  # spares trying one format after the other
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class DataError(ValueError):
    """Something in a data set cannot be used; the message names it."""


def decode(source: Path | bytes, name: str = "", at_least: int | None = None) -> Image.Image:
    """Decode a picture to 8-bit RGB.

    The content decides, not the name: a JPEG called .png is read. CMYK, palette, grey and bilevel pictures are
    converted; 16 bits are scaled to 8; transparent parts become white; of an animation the first frame is taken.
    Corrupt, truncated and empty files, floating-point pixels, and pictures above Pillow's limit for decompression
    bombs (179 million pixels) raise a DataError. Orientation tags are ignored, as timm and torchvision do.

    Args:
        source: a file, or its content.
        name: what to call it in errors; the file's path by default.
        at_least: a JPEG may be decoded at half, a quarter or an eighth of its size while both sides stay this long.
    """
    name = name or (str(source) if isinstance(source, Path) else "a picture")
    try:
        with _open(source) as image:
            if at_least is not None:
                image.draft(None, (at_least, at_least))
            image.load()
            return _to_rgb(image)
    except DataError as error:
        raise DataError(f"{name} {error}") from None
    except FileNotFoundError:
        raise DataError(f"{name} does not exist any more") from None
    except PermissionError:
        raise DataError(f"{name} may not be read: permission denied") from None
    except UnidentifiedImageError:
        size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
        raise DataError(f"{name} is {'empty (0 bytes)' if not size else 'not a picture, or corrupt'}") from None
    except Image.DecompressionBombError as error:
        limit = "; shrink it, or set PIL.Image.MAX_IMAGE_PIXELS higher if you trust it"
        raise DataError(f"{name} is too large: {str(error).partition(',')[0]}{limit}") from None
    except Exception as error:  # decoders raise nearly anything on corrupt input
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name} is corrupt or truncated: {reason}") from None


def _open(source: Path | bytes) -> Image.Image:
    if isinstance(source, Path):
        return Image.open(source)
    return Image.open(io.BytesIO(source), formats=next((f for m, f in MAGIC.items() if source.startswith(m)), None))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise DataError("has floating-point pixels, whose range is unknown; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to white
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise DataError(f"has pixels from {pixels.min()} to {pixels.max()}; save it with 8 or 16 bits")
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
