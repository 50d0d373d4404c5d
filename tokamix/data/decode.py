"""Image files: finding them in folders, and decoding them to RGB, with errors that name the file."""

import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

# first bytes -> formats, so that Pillow does not try one format after the other
MAGIC = {b"\xff\xd8": ("JPEG",), b"\x89PNG": ("PNG",), b"RIFF": ("WEBP",)}
ORIENTATION = 0x0112  # EXIF tag
TRANSPOSES = {  # value of the tag -> operation that undoes it
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
    """A file or entry of a data set is missing, corrupt or inconsistent; the message names it."""


def image_files(root: Path) -> list[Path]:
    """All image files below a folder, in order of their paths; hidden ones, such as ._a.jpg of macOS, are left out.

    Links to folders are followed, except to a folder on the way to the link: its images would be found again and again.
    """
    files = []
    for folder, subfolders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        way: list[Path] = []  # the folders from the root to this one, as they are without links
        for name in subfolders.copy():
            if (link := here / name).is_symlink():
                way = way or [p.resolve() for p in (here, *here.parents) if p.is_relative_to(root)]
                target = link.resolve()
                if any(p.is_relative_to(target) for p in way):
                    subfolders.remove(name)
        files += [here / name for name in names if name.lower().endswith(EXTENSIONS) and not name.startswith(".")]
    return sorted(files)


def list_images(root: Path) -> list[Path]:
    """All image files below a folder; an error if there is none."""
    files = image_files(root)
    if not files:
        raise DataError(f"the folder {root} has no images ({', '.join(EXTENSIONS)})")
    return files


def decode_image(
    source: Path | bytes, name: str = "", min_size: int | None = None, orient: Size | bool = False
) -> Image.Image:
    """Decode an image to 8-bit RGB.

    The format is detected from the content, not from the name: a JPEG called .png is read. CMYK, palette, grey and
    bilevel images are converted; 16 bits are scaled to 8; transparent parts become white; of an animation the first
    frame is used. Corrupt, truncated and empty files, floating-point pixels, and images above Pillow's limit for
    decompression bombs (179 million pixels) raise a DataError.

    Args:
        source: a file, or its content.
        name: for error messages; default: the file's path.
        min_size: a JPEG may be decoded at half, a quarter or an eighth of its size if both sides stay this long.
        orient: apply the EXIF orientation; a (height, width) applies it only if the image has that size afterwards. The
            default ignores it, as timm and torchvision do.
    """
    name = name or (str(source) if isinstance(source, Path) else "an image")
    try:
        with _open(source) as image:
            if min_size is not None:
                image.draft(None, (min_size, min_size))
            image.load()
            if orient is False:
                return convert_to_rgb(image, name)
            return convert_to_rgb(apply_exif_orientation(image, None if orient is True else orient), name)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{name} does not exist") from None
    except PermissionError:
        raise DataError(f"{name} cannot be read: permission denied") from None
    except UnidentifiedImageError:
        size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
        raise DataError(f"{name} is {'empty (0 bytes)' if not size else 'not an image, or corrupt'}") from None
    except Image.DecompressionBombError as error:
        limit = "; shrink it, or set PIL.Image.MAX_IMAGE_PIXELS higher if you trust it"
        raise DataError(f"{name} is too large: {str(error).partition(',')[0]}{limit}") from None
    except Exception as error:  # decoders raise nearly anything on corrupt input
        raise DataError(f"{name} is corrupt or truncated: {first_line(error)}") from None


def read_oriented_image(path: Path, size: Size | None = None, expected_by: str = "") -> Tensor:
    """Read an image with annotations as (3, H, W) uint8, with its EXIF orientation applied.

    Args:
        path: of the file.
        size: (height, width) of its annotations; the orientation is not applied if only the stored image has this size,
            and a DataError is raised if neither has it.
        expected_by: subject and verb for that error, such as "its mask a.png is".
    """
    image = decode_image(path, orient=size or True)
    height, width = size or (image.height, image.width)
    if (image.width, image.height) != (width, height):
        hint = "; one of the two is rotated" if image.size == (height, width) else ""
        raise DataError(f"{path} is {image.width}x{image.height} px, but {expected_by} {width}x{height}{hint}")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # channels stay last in memory


def apply_exif_orientation(image: Image.Image, size: Size | None = None) -> Image.Image:
    """Rotate or flip an image as its EXIF tag requires; with a `size` only if it has that (height, width) then."""
    try:
        transpose = TRANSPOSES.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a broken tag is ignored
        transpose = None
    oriented = image if transpose is None else image.transpose(transpose)
    return oriented if size in (None, (oriented.height, oriented.width)) else image


def convert_to_rgb(image: Image.Image, name: str = "an image") -> Image.Image:
    """Convert an image of any mode to 8-bit RGB, see `decode_image`; errors begin with `name`."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise DataError(f"{name} has floating-point pixels, whose range is unknown; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to white
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise DataError(f"{name} has pixels from {pixels.min()} to {pixels.max()}; save it with 8 or 16 bits")
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file in UTF-8") from None


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _open(source: Path | bytes) -> Image.Image:
    if isinstance(source, Path):
        return Image.open(source)
    formats = next((formats for magic, formats in MAGIC.items() if source.startswith(magic)), None)
    return Image.open(io.BytesIO(source), formats=formats)
