"""Augmentation of a whole batch at once, on its device.

The parameters of all images are drawn on the CPU as a small table of numbers (`plan`); the table is copied to the
device once, and the pixels are processed there without a loop over images and without waiting for the device. The table
does not depend on the device, so an epoch is the same on a CPU and on a GPU.

Differences from timm's transforms of single images: all translations, rotations and shears of an image are one affine
map, applied together with the crop, about the centre and before the colours; crops have no whole-pixel edges;
everything else follows timm's tables.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from timm.data import RandAugment, rand_augment_transform
from torch import Tensor

if TYPE_CHECKING:
    from tokamix.recipes import Recipe

Table = dict[str, Tensor]  # (n, ...) numbers for n images
GREY = (0.299, 0.587, 0.114)
RATIO = (3 / 4, 4 / 3)
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)
TRIES = 10  # for a crop or an erased box that may not fit, as in timm and torchvision
BLUR_RADIUS = 6
NOISE_SIDE = 256
# parameters of one layer with their neutral values: the position of an output pixel in the input,
# (xx * x + xy * y + xo, yx * x + yy * y + yo) from -1 to 1 ...
AFFINE = {"xx": "1", "xy": "0", "xo": "0", "yx": "0", "yy": "1", "yo": "0"}
# ... and out = keep * pixel + grey * its grey + mean * mean grey + smooth * its surroundings + offset, and so on
COLOUR = {"keep": "1", "grey": "0", "mean": "0", "smooth": "0", "offset": "0", "contrast": "0", "equalize": "0"}
COLOUR |= {"step": "1", "threshold": "256", "add": "0", "sigma": "0"}
NEUTRAL = AFFINE | COLOUR
CONSTANTS = ("0", "1", "-1", "255", "256")
# the parameters that each of timm's operations sets to a quantity of `_quantities`
EFFECTS = {
    "AutoContrast": {"contrast": "1"},
    "Equalize": {"equalize": "1"},
    "Invert": {"keep": "-1", "offset": "255"},
    "Rotate": {"xx": "cos", "xy": "-sin", "yx": "sin", "yy": "cos"},
    "ShearX": {"xy": "shear"},
    "ShearY": {"yx": "shear"},
    "TranslateXRel": {"xo": "translate"},
    "TranslateYRel": {"yo": "translate"},
    "Posterize": {"step": "posterize"},
    "PosterizeIncreasing": {"step": "posterize more"},
    "Solarize": {"threshold": "solarize"},
    "SolarizeIncreasing": {"threshold": "solarize more"},
    "SolarizeAdd": {"add": "solarize add"},
    "Desaturate": {"keep": "1 - desaturate", "grey": "desaturate"},
    "GaussianBlur": {"sigma": "blur"},
}
for _name, _other in {"Brightness": {}, "Color": {"grey"}, "Contrast": {"mean"}, "Sharpness": {"smooth"}}.items():
    EFFECTS[_name] = {"keep": "enhance"} | dict.fromkeys(_other, "1 - enhance")
    EFFECTS[f"{_name}Increasing"] = {"keep": "enhance more"} | dict.fromkeys(_other, "1 - enhance more")


def can_batch(augment: str | None) -> bool:
    """Whether this policy is implemented for batches; AutoAugment and AugMix are not."""
    return augment is None or augment.startswith(("3-augment", "3a", "rand"))


class Augment:
    """A recipe's augmentation of uint8 images (B, C, H, W) to float images in [0, 255]."""

    def __init__(self, recipe: "Recipe", mean: Sequence[float], device: torch.device) -> None:
        self.recipe = recipe
        self.policy = _policy(recipe.augment)
        weights = GREY if len(mean) == 3 else (1 / len(mean),) * len(mean)
        self.grey = torch.tensor(weights, device=device)[:, None, None]
        # pixels from outside the image get the mean colour
        self.fill = torch.tensor(mean, device=device)[:, None, None] * 255
        # parameters that no operation of the policy uses are left out; the columns are the same for all batches
        used = {name for op in getattr(self.policy, "ops", ()) for name in EFFECTS[op.name]}
        self.colours = [name for name in COLOUR if name in used]
        self.jitter = recipe.color_jitter if not isinstance(self.policy, RandAugment) else None

    def plan(self, n: int, size: tuple[int, int], draw: torch.Generator) -> Table:
        """Draw the parameters of n images of this size (H, W)."""
        recipe = self.recipe
        flip = torch.rand(n, generator=draw) < recipe.hflip
        table: Table = {}
        matrix = torch.eye(3).repeat(n, 1, 1)
        if recipe.crop_scale:
            matrix = _crops(n, size, recipe.crop_scale, draw)
        if recipe.crop_padding:
            table["shift"] = torch.randint(2 * recipe.crop_padding + 1, (n, 2), generator=draw).float()
        layers: list[Table] = []
        if isinstance(self.policy, RandAugment):
            for chosen, level, sign in _rand_layers(self.policy, n, draw):
                numbers = _numbers([op.name for op in self.policy.ops], chosen, level, sign)
                matrix = matrix @ _matrix(numbers)
                layers.append({name: numbers[name] for name in self.colours})
        elif self.policy == "3-augment":
            layers.append(_three_augment(n, draw))
        if self.jitter:
            layers.append(_jitter(n, self.jitter, draw))
        if recipe.crop_scale or isinstance(self.policy, RandAugment):
            matrix[:, :, 0] *= torch.where(flip, -1.0, 1.0)[:, None]  # flips the output's x
            table["matrix"] = matrix[:, :2]
        else:
            table["flip"] = flip.float()[:, None]
        for i, layer in enumerate(layers):
            table |= {f"{i}.{name}": values[:, None] for name, values in layer.items()}
        return table

    def __call__(self, images: Tensor, table: Table) -> Tensor:
        """Apply the parameters; `images` and `table` are on one device."""
        if "shift" in table:
            images = _shifted(images, table["shift"].long(), self.recipe.crop_padding, table.get("flip"))
        elif "flip" in table:
            images = torch.where(table["flip"][..., None, None] > 0, images.flip(-1), images)
        size = self.recipe.image_size
        x = images.float()
        if "matrix" in table:
            fill = self.fill if isinstance(self.policy, RandAugment) else None
            # if a crop of average size is shrunk, several samples are averaged for each pixel
            area = sum(self.recipe.crop_scale) / 2 if self.recipe.crop_scale else 1
            times = max(1, round(min(x.shape[-2:]) * math.sqrt(area) / size))
            x = _warped(x, table["matrix"], size, self.recipe.interpolation, fill, times)
        layers: dict[str, Table] = {}
        for name, values in table.items():
            index, dot, number = name.partition(".")
            if dot:
                layers.setdefault(index, {})[number] = values[..., None, None]  # (B, 1, 1, 1)
        for layer in layers.values():
            x = _recoloured(x, layer, self.grey)
        return x


class Erase:
    """Random erasing (arXiv 1708.04896) of normalised images: a rectangle becomes noise, as timm's mode "pixel".

    The noise is a random window of one fixed array of normal numbers: drawing millions of new ones on the CPU takes
    longer than the training step, and drawing them on the device would make batches depend on the device.
    """

    def __init__(self, probability: float, channels: int, device: torch.device) -> None:
        self.probability = probability
        noise = torch.randn(channels, NOISE_SIDE, NOISE_SIDE, generator=torch.Generator().manual_seed(0))
        self.board = noise.to(device)

    def plan(self, n: int, size: tuple[int, int], draw: torch.Generator) -> Table:
        """Draw a box (top, bottom, left, right) for each image, empty if nothing is erased, and a noise window."""
        erased = torch.rand(n, generator=draw) < self.probability
        box = _boxes(n, size, ERASED_AREA, ERASED_RATIO, draw, whole=True) * erased[:, None]
        return {"box": box, "noise": torch.randint(NOISE_SIDE, (n, 2), generator=draw).float()}

    def __call__(self, images: Tensor, table: Table) -> Tensor:
        """Erase the boxes."""
        y = torch.arange(images.shape[-2], device=images.device)
        x = torch.arange(images.shape[-1], device=images.device)
        top, bottom, left, right = table["box"].unbind(1)
        rows = (y >= top[:, None]) & (y < bottom[:, None])  # (B, H)
        columns = (x >= left[:, None]) & (x < right[:, None])  # (B, W)
        at = table["noise"].long()
        noise = self.board[:, (y + at[:, :1])[:, :, None] % NOISE_SIDE, (x + at[:, 1:])[:, None, :] % NOISE_SIDE]
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        return torch.where(inside, noise.transpose(0, 1), images)


def _uniform(n: int, low: float, high: float, draw: torch.Generator, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(n, *shape, generator=draw)


def _boxes(
    n: int,
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    draw: torch.Generator,
    whole: bool = False,
) -> Tensor:
    """Draw boxes (top, bottom, left, right) in pixels: the first of TRIES that fits, or the whole image."""
    height, width = size
    areas = _uniform(n, *area, draw, TRIES) * height * width
    ratios = _uniform(n, math.log(ratio[0]), math.log(ratio[1]), draw, TRIES).exp()
    tall, wide = (areas / ratios).sqrt(), (areas * ratios).sqrt()
    if whole:
        tall, wide = tall.round(), wide.round()
    fits = (tall <= height) & (wide <= width)
    first = fits.float().argmax(1, keepdim=True)
    fallback = 0.0 if whole else 1.0
    tall = torch.where(fits.any(1), tall.gather(1, first).flatten(), fallback * height)
    wide = torch.where(fits.any(1), wide.gather(1, first).flatten(), fallback * width)
    place = torch.rand(n, 2, generator=draw)
    slack = 1 if whole else 0  # whole pixels: one more position than remaining pixels
    top, left = place[:, 0] * (height - tall + slack), place[:, 1] * (width - wide + slack)
    if whole:
        top, left = top.floor(), left.floor()
    return torch.stack([top, top + tall, left, left + wide], 1)


def _crops(n: int, size: tuple[int, int], scale: tuple[float, float], draw: torch.Generator) -> Tensor:
    """Draw affine maps (n, 3, 3) from the output to a crop of the input, in coordinates from -1 to 1."""
    height, width = size
    top, bottom, left, right = _boxes(n, size, scale, RATIO, draw).unbind(1)
    matrix = torch.eye(3).repeat(n, 1, 1)
    matrix[:, 0, 0], matrix[:, 0, 2] = (right - left) / width, (left + right) / width - 1
    matrix[:, 1, 1], matrix[:, 1, 2] = (bottom - top) / height, (top + bottom) / height - 1
    return matrix


def _policy(augment: str | None) -> "RandAugment | str | None":
    if augment is None or not can_batch(augment):
        return None
    return rand_augment_transform(augment, {}) if augment.startswith("rand") else "3-augment"


def _rand_layers(policy: RandAugment, n: int, draw: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Draw, for each layer, the operation of each image (one past the last: none), its level (0 to 1) and sign."""
    first = policy.ops[0]
    if policy.choice_weights is None:
        chosen = torch.randint(len(policy.ops), (n, policy.num_layers), generator=draw)
    else:
        weights = torch.tensor(policy.choice_weights).expand(n, -1)
        chosen = torch.multinomial(weights, policy.num_layers, generator=draw)
    layers = []
    for choice in chosen.unbind(1):
        applied = torch.rand(n, generator=draw) < first.prob
        if first.magnitude_std == math.inf:
            level = _uniform(n, 0, first.magnitude, draw)
        else:
            level = first.magnitude + first.magnitude_std * torch.randn(n, generator=draw)
        level = level.clamp(0, first.magnitude_max or 10) / 10
        sign = torch.where(torch.rand(n, generator=draw) < 0.5, -1.0, 1.0)
        layers.append((torch.where(applied, choice, len(policy.ops)), level, sign))
    return layers


def _numbers(operations: Sequence[str], chosen: Tensor, level: Tensor, sign: Tensor) -> Table:
    """The parameters (n,) of one layer, by the names of NEUTRAL; image i gets operation chosen[i]."""
    quantities = _quantities(level, sign)
    places = {name: i for i, name in enumerate(quantities)}
    effects = [NEUTRAL | EFFECTS[operation] for operation in operations] + [NEUTRAL]
    which = torch.tensor([[places[quantity] for quantity in effect.values()] for effect in effects])
    numbers = torch.stack(list(quantities.values()), 1).gather(1, which[chosen])  # (n, len(NEUTRAL))
    return dict(zip(NEUTRAL, numbers.unbind(1), strict=True))


def _quantities(level: Tensor, sign: Tensor) -> Table:
    """timm's tables from a level to the parameters of each operation."""
    angle = sign * level * math.radians(30)
    enhance, more = 0.1 + 1.8 * level, (1 + sign * 0.9 * level).clamp(min=0.1)
    bits, threshold = (level * 4).floor(), (level * 256).floor().clamp(max=256)
    desaturate = (0.5 + 0.5 * level).clamp(max=1)
    return {name: torch.full_like(level, float(name)) for name in CONSTANTS} | {
        "cos": angle.cos(),
        "sin": angle.sin(),
        "-sin": -angle.sin(),
        "shear": sign * level * 0.3,
        "translate": sign * level * 0.9,  # 0.45 of a side of length 2
        "enhance": enhance,
        "1 - enhance": 1 - enhance,
        "enhance more": more,
        "1 - enhance more": 1 - more,
        "posterize": 2 ** (8 - bits),
        "posterize more": 2 ** (4 + bits),
        "solarize": threshold,
        "solarize more": 256 - threshold,
        "solarize add": (level * 110).floor().clamp(max=128),
        "desaturate": desaturate,
        "1 - desaturate": 1 - desaturate,
        "blur": (0.1 + 1.9 * level).clamp(max=2),
    }


def _matrix(numbers: Table) -> Tensor:
    """The affine maps (n, 3, 3) of one layer, about the centre."""
    matrix = torch.eye(3).repeat(len(numbers["xx"]), 1, 1)
    matrix[:, :2] = torch.stack([numbers[name] for name in AFFINE], 1).unflatten(1, (2, 3))
    return matrix


def _three_augment(n: int, draw: torch.Generator) -> Table:
    """3-Augment (DeiT III, arXiv 2204.07118): grey, solarised or blurred."""
    chosen = torch.randint(3, (n,), generator=draw)
    sigma = _uniform(n, 0.1, 2.0, draw)
    return {
        "keep": (chosen != 0).float(),
        "grey": (chosen == 0).float(),
        "threshold": torch.where(chosen == 1, 128.0, 256.0),
        "sigma": torch.where(chosen == 2, sigma, 0.0),
    }


def _jitter(n: int, strength: float, draw: torch.Generator) -> Table:
    """Brightness, contrast and saturation in this order, as one combination of pixel, its grey and the mean grey."""
    bright, contrast, saturation = _uniform(n, max(0.0, 1 - strength), 1 + strength, draw, 3).unbind(1)
    return {
        "keep": bright * contrast * saturation,
        "grey": bright * contrast * (1 - saturation),
        "mean": bright * (1 - contrast),
    }


def _shifted(images: Tensor, shift: Tensor, padding: int, flip: Tensor | None) -> Tensor:
    """Crop zero-padded images at `shift` (B, 2), and flip where `flip` is positive; no interpolation."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device) + shift[:, :1] - padding  # (B, H)
    x = torch.arange(width, device=images.device).expand(len(images), -1)
    if flip is not None:
        x = torch.where(flip > 0, width - 1 - x, x)
    x = x + shift[:, 1:] - padding
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]  # (B, H, W)
    rows, columns = y.clamp(0, height - 1)[:, None, :, None], x.clamp(0, width - 1)[:, None, None, :]
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[batch, channels, rows, columns] * inside[:, None]


def _warped(x: Tensor, matrix: Tensor, size: int, mode: str, fill: Tensor | None, times: int = 1) -> Tensor:
    """Sample images where `matrix` (B, 2, 3) maps the output's pixels, `times` samples per pixel and axis."""
    grid = F.affine_grid(matrix, [len(x), x.shape[1], size * times, size * times], align_corners=False)
    out = F.grid_sample(x, grid, mode, padding_mode="border", align_corners=False)
    if fill is not None:
        out = torch.where((grid.abs() <= 1).all(-1)[:, None], out, fill)
    if times > 1:
        out = F.avg_pool2d(out, times)
    return out.round().clamp(0, 255)


def _recoloured(x: Tensor, table: Table, grey_weights: Tensor) -> Tensor:
    """Apply one layer of colour operations; parameters that are not in the table are neutral."""
    if "equalize" in table:
        x = _apply_to(x, table["equalize"] > 0, _equalized)
    if "contrast" in table:
        low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        stretched = (x - low) * (255 / (high - low).clamp(min=1))
        x = torch.where((table["contrast"] > 0) & (high > low), stretched, x)
    out = x * table["keep"] if "keep" in table else x
    if "grey" in table or "mean" in table:
        grey = (x * grey_weights).sum(1, keepdim=True)
        if "grey" in table:
            out = out + table["grey"] * grey
        if "mean" in table:
            out = out + table["mean"] * grey.mean((2, 3), keepdim=True)
    if "smooth" in table:
        out = out + table["smooth"] * _apply_to(x, table["smooth"] != 0, _smoothed)
    if "offset" in table:
        out = out + table["offset"]
    if "sigma" in table:
        out = _blurred(out, table["sigma"].flatten())
    out = out.round().clamp(0, 255)
    if "step" in table:
        out = (out / table["step"]).floor() * table["step"]
    if "add" in table:
        out = torch.where(out < 128, (out + table["add"]).clamp(max=255), out)
    if "threshold" in table:
        out = torch.where(out >= table["threshold"], 255 - out, out)
    return out


def _apply_to(x: Tensor, chosen: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function of the chosen images; `chosen` (B, 1, 1, 1) says which. The others stay as they are.

    On a CPU the function computes the chosen ones alone, few of a batch; on a GPU, all: to find them would wait for it.
    """
    if not x.is_cpu:
        return torch.where(chosen, function(x), x)
    found = chosen.flatten().nonzero().flatten()
    if not len(found):
        return x
    return x.index_copy(0, found, function(x[found]))


def _smoothed(x: Tensor) -> Tensor:
    """Pillow's filter SMOOTH, used by sharpness: the border stays, the centre has a weight of 5 of 13."""
    if min(x.shape[-2:]) < 3:
        return x
    inner = (9 * F.avg_pool2d(x, 3, 1) + 4 * x[..., 1:-1, 1:-1]) / 13
    out = x.clone()
    out[..., 1:-1, 1:-1] = inner
    return out


def _blurred(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with a sigma for each image; 0 changes nothing."""
    taps = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1, device=x.device)
    kernel = torch.exp(-0.5 * (taps / sigma.clamp(min=1e-3)[:, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(x.shape[1], 0)[:, None]  # (B * C, 1, K)
    flat = x.flatten(0, 1)[None]
    for axis in (-1, -2):
        pad = [BLUR_RADIUS] * 2 + [0, 0] if axis == -1 else [0, 0] + [BLUR_RADIUS] * 2
        weight = kernel[:, :, None] if axis == -1 else kernel[..., None]
        flat = F.conv2d(F.pad(flat, pad, mode="replicate"), weight, groups=flat.shape[1])
    return flat[0].unflatten(0, x.shape[:2])


def _equalized(x: Tensor) -> Tensor:
    """Pillow's histogram equalisation of each channel; by sorting, which is deterministic, unlike atomic counts."""
    pixels = x.flatten(2).round()  # (B, C, H * W), whole numbers
    values = torch.arange(256, device=x.device, dtype=x.dtype).expand(*pixels.shape[:2], -1).contiguous()
    ordered = pixels.sort(-1).values
    below = torch.searchsorted(ordered, values)  # number of pixels darker than each value
    step = torch.searchsorted(ordered, ordered[..., -1:].contiguous()) // 255
    lookup = ((below + step // 2) // step.clamp(min=1)).clamp(max=255).to(x.dtype)
    out = lookup.gather(-1, pixels.long())
    return torch.where(step > 0, out, pixels).view_as(x)
