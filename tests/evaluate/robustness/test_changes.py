"""Occlusion, patch drop and corruptions: what they do to pixels."""

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tokamix.evaluate.robustness import CORRUPTIONS, corrupt, drop_patches, occlude_centre
from tokamix.evaluate.robustness.corruptions import PARAMETERS, Draw, elastic_transform, gaussian_blur

FILL = torch.tensor([0.1, 0.2, 0.3])[:, None, None]


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Smooth coloured waves of 48 px, in 8 bits."""
    line = torch.linspace(0, 6, 48)
    waves = torch.stack([torch.sin(line[:, None] * k + line * (3 - k) + k) for k in (1, 2, 3)])
    pixels = torch.stack([0.5 + 0.4 * waves, 0.5 + 0.4 * waves.roll(9, 2)])
    return (pixels * 255).round() / 255


@pytest.mark.parametrize("percent", [0, 15, 50, 75, 100])
def test_centre_occlusion(percent: int) -> None:
    images = torch.rand(2, 3, 40, 60) + 1
    hidden = (occlude_centre(images, percent, FILL) == FILL).all(1)
    assert hidden.float().mean().item() == pytest.approx(percent / 100, abs=0.02)
    if 0 < percent < 100:
        for places, side in zip(hidden[0].nonzero().T, (40, 60), strict=True):
            assert abs(int(places.min()) - (side - 1 - int(places.max()))) <= 1, "it is centred"
    assert torch.equal(
        occlude_centre(images, percent, FILL).where(~hidden[:, None], 0), images.where(~hidden[:, None], 0)
    )


def test_patch_drop() -> None:
    images = torch.rand(2, 3, 56, 56) + 1
    seen = torch.zeros(2, 56, 56, dtype=torch.bool)
    for percent in (0, 25, 50, 100):
        hidden = (drop_patches(images, percent, FILL, [5, 6]) == FILL).all(1)
        assert hidden.float().mean().item() == pytest.approx(percent / 100, abs=1e-6)
        assert (hidden >= seen).all(), "patches that are hidden stay hidden"
        seen = hidden
        blocks = hidden.view(2, 14, 4, 14, 4).float().mean((2, 4))
        assert ((blocks == 0) | (blocks == 1)).all(), "whole patches of 1/14 of the side"
        if percent == 50:
            assert not torch.equal(hidden[0], hidden[1]), "each image has its own"
            alone = (drop_patches(images[1:], percent, FILL, [6]) == FILL).all(1)
            assert torch.equal(alone[0], hidden[1]), "whatever the batch"


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruptions(kind: str, images: Tensor) -> None:
    """They change the image, more at severity 5 than at 1, and neither shape, range nor other images of the batch."""
    mild, severe = (corrupt(images, kind, severity, [3, 4]) for severity in (1, 5))
    for changed in (mild, severe):
        assert changed.shape == images.shape
        assert 0 <= changed.min() <= changed.max() <= 1
        torch.testing.assert_close(changed * 255, (changed * 255).round())
        assert (changed - images).abs().amax((1, 2, 3)).min() > 0.02
    if kind != "elastic_transform":  # its first severities are long waves, the last ones short
        assert (severe - images).abs().mean() > (mild - images).abs().mean()
    torch.testing.assert_close(corrupt(images[1:], kind, 5, [4]), severe[1:], rtol=0, atol=1.01 / 255)
    assert corrupt(images[:, :1], kind, 3, [0, 1]).shape == (2, 1, 48, 48)


def test_noise_has_the_published_strength() -> None:
    grey = torch.full((1, 3, 128, 128), 0.5)
    for severity in (1, 3):
        noise = corrupt(grey, "gaussian_noise", severity, [0]) - grey
        assert noise.std().item() == pytest.approx(PARAMETERS["gaussian_noise"][severity - 1], rel=0.03)
        photons = PARAMETERS["shot_noise"][severity - 1]
        noise = corrupt(grey, "shot_noise", severity, [0]) - grey
        assert noise.std().item() == pytest.approx((0.5 / photons) ** 0.5, rel=0.06)
        changed = corrupt(grey, "impulse_noise", severity, [0])
        extreme = ((changed == 0) | (changed == 1)).float().mean().item()
        assert extreme == pytest.approx(PARAMETERS["impulse_noise"][severity - 1], rel=0.06)


def test_against_other_implementations(images: Tensor) -> None:
    """Brightness against colorsys, JPEG against Pillow, contrast against its formula, blur against scipy."""
    ndimage = pytest.importorskip("scipy.ndimage")
    pixel = images[0, :, 20, 30].tolist()
    hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
    expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))
    assert corrupt(images, "brightness", 3, [0, 1])[0, :, 20, 30].tolist() == pytest.approx(expected, abs=0.51 / 255)
    file = io.BytesIO()
    Image.fromarray((images[1] * 255).byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=15)
    decoded = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
    torch.testing.assert_close(corrupt(images, "jpeg_compression", 3, [0, 1])[1] * 255, decoded.float())
    mean = images.mean((2, 3), keepdim=True)
    torch.testing.assert_close(
        corrupt(images, "contrast", 2, [0, 1]), 0.3 * images + 0.7 * mean, rtol=0, atol=0.51 / 255
    )
    for sigma in (0.7, 3.0, 90.0):
        expected = ndimage.gaussian_filter(images[0, 0].double().numpy(), sigma, mode="reflect", truncate=4)
        np.testing.assert_allclose(gaussian_blur(images.double(), sigma)[0, 0].numpy(), expected, atol=1e-5)


def test_elastic_transform_without_distortion_is_the_image(images: Tensor) -> None:
    draw = Draw([torch.Generator().manual_seed(0) for _ in images], images.device)
    torch.testing.assert_close(elastic_transform(images, (0, 1, 0), draw), images, rtol=0, atol=1e-4)


def test_wrong_arguments(images: Tensor) -> None:
    with pytest.raises(ValueError, match="there is no corruption 'rain'; choose from gaussian_noise, shot_noise"):
        corrupt(images, "rain", 1, [0, 1])
    with pytest.raises(ValueError, match="severity is 6, but must be one of 1, 2, 3, 4, 5"):
        corrupt(images, "fog", 6, [0, 1])
    with pytest.raises(ValueError, match="corruptions are for images of 1 or 3 channels, not 2; leave them out"):
        corrupt(images[:, :2], "fog", 1, [0, 1])
