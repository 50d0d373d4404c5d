"""What happens to samples: everything in them goes together."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from tests.data.annotated.files import dense_config, dense_recipe
from tokamix.data import AnnotatedImage, create_dataset
from tokamix.data.annotated import transforms as module
from tokamix.data.annotated.transforms import crop, distort_colors, fit_size, flip, random_crop, resize, resize_for_eval


def make(height: int = 40, width: int = 60, *boxes: tuple[int, int, int, int]) -> AnnotatedImage:
    """Filled boxes; the red channel is 20 n in box n (from 1), and classes of pixels are n."""
    masks = torch.zeros(len(boxes), height, width, dtype=torch.bool)
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    for n, (left, top, right, bottom) in enumerate(boxes):
        masks[n, top:bottom, left:right] = True
        image[0, top:bottom, left:right] = 20 * (n + 1)
    return AnnotatedImage(
        image=image,
        boxes=torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        labels=torch.arange(len(boxes)),
        masks=masks,
        crowd=torch.zeros(len(boxes), dtype=torch.bool),
        segmentation=image[0] // 20,
        image_id=3,
        name="made up",
    )


def box_of(mask: torch.Tensor) -> list[int]:
    rows, columns = mask.any(1).nonzero().flatten().tolist(), mask.any(0).nonzero().flatten().tolist()
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def assert_aligned(sample: AnnotatedImage) -> None:
    assert sample.image.dtype == sample.segmentation.dtype == torch.uint8
    assert sample.masks.dtype == sample.crowd.dtype == torch.bool
    assert sample.boxes.dtype == torch.float32
    assert type(sample.image) is type(sample.boxes) is type(sample.masks) is type(sample.segmentation) is torch.Tensor
    assert sample.masks.shape == (len(sample.labels), *sample.size)
    assert sample.segmentation.shape == sample.size
    assert len(sample.boxes) == len(sample.labels) == len(sample.crowd)
    for box, mask in zip(sample.boxes, sample.masks, strict=True):
        torch.testing.assert_close(torch.tensor(box_of(mask)).float(), box, rtol=0, atol=0.5)


@pytest.mark.parametrize(
    ("size", "scale", "expected"),
    [
        ((480, 640), (1333, 800), (800, 1067)),
        ((640, 480), (1333, 800), (1067, 800)),
        ((427, 640), (1333, 800), (800, 1199)),
        ((300, 1000), (1333, 800), (400, 1333)),  # the long side decides
        ((512, 683), (2048, 512), (512, 683)),
        ((1, 4000), (1333, 800), (1, 1333)),  # nothing gets lost altogether
        ((10, 10), None, (10, 10)),
    ],
)
def test_proportions_are_kept(size: tuple, scale: tuple | None, expected: tuple) -> None:
    assert fit_size(size, scale) == expected


@pytest.mark.parametrize("size", [(80, 120), (20, 30), (53, 77), (40, 120), (1, 1)])
def test_resize(size: tuple[int, int]) -> None:
    sample = make(40, 60, (4, 8, 28, 32), (40, 4, 60, 40))
    moved = resize(sample, size)
    assert moved.size == size
    ratio = torch.tensor([size[1] / 60, size[0] / 40] * 2)
    torch.testing.assert_close(moved.boxes, sample.boxes * ratio)
    if size != (1, 1):
        assert_aligned(moved)
        inside = (moved.image[0] - 20 * moved.segmentation.float()).abs() < 10
        assert inside.float().mean() > 0.85  # the image is smooth at edges, the classes are not
    assert resize(sample, (40, 60)) is sample


def test_masks_do_not_drift() -> None:
    """Enlarged and shrunk again by whole factors, masks are what they were."""
    sample = make(40, 60, (4, 8, 28, 32), (3, 3, 4, 4))
    for factor in (2, 3, 5):
        large = resize(sample, (40 * factor, 60 * factor))
        assert torch.equal(large.masks.sum((1, 2)), factor**2 * sample.masks.sum((1, 2)))
        assert torch.equal(resize(large, (40, 60)).masks, sample.masks)
    odd = resize(sample, (120, 180)).masks.flip(-1)
    assert torch.equal(odd, resize(flip(sample), (120, 180)).masks)  # no side is favoured


@pytest.mark.parametrize(("before", "after"), [((5, 1), (7, 1)), ((2, 2), (7, 1)), ((7, 9), (1, 1)), ((9, 4), (1, 7))])
@pytest.mark.parametrize("order", ["contiguous", "as decoded"])
def test_images_of_one_column(before: tuple[int, int], after: tuple[int, int], order: str) -> None:
    sample = make(*before)
    image = torch.randint(256, (3, *before), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = to_pil_image(image).resize(after[::-1], Image.Resampling.BILINEAR)
    sample.image = image if order == "contiguous" else image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert (resize(sample, after).image.int() - pil_to_tensor(expected)).abs().max() <= 1


def test_flip() -> None:
    sample = make(40, 60, (4, 8, 28, 32), (40, 4, 60, 40))
    moved = flip(sample)
    assert_aligned(moved)
    assert moved.boxes.tolist() == [[32, 8, 56, 32], [0, 4, 20, 40]]
    assert torch.equal(moved.image, sample.image.flip(-1))
    assert torch.equal(flip(moved).masks, sample.masks)


def test_crop() -> None:
    sample = make(40, 60, (4, 8, 28, 32), (40, 4, 60, 40), (0, 0, 5, 5))
    sample.crowd[0] = True
    moved = crop(sample, 10, 20, 20, 30)
    assert_aligned(moved)
    assert moved.size == (20, 30)
    assert moved.labels.tolist() == [0, 1]  # the third has vanished, mask and all
    assert moved.crowd.tolist() == [True, False]
    assert moved.boxes.tolist() == [[0, 0, 8, 20], [20, 0, 30, 20]]
    assert torch.equal(moved.image, sample.image[:, 10:30, 20:50])
    nothing = crop(sample, 36, 30, 4, 10)
    assert nothing.boxes.shape == (0, 4)
    assert nothing.masks.shape == (0, 4, 10)
    assert crop(sample, 0, 0, 40, 60) is sample


def test_crop_by_masks() -> None:
    """A box of which only an empty corner is left is gone, too; a mask that was empty before says nothing."""
    sample = make(40, 60, (10, 10, 30, 30), (10, 10, 30, 30))
    sample.masks[0, :, 20:] = False  # the right half of the box has nothing
    sample.masks[1] = False
    assert crop(sample, 0, 22, 40, 20).labels.tolist() == [1]
    assert crop(replace(sample, masks=None), 0, 22, 40, 20).labels.tolist() == [0, 1]


def test_one_class_does_not_fill_a_crop() -> None:
    sample = replace(make(40, 400, (380, 0, 400, 40)), masks=None)
    mixed = []
    for cat_max in (1.0, 0.75):
        for seed in range(200):
            part = random_crop(sample, 30, cat_max, np.random.default_rng(seed))
            assert part.size == (30, 30)
            counts = part.segmentation.flatten().long().bincount(minlength=2)
            mixed.append(bool(counts.max() < 0.75 * 900))
    without_limit, with_limit = sum(mixed[:200]) / 200, sum(mixed[200:]) / 200
    assert 0.005 < without_limit < 0.1
    # a crop is drawn up to ten times
    assert abs(with_limit - (1 - (1 - 0.04) ** 10)) < 0.12
    assert random_crop(sample, 100, 0.75, np.random.default_rng(0)).size == (40, 100)  # never larger than the image


@pytest.mark.parametrize(("ones", "good"), [(1, True), (9, False)])
def test_ignored_pixels_fill_nothing(ones: int, good: bool) -> None:
    """Only what is labelled counts: where that is half and half, the first crop will do, however much is ignored."""
    sample = make(30, 30)
    sample.image = torch.arange(900).view(1, 30, 30).expand(3, -1, -1).byte()
    sample.segmentation[:] = 255
    sample.segmentation[14, 10:20] = 2
    sample.segmentation[14, 10 : 10 + ones] = 1
    sample.segmentation[14, 11 if good else 20 : 19 if good else 20] = 255
    first, drawn = (
        [random_crop(sample, 20, most, np.random.default_rng(seed)) for seed in range(8)] for most in (1.0, 0.75)
    )
    assert all(torch.equal(a.image, b.image) for a, b in zip(first, drawn, strict=True)) == good


class Chosen:
    """A generator whose numbers are known."""

    def __init__(self, uniform: list[float], integers: list[int]) -> None:
        self.uniforms, self.integer = list(uniform), list(integers)

    def uniform(self, low: float, high: float) -> float:
        value = self.uniforms.pop(0)
        assert low <= value <= high
        return value

    def integers(self, end: int) -> int:
        return self.integer.pop(0)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("on", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)])
def test_colours(on: tuple[int, ...], late: int) -> None:
    """Against formulas, colour by colour; hue and saturation are rounded to 8 bits on the way."""
    image = torch.randint(256, (3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    shift, contrast, saturation, turn = 20.0, 1.3, 0.6, 0.07
    changed = distort_colors(image, Chosen([shift, contrast, saturation, turn], [*on, late]))
    pixels = image.double().flatten(1).t() + shift * on[0]
    pixels = pixels.clamp(0, 255) * (contrast ** on[1] if not late else 1)
    expected = []
    for colour in (pixels.clamp(0, 255) / 255).tolist():
        h, s, v = colorsys.rgb_to_hsv(*colour)
        expected.append(colorsys.hsv_to_rgb((h + turn * on[3]) % 1, min(1, s * saturation ** on[2]), v))
    expected = (torch.tensor(expected).t().view(3, 6, 7) * 255 * (contrast ** on[1] if late else 1)).clamp(0, 255)
    tolerance = 8 if on[2] or on[3] else 0.51  # a step of hue is up to 6 of colour
    assert (changed - expected).abs().max() <= tolerance
    assert (changed - expected).abs().mean() < 2
    assert changed.dtype == torch.uint8
    assert torch.equal(changed, image) == (not any(on))


def test_training_of_segmenters() -> None:
    recipe = dense_recipe(
        "segment", scale=(120, 40), scale_range=(0.5, 2.0), crop_size=32, cat_max=0.75, photometric=True
    )
    sample = make(40, 60, (4, 8, 28, 32), (40, 4, 60, 40))
    sizes = set()
    for seed in range(60):
        moved = module.augment_segment(sample, recipe, np.random.default_rng(seed))
        assert moved.segmentation.shape == moved.size
        assert max(moved.size) <= 32
        sizes.add(moved.size)
    assert (32, 32) in sizes  # of the enlarged
    assert min(sizes)[0] < 24  # of the shrunk
    assert sample.image.max() == 40  # nothing was changed in place


def test_training_of_detectors() -> None:
    sample = make(40, 60, (4, 8, 28, 32), (40, 4, 60, 40), (0, 0, 60, 40))
    sample.crowd[2] = True
    recipe = dense_recipe("detect", scale=(130, 80), scales=(20, 40, 60))
    sizes, left = set(), set()
    for seed in range(40):
        moved = module.augment_detect(sample, recipe, np.random.default_rng(seed))
        assert moved.labels.tolist() == [0, 1]  # the crowd is nothing to learn
        assert_aligned(moved)
        sizes.add(moved.size)
        left.add(moved.boxes[0, 0].item() * 40 / moved.size[0])
    assert sizes == {(20, 30), (40, 60), (60, 90)}
    assert left == {4.0, 32.0}
    assert module.augment_detect(sample, dense_recipe("detect", hflip=0.0), np.random.default_rng(0)).size == (40, 60)


def test_crop_then_scale() -> None:
    """Half of the time a part of 384 to 600 px a side is cropped from the image at a short side of 400, 500 or 600."""
    sample = make(480, 640, (0, 0, 640, 480), (600, 440, 640, 480))
    sample = replace(sample, masks=None, segmentation=None)
    recipe = dense_recipe("detect", scale=(1333, 800), scales=(480, 512), crop_then_scale=True)
    ratios, dropped = [], 0
    for seed in range(60):
        moved = module.augment_detect(sample, recipe, np.random.default_rng(seed))
        assert min(moved.size) in (480, 512)
        torch.testing.assert_close(moved.boxes[0], torch.tensor([0.0, 0, moved.size[1], moved.size[0]]))
        ratios.append(moved.size[1] / moved.size[0])
        dropped += len(moved.labels) == 1
    plain = sum(abs(ratio - 4 / 3) < 0.01 for ratio in ratios)
    assert 18 <= plain <= 42
    assert min(ratios) < 1.2
    assert max(ratios) < 600 / 384 + 0.01
    assert dropped > 5


def test_evaluation() -> None:
    sample = make(40, 60, (4, 8, 28, 32))
    moved = resize_for_eval(sample, dense_config("segment", scale=(400, 80)))
    assert moved.size == (80, 120)
    assert moved.segmentation is sample.segmentation  # measured at the original size
    assert moved.boxes.tolist() == [[8, 16, 56, 64]]
    assert resize_for_eval(sample, dense_config("segment")).size == (40, 60)


def test_a_line_of_pixels() -> None:
    sample = make(1, 4000, (10, 0, 3000, 1))
    for task, train in (("segment", module.augment_segment), ("detect", module.augment_detect)):
        recipe = dense_recipe(task, scale=(1333, 800))
        moved = train(sample, recipe, np.random.default_rng(0))
        assert moved.size == ((1, 32) if task == "segment" else (1, 1333))
        assert resize_for_eval(sample, dense_config(task, scale=(1333, 800))).size == (1, 1333)


def test_generated_images_stay_aligned() -> None:
    data = create_dataset("shapes", "detect").train
    recipe = dense_recipe("detect", scale=(200, 200), scales=(128, 160, 200))
    for i in range(20):
        assert_aligned(module.augment_detect(data.sample(i), recipe, np.random.default_rng(i)))
