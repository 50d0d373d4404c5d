"""Augmentation of whole batches against Pillow's and timm's of single images."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageFilter
from timm.data import rand_augment_transform
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP
from torch import Tensor

from tests.data.conftest import recipe
from tokamix.data.images import augment as module
from tokamix.data.images.augment import Augment, Erase, can_batch
from tokamix.data.rng import generator

CPU = torch.device("cpu")
MEAN = (0.5, 0.5, 0.5)
GREY = torch.tensor(module.GREY)[:, None, None]


def noise_images(count: int = 6, side: int = 32, smooth: bool = True) -> Tensor:
    """Images with soft edges, unlike noise: interpolation of noise would compare kernels, not places."""
    draw = torch.Generator().manual_seed(0)
    small = torch.rand(count, 3, 6, 6, generator=draw)
    images = F.interpolate(small, side, mode="bicubic") if smooth else torch.rand(count, 3, side, side, generator=draw)
    return (images.clamp(0, 1) * 255).round().byte()


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).byte().numpy())


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


def numbers(name: str, n: int, level: float, sign: float) -> dict[str, Tensor]:
    """Of one layer in which every image gets the same operation."""
    return module._numbers([name], torch.zeros(n, dtype=torch.int64), torch.full((n,), level), torch.full((n,), sign))


def recoloured(images: Tensor, table: dict[str, Tensor]) -> Tensor:
    return module._recoloured(images.float(), {k: v[:, None, None, None] for k, v in table.items()}, GREY)


def colour(name: str, images: Tensor, level: float, sign: float) -> Tensor:
    found = numbers(name, len(images), level, sign)
    touched = recoloured(images, {colour: found[colour] for colour in module.COLOUR if colour in module.EFFECTS[name]})
    every = recoloured(images, {colour: found[colour] for colour in module.COLOUR})
    assert ((touched - every).abs() <= 1).all()  # numbers that change nothing, but for rounding
    return touched


COLOURS = [
    *("AutoContrast", "Equalize", "Invert", "SolarizeAdd", "Desaturate", "GaussianBlur"),
    *("Posterize", "PosterizeIncreasing", "Solarize", "SolarizeIncreasing"),
    *(name + suffix for name in ("Color", "Contrast", "Brightness", "Sharpness") for suffix in ("", "Increasing")),
]


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize(("level", "sign"), [(0.9, 1.0), (0.9, -1.0), (0.35, 1.0), (0.0, 1.0), (1.0, -1.0)])
def test_colours_are_pillows(name: str, level: float, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    images = noise_images()
    monkeypatch.setattr(random, "random", lambda: 0.9 if sign < 0 else 0.1)  # what timm asks for the sign
    arguments = LEVEL_TO_ARG[name](level * 10, {}) if LEVEL_TO_ARG[name] else ()
    if name.startswith("Posterize") and arguments == (0,):  # Pillow 13 refuses to keep no bits at all
        assert (colour(name, images, level, sign) == 0).all()
        return
    expected = torch.stack([from_pil(NAME_TO_OP[name](to_pil(image), *arguments)) for image in images])
    difference = (colour(name, images, level, sign) - expected).abs()
    if name == "GaussianBlur":  # Pillow's is made of boxes
        assert difference.mean() < 1.5
        assert difference.max() < 12
    else:
        assert difference.max() <= (2 if name in ("AutoContrast", "Desaturate") or "Co" in name else 1)
        assert difference.mean() < 0.75


def test_every_operation_of_timm_has_an_effect() -> None:
    for policy in ("rand-m9", "rand-m9-inc1", "rand-m9-tweights", "rand-m9-t3a", "rand-m9-t3aw"):
        assert all(op.name in module.EFFECTS for op in rand_augment_transform(policy, {}).ops)
    nothing = module._numbers(["Invert"], torch.tensor([1]), torch.ones(1), torch.ones(1))
    assert {name: float(values) for name, values in nothing.items()} == {k: float(v) for k, v in module.NEUTRAL.items()}


def test_images_without_contrast_stay_as_they_are() -> None:
    flat = torch.full((2, 3, 8, 8), 77, dtype=torch.uint8)
    for name in ("AutoContrast", "Equalize"):
        assert torch.equal(colour(name, flat, 0.9, 1.0), flat.float())
    assert torch.equal(colour("Sharpness", flat[..., :2, :2], 0.9, 1.0), flat[..., :2, :2].float())


def geometry(name: str, images: Tensor, level: float, sign: float, fill: Tensor | None = None) -> Tensor:
    matrix = module._matrix(numbers(name, len(images), level, sign))[:, :2]
    return module._warped(images.float(), matrix, images.shape[-1], "bilinear", fill)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rotation_is_pillows(sign: float) -> None:
    images = noise_images(3)
    expected = torch.stack([from_pil(to_pil(i).rotate(27 * sign, Image.Resampling.BILINEAR)) for i in images])
    found = geometry("Rotate", images, 0.9, sign)
    inner = (..., slice(6, -6), slice(6, -6))  # further out Pillow shows black
    assert (found[inner] - expected[inner]).abs().max() <= 2


def test_shifts_and_shears() -> None:
    images = noise_images(3, side=20)
    fill = torch.tensor([10.0, 20.0, 30.0])[:, None, None]
    level = 4 / 20 / 0.45  # four pixels
    right = geometry("TranslateXRel", images, level, 1.0, fill)
    assert torch.equal(right[..., :16], images[..., 4:].float())
    assert torch.equal(right[..., 16:], fill.expand(3, -1, 20, 4))
    down = geometry("TranslateYRel", images, level, -1.0, fill)
    assert torch.equal(down[..., 4:, :], images[..., :16, :].float())
    line = torch.zeros(1, 3, 21, 21, dtype=torch.uint8)
    line[..., 10] = 255  # a vertical line through the centre leans over it
    sheared = geometry("ShearX", line, 1.0, 1.0)
    assert sheared[0, 0, 10, 10] == 255
    assert sheared[0, 0, 0].argmax() == 13
    assert sheared[0, 0, 20].argmax() == 7
    assert geometry("ShearY", line.transpose(2, 3), 1.0, 1.0)[0, 0, :, 0].argmax() == 13


@pytest.mark.parametrize(
    "policy", ["rand-m9-mstd0.5-inc1", "rand-m7-n3-mstd101", "rand-m15-mmax30-p1.0", "rand-m9-tweights"]
)
def test_rand_augment_draws_what_timm_draws(policy: str) -> None:
    timm = rand_augment_transform(policy, {})
    layers = module._rand_layers(timm, 20_000, generator(0))
    assert len(layers) == timm.num_layers
    first = timm.ops[0]
    for chosen, level, sign in layers[:1]:
        counts = {op.name: (chosen == i).float().mean().item() / first.prob for i, op in enumerate(timm.ops)}
        assert (chosen == len(timm.ops)).float().mean().item() == pytest.approx(1 - first.prob, abs=0.02)
        expected = timm.choice_weights if timm.choice_weights is not None else [1 / len(timm.ops)] * len(timm.ops)
        assert counts == pytest.approx({op.name: p for op, p in zip(timm.ops, expected, strict=True)}, abs=0.015)
        assert abs(sign.mean()) < 0.03
        top = (first.magnitude_max or 10) / 10
        assert level.min() >= 0
        assert level.max() <= top
        middle = first.magnitude / (20 if first.magnitude_std == math.inf else 10)
        assert level.mean() == pytest.approx(min(middle, top), abs=0.02)
        assert level.std() > 0.03 or first.magnitude_std == 0
    if timm.choice_weights is not None:  # timm draws these without replacement
        first_choice, second = (chosen for chosen, *_ in layers)
        assert not ((first_choice == second) & (second < len(timm.ops))).any()


def test_crops_are_torchvisions() -> None:
    """Areas and ratios have the distribution of torchvision's random crops, and lie inside."""
    from torchvision.transforms import RandomResizedCrop

    size = (60, 80)
    torch.manual_seed(0)
    theirs = torch.tensor(
        [RandomResizedCrop.get_params(torch.empty(3, *size), [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    )
    box = module._boxes(8000, size, (0.2, 1.0), module.RATIO, generator(0))
    top, bottom, left, right = box.unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (bottom <= 60.001).all()
    assert (right <= 80.001).all()
    ours = torch.stack([top, left, bottom - top, right - left], 1)
    torch.testing.assert_close(ours.mean(0), theirs.float().mean(0), rtol=0.03, atol=0.6)
    torch.testing.assert_close(ours.std(0), theirs.float().std(0), rtol=0.05, atol=0.6)


def test_a_crop_shows_its_box() -> None:
    images = noise_images(1, side=40)
    matrix = torch.tensor([[[20 / 40, 0, (10 + 30) / 40 - 1], [0, 20 / 40, (5 + 25) / 40 - 1]]])
    found = module._warped(images.float(), matrix, 20, "bicubic", None)
    assert torch.equal(found, images[..., 5:25, 10:30].float())


def test_a_shrinking_image_is_averaged() -> None:
    """A fine chequerboard becomes grey, not black or white."""
    board = (torch.arange(64)[:, None] + torch.arange(64)) % 2 * 255
    images = board.expand(1, 3, -1, -1).float()
    found = module._warped(images, torch.eye(3)[None, :2], 16, "bilinear", None, 4)
    assert (found - 127.5).abs().max() <= 1
    shrunk = run({"crop_scale": (0.9, 1.0), "hflip": 0.0}, images.byte(), size=16)
    assert shrunk.std() < 40
    assert (shrunk.mean() - 127.5).abs() < 5


def run(values: dict, images: Tensor, seed: int = 0, size: int = 0) -> Tensor:
    augment = Augment(recipe(image_size=size or images.shape[-1], **values), MEAN, CPU)
    return augment(images, augment.plan(len(images), tuple(images.shape[-2:]), generator(seed)))


def test_padding_and_flips_only_move_pixels() -> None:
    images = noise_images(64, side=12)
    found = run({"crop_scale": None, "crop_padding": 3, "hflip": 0.25}, images)
    padded = F.pad(images, [3] * 4)
    places = set()
    for image, out in zip(padded, found, strict=True):
        windows = {
            (y, x, flip): torch.equal(out, (w.flip(-1) if flip else w).float())
            for y in range(7)
            for x in range(7)
            for flip in (False, True)
            for w in [image[:, y : y + 12, x : x + 12]]
        }
        assert sum(windows.values()) == 1
        places.add(next(place for place, same in windows.items() if same))
    assert len(places) > 40
    assert 0.1 < sum(flip for *_, flip in places) / len(places) < 0.4
    assert torch.equal(run({"crop_scale": None, "hflip": 1.0}, images), images.flip(-1).float())
    assert torch.equal(run({"crop_scale": None, "hflip": 0.0}, images), images.float())


def test_colour_jitter_is_torchvisions_in_its_order() -> None:
    images = noise_images(4)
    table = module._jitter(4, 0.4, generator(0))
    found = recoloured(images, table)
    factors = (0.6 + 0.8 * torch.rand(4, 3, generator=generator(0))).tolist()
    for image, out, (bright, contrast, saturation) in zip(images, found, factors, strict=True):
        x = image.float() * bright  # without rounding in between
        x = x * contrast + (1 - contrast) * (x * GREY).sum(0).mean()
        x = x * saturation + (1 - saturation) * (x * GREY).sum(0)
        assert (x.round().clamp(0, 255) - out).abs().max() <= 1
    strong = [ImageEnhance.Brightness(to_pil(images[0])).enhance(f) for f in (0.6, 1.4)]
    assert from_pil(strong[0]).mean() < found[0].mean() < from_pil(strong[1]).mean() * 1.4


def test_three_augment() -> None:
    images = noise_images(300)
    found = run({"crop_scale": None, "hflip": 0.0, "augment": "3-augment"}, images)
    kinds = {"grey": 0, "solarised": 0, "blurred": 0}
    for image, out in zip(images.float(), found, strict=True):
        if (out == out[:1]).all():
            kinds["grey"] += 1
            assert (out[0] - (image * GREY).sum(0)).abs().max() <= 1
        elif torch.equal(out, torch.where(image >= 128, 255 - image, image)):
            kinds["solarised"] += 1
        else:
            kinds["blurred"] += 1
            assert (out - image).abs().mean() < 25
            assert out.std() <= image.std() + 1
    assert all(70 < count < 130 for count in kinds.values())


def test_blur_has_the_given_width() -> None:
    dot = torch.zeros(3, 1, 21, 21)
    dot[..., 10, 10] = 1000.0
    sigma = torch.tensor([0.0, 0.7, 2.0])
    found = module._blurred(dot, sigma)
    torch.testing.assert_close(found[0], dot[0])
    places = torch.arange(21) - 10.0
    for blurred, width in zip(found[1:], sigma[1:], strict=True):
        torch.testing.assert_close(blurred.sum(), torch.tensor(1000.0))
        row = blurred[0].sum(0) / 1000
        assert (row * places**2).sum().sqrt() == pytest.approx(width.item(), rel=0.03)
    pillow = np.asarray(Image.fromarray(dot[0, 0].byte().numpy()).filter(ImageFilter.GaussianBlur(2.0)))
    assert pillow.shape == (21, 21)


def test_erasing() -> None:
    images = torch.zeros(2000, 3, 24, 32)
    erase = Erase(0.25, 3, CPU)
    plan = erase.plan(2000, (24, 32), generator(0))
    found = erase(images, plan)
    erased = found != 0
    share = erased.any(1).float().mean((1, 2))
    assert (share > 0).float().mean() == pytest.approx(0.25, abs=0.03)
    hit = share[share > 0]
    assert hit.min() >= 0.01
    assert hit.max() <= 0.36
    assert hit.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    values = found[erased]
    assert abs(values.mean()) < 0.05
    assert values.std() == pytest.approx(1, abs=0.05)
    for i in share.nonzero().flatten()[:20].tolist():
        box = erased[i].any(0).nonzero()
        height, width = (box.amax(0) - box.amin(0) + 1).tolist()
        assert len(box) == height * width
    windows = found[share > 0]
    assert not torch.equal(windows[0], windows[1])
    often = erased.any(1).float().mean(0)  # every place is reached, the edges too
    assert (often[0].sum() > 0) & (often[-1].sum() > 0) & (often[:, 0].sum() > 0) & (often[:, -1].sum() > 0)


def test_whole_policies() -> None:
    images = noise_images(64, side=16)
    for values in (
        {"augment": "rand-m9-mstd0.5-inc1", "crop_scale": (0.2, 1.0)},
        {"augment": "rand-m9-n3-t3aw", "crop_scale": None, "crop_padding": 2},
        {"augment": "rand-m5", "crop_scale": None},
        {"augment": "3-augment", "color_jitter": 0.3},
        {"color_jitter": 0.4, "interpolation": "nearest"},
    ):
        found = run(values, images)
        assert found.shape == images.shape
        assert found.dtype == torch.float32
        assert (found.min() >= 0) & (found.max() <= 255)
        assert torch.equal(found, run(values, images))
        assert not torch.equal(found, run(values, images, seed=1))
        assert 0.3 < (found.std() / images.float().std()) < 2


def test_grey_and_many_channels() -> None:
    for channels in (1, 5):
        images = noise_images(8)[:, :1].expand(-1, channels, -1, -1)
        augment = Augment(recipe(image_size=32, augment="rand-m9-inc1-p1.0"), (0.5,) * channels, CPU)
        found = augment(images, augment.plan(8, (32, 32), generator(0)))
        assert found.shape == images.shape
        assert found.isfinite().all()


def test_which_policies_exist_for_batches() -> None:
    assert all(can_batch(name) for name in (None, "3-augment", "3a", "rand-m9-mstd0.5-inc1"))
    assert not any(can_batch(name) for name in ("original", "v0", "augmix-m5"))


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5", "rand-m7-mstd0.5-inc1"])
def test_operations_of_few_images_equal_those_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """On a CPU equalisation and smoothing see only the images that need them; on a GPU all, with the same pixels."""
    images = noise_images(64, 20, smooth=False)
    augment = Augment(recipe(augment=policy, image_size=20), MEAN, CPU)
    table = augment.plan(len(images), (20, 20), generator(0, 0, 0, "test"))
    chosen = [table[f"{i}.equalize"].flatten() > 0 for i in range(2)]
    assert 0 < sum(which.sum() for which in chosen) < len(images) / 2  # the case is not empty
    seen: list[int] = []
    equalized = module._equalized
    monkeypatch.setattr(module, "_equalized", lambda x: seen.append(len(x)) or equalized(x))
    few = augment(images, table)
    assert seen == [int(which.sum()) for which in chosen if which.any()]
    monkeypatch.setattr(module, "_apply_to", lambda x, chosen, function: torch.where(chosen, function(x), x))
    assert torch.equal(few, augment(images, table))
    assert len(seen) > 2 or seen[-1] == len(images)
