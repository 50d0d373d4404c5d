"""From the bytes of a picture to RGB, or to one sentence that names the file."""

import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

MAGIC = {b"\xff\xd8": ("JPEG",), b"\x89PNG": ("PNG",), b"RIFF": ("WEBP",)}  # spares trying one format after the other
ORIENTATION = 0x0112  # EXIF's tag, and what undoes each of its values
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
Size = tuple[int, int]


class DataError(ValueError):
    """Something in a data set cannot be used; the message names it."""


def decode(source: Path | bytes, name: str = "", at_least: int | None = None, turn: Size | bool = False) -> Image.Image:
    """Decode a picture to 8-bit RGB.

    The content decides, not the name: a JPEG called .png is read. CMYK, palette, grey and bilevel pictures are
    converted; 16 bits are scaled to 8; transparent parts become white; of an animation the first frame is taken.
    Corrupt, truncated and empty files, floating-point pixels, and pictures above Pillow's limit for decompression
    bombs (179 million pixels) raise a DataError.

    Args:
        source: a file, or its content.
        name: what to call it in errors; the file's path by default.
        at_least: a JPEG may be decoded at half, a quarter or an eighth of its size while both sides stay this long.
        turn: whether to turn it as its camera says, or the (height, width) that it shall have: then where that fits. By
            default such tags are ignored, as timm and torchvision do.
    """
    name = name or (str(source) if isinstance(source, Path) else "a picture")
    try:
        with _open(source) as image:
            if at_least is not None:
                image.draft(None, (at_least, at_least))
            image.load()
            return _to_rgb(image if turn is False else upright(image, None if turn is True else turn))
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


def scene_picture(path: Path, size: Size | None = None, teller: str = "") -> Tensor:
    """A picture of a scene as (3, H, W) uint8, in the memory order it was decoded in, turned as its camera says.

    Args:
        path: of the file.
        size: (height, width) of what is known of it; where only the picture as it is stored has it, it is not turned,
            and where neither way has it, a DataError is raised.
        teller: who says so, with a verb.
    """
    image = decode(path, turn=size or True)
    height, width = size or (image.height, image.width)
    if (image.width, image.height) != (width, height):
        hint = "; one of both is rotated" if image.size == (height, width) else ""
        raise DataError(f"{path} is {image.width}x{image.height} px, but {teller} {width}x{height}{hint}")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def upright(image: Image.Image, size: Size | None = None) -> Image.Image:
    """The image as its camera says; where a (height, width) is given, only if it has that size then."""
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a broken tag spoils no picture
        turn = None
    turned = image if turn is None else image.transpose(turn)
    return turned if size in (None, (turned.height, turned.width)) else image


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
