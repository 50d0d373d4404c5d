"""The 15 corruptions of ImageNet-C in five severities, generated on the fly for images of any size.

Kinds and parameters are those of "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations"
(arXiv 1903.12261) and hendrycks/robustness:ImageNet-C/create_c/make_imagenet_c.py; the code is our own. They act on
images after resizing and cropping, as there. Differences:

- Lengths in pixels are given for 224 px and scale with the side of the image. CIFAR-10-C has weaker parameters of its
  own, so its numbers are not comparable.
- frost blends with a generated texture instead of photographs, fog's and frost's noise is a sum of octaves instead of
  diamond-square, and glass_blur copies random neighbours instead of swapping them one after the other.
- The result is rounded to 8 bits, but not stored as a JPEG of quality 85.
"""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tokamix.data.rng import generator

SIDE = 224  # of ImageNet-C's images, for which lengths are given
SEVERITIES = (1, 2, 3, 4, 5)
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation
    "shot_noise": (60, 25, 12, 5, 3),  # photons of a white pixel
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),  # part of the values that become 0 or 1
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),  # radius, blur of the disk's edge
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),  # sigma, distance, repetitions
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),  # radius, sigma
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),  # end and step of the zoom
    # mean, standard deviation and zoom of the flakes, threshold, radius and sigma of their motion, part of the image
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),  # weights of image and texture
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),  # strength, decay of the octaves
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # added to HSV's value
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),  # factor on the distance to the mean
    # alpha, sigma and affine shift, in pixels; the authors scale by 244
    "elastic_transform": (
        (488, 170.8, 24.4),
        (488, 19.52, 48.8),
        (12.2, 2.44, 4.88),
        (17.08, 2.44, 4.88),
        (29.28, 2.44, 4.88),
    ),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),  # factor on the side
    "jpeg_compression": (25, 18, 15, 10, 7),  # quality
}
CORRUPTIONS = tuple(PARAMETERS)


def corrupt(images: Tensor, kind: str, severity: int, indices: Sequence[int]) -> Tensor:
    """Corrupt a batch of pixels (B, C, H, W) from 0 to 1, and round the result to 8 bits.

    Args:
        images: the pixels; C is 1 or 3.
        kind: one of `CORRUPTIONS`.
        severity: 1 to 5.
        indices: number of each image in the data set, the seed of its noise.
    """
    if kind not in PARAMETERS:
        raise ValueError(f"there is no corruption {kind!r}; choose from {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity}, but must be one of 1, 2, 3, 4, 5")
    if images.shape[1] not in (1, 3):
        raise ValueError(f"corruptions are for images of 1 or 3 channels, not {images.shape[1]}; leave them out")
    draw = Draw([generator("corruption", kind, severity, index) for index in indices], images.device)
    corrupted = FUNCTIONS[kind](images, PARAMETERS[kind][severity - 1], draw)
    return (corrupted.clamp(0, 1) * 255).round() / 255


class Draw:
    """Random numbers of a batch: each image has its own generator, on the CPU, so that batches do not matter."""

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device) -> None:
        self.generators, self.device = generators, device

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers (B, *shape)."""
        return torch.stack([torch.randn(shape, generator=g) for g in self.generators]).to(self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Numbers (B, *shape) from low to high."""
        numbers = torch.stack([torch.rand(shape, generator=g) for g in self.generators])
        return (low + (high - low) * numbers).to(self.device)

    def poisson(self, rates: Tensor) -> Tensor:
        """Poisson numbers with these rates (B, ...)."""
        parts = [torch.poisson(r, g) for r, g in zip(rates.cpu(), self.generators, strict=True)]
        return torch.stack(parts).to(self.device)


def gaussian_noise(x: Tensor, deviation: float, draw: Draw) -> Tensor:
    """Add normal noise."""
    return x + deviation * draw.normal(*x.shape[1:])


def shot_noise(x: Tensor, photons: float, draw: Draw) -> Tensor:
    """Count photons, whose number has a Poisson distribution."""
    return draw.poisson(x * photons) / photons


def impulse_noise(x: Tensor, amount: float, draw: Draw) -> Tensor:
    """Set random values to 0 or 1 (salt and pepper)."""
    drawn = draw.uniform(0, 1, *x.shape[1:])
    return torch.where(drawn < amount, (drawn < amount / 2).to(x.dtype), x)


def defocus_blur(x: Tensor, parameters: tuple[float, float], draw: Draw) -> Tensor:
    """Convolve with a disk."""
    radius, softness = parameters[0] * _scale(x), parameters[1]
    reach = math.ceil(radius) + 2
    line = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    distance = (line[:, None] ** 2 + line**2).sqrt()
    disk = (radius + 0.5 - distance).clamp(0, 1)[None, None]  # a soft edge: at small sizes the radius is below 1 px
    disk = gaussian_blur(disk / disk.sum(), softness)
    channels = x.shape[1]
    padded = _pad(x, reach)
    return F.conv2d(padded, disk.expand(channels, 1, -1, -1), groups=channels)


def glass_blur(x: Tensor, parameters: tuple[float, int, int], draw: Draw) -> Tensor:
    """Replace pixels by random neighbours, between two blurs."""
    sigma, distance, repetitions = parameters[0] * _scale(x), max(1, round(parameters[1] * _scale(x))), parameters[2]
    height, width = x.shape[-2:]
    x = gaussian_blur(x, sigma)
    rows, columns = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
    for _ in range(repetitions):
        shift = draw.uniform(-distance, distance, 2, height, width).floor().long()
        y = (rows + shift[:, 0]).clamp(0, height - 1)
        source = y * width + (columns + shift[:, 1]).clamp(0, width - 1)
        x = x.flatten(2).gather(2, source.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return gaussian_blur(x, sigma)


def motion_blur(x: Tensor, parameters: tuple[float, float], draw: Draw) -> Tensor:
    """Blur along a line within 45 degrees of the horizontal."""
    return _blur_along(x, *parameters, draw.uniform(-45, 45))


def zoom_blur(x: Tensor, parameters: tuple[float, float], draw: Draw) -> Tensor:
    """Average the image with its enlargements."""
    factors = np.arange(1, *parameters)
    return (x + sum(_zoom(x, factor) for factor in factors)) / (len(factors) + 1)


def snow(x: Tensor, parameters: tuple[float, ...], draw: Draw) -> Tensor:
    """Brighten the image and add moving flakes."""
    mean, deviation, zoom, threshold, radius, sigma, kept = parameters
    flakes = _zoom(mean + deviation * draw.normal(1, *x.shape[-2:]), max(1.0, zoom * _scale(x)))
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    flakes = _blur_along(flakes, radius, sigma, draw.uniform(-135, -45))
    weights = torch.tensor([0.299, 0.587, 0.114] if x.shape[1] == 3 else [1.0], device=x.device, dtype=x.dtype)
    grey = (x * weights[:, None, None]).sum(1, keepdim=True)
    x = kept * x + (1 - kept) * torch.maximum(x, 1.5 * grey + 0.5)
    return x + flakes + flakes.flip(-2, -1)


def frost(x: Tensor, parameters: tuple[float, float], draw: Draw) -> Tensor:
    """Blend with a generated texture of bluish ridges."""
    ridges = (1 - (2 * octave_noise(draw, x.shape[-2:], 1.4) - 1).abs()) ** 2
    tint = torch.tensor([0.8, 0.9, 1.0] if x.shape[1] == 3 else [0.9], device=x.device)[:, None, None]
    return parameters[0] * x + parameters[1] * ridges * tint


def fog(x: Tensor, parameters: tuple[float, float], draw: Draw) -> Tensor:
    """Add cloudy noise and scale back to the image's range."""
    strength, decay = parameters
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * octave_noise(draw, x.shape[-2:], decay)) * top / (top + strength)


def brightness(x: Tensor, amount: float, draw: Draw) -> Tensor:
    """Raise the value of HSV, the largest of the three colours; the others keep their ratio to it."""
    value = x.amax(1, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, x * raised / value.clamp(min=1e-12), raised)


def contrast(x: Tensor, factor: float, draw: Draw) -> Tensor:
    """Move all pixels towards the mean of their channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def elastic_transform(x: Tensor, parameters: tuple[float, float, float], draw: Draw) -> Tensor:
    """Distort by an affine map whose three reference points are moved, then by a smooth random field."""
    alpha, sigma, shift = (value * _scale(x) for value in parameters)
    height, width = x.shape[-2:]
    centre = torch.tensor([width, height], dtype=torch.float32) // 2
    reach = float(min(height, width) // 3)
    points = centre + reach * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    points = points.to(x.device)
    moved = points + draw.uniform(-shift, shift, 3, 2)
    ones = torch.ones(len(x), 3, 1, device=x.device)
    affine = torch.linalg.solve(torch.cat([moved, ones], 2), points.expand(len(x), -1, -1))  # (B, 3, 2): moved -> point
    rows, columns = torch.meshgrid(*(torch.arange(n, device=x.device) for n in (height, width)), indexing="ij")
    field = alpha * gaussian_blur(draw.uniform(-1, 1, 2, height, width), sigma, truncate=3)  # x, y
    places = torch.stack([columns + field[:, 0], rows + field[:, 1], torch.ones_like(field[:, 0])], -1)
    source = places.flatten(1, 2) @ affine  # (B, H * W, 2)
    scale = torch.tensor([width, height], device=x.device)
    grid = ((2 * source + 1) / scale - 1).view(-1, height, width, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def pixelate(x: Tensor, factor: float, draw: Draw) -> Tensor:
    """Shrink by averaging and enlarge again."""
    height, width = x.shape[-2:]
    small = F.interpolate(x, (max(1, int(height * factor)), max(1, int(width * factor))), mode="area")
    return F.interpolate(small, (height, width), mode="nearest")


def jpeg_compression(x: Tensor, quality: int, draw: Draw) -> Tensor:
    """Save as JPEG and read again."""
    pixels = (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    decoded = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "JPEG", quality=quality)
        decoded.append(np.asarray(Image.open(file)).reshape(image.shape))
    return torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).to(x) / 255


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        *(gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost),
        *(fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression),
    )
}


def gaussian_blur(x: Tensor, sigma: float, truncate: float = 4) -> Tensor:
    """Gaussian blur with reflected borders; two matrix products, so that sigma may exceed the image."""
    for dim in (-2, -1):
        x = (x.transpose(dim, -1) @ _blur_matrix(x.shape[dim], sigma, truncate).to(x).T).transpose(dim, -1)
    return x


def _blur_matrix(side: int, sigma: float, truncate: float) -> Tensor:
    reach = int(truncate * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets / max(sigma, 1e-6)) ** 2)
    places = (torch.arange(side)[:, None] + offsets) % (2 * side)
    places = torch.minimum(places, 2 * side - 1 - places)  # d c b a | a b c d | d c b a
    return torch.zeros(side, side).scatter_add_(1, places, (weights / weights.sum()).expand(side, -1))


def octave_noise(draw: Draw, size: Sequence[int], decay: float) -> Tensor:
    """Cloudy noise (B, 1, H, W) from 0 to 1: each octave has twice the detail and 1 / decay**2 of the amplitude.

    The square is diamond-square's as the authors wrote it: the random part is multiplied by its range twice.
    """
    noise, amplitude, cells = None, 1.0, 2
    while True:
        grid = draw.uniform(-amplitude, amplitude, 1, cells, cells)
        octave = F.interpolate(grid, tuple(size), mode="bilinear", align_corners=True)
        noise = octave if noise is None else noise + octave
        if cells >= max(size):
            low, high = noise.amin((2, 3), keepdim=True), noise.amax((2, 3), keepdim=True)
            return (noise - low) / (high - low)
        amplitude, cells = amplitude / decay**2, 2 * cells


def _scale(x: Tensor) -> float:
    """Factor on lengths that are given for 224 px."""
    return min(x.shape[-2:]) / SIDE


def _pad(x: Tensor, reach: int) -> Tensor:
    """Reflect the borders; repeat them where the image is smaller than the padding."""
    return F.pad(x, [reach] * 4, mode="reflect" if reach < min(x.shape[-2:]) else "replicate")


def _zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the centre."""
    theta = torch.tensor([[1 / factor, 0, 0], [0, 1 / factor, 0]], dtype=x.dtype, device=x.device)
    grid = F.affine_grid(theta.expand(len(x), -1, -1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _blur_along(x: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Blur in one direction from each pixel on, with the falling half of a Gaussian, as ImageMagick's motion blur."""
    radius, sigma = radius * _scale(x), sigma * _scale(x)
    height, width = x.shape[-2:]
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    images, channels = (torch.arange(n, device=x.device) for n in x.shape[:2])
    steps = range(2 * math.ceil(radius) + 1)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in steps]
    angle = degrees.deg2rad()
    blurred = torch.zeros_like(x)
    for step, weight in zip(steps, weights, strict=True):
        y = (rows + (step * angle.sin()).round().long()[:, None]).clamp(0, height - 1)
        z = (columns + (step * angle.cos()).round().long()[:, None]).clamp(0, width - 1)
        shifted = x[images[:, None, None, None], channels[:, None, None], y[:, None, :, None], z[:, None, None, :]]
        blurred += weight / sum(weights) * shifted
    return blurred
