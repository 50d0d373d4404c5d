"""What every detector must cope with, and that it learns."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_iou

from tests.dense.detectors import CLASSES, small, target
from tests.models.test_atmnet import TINY
from tokamix.data.shapes import Shapes
from tokamix.dense import Detector, create_backbone, create_detector
from tokamix.models.atmnet import ATMNet

STEPS = {"retinanet": 80, "mask_rcnn": 40, "cascade_mask_rcnn": 40}
METHODS = ("retinanet", "mask_rcnn", "cascade_mask_rcnn")
BODIES = ("resnet10t", "norms", "xcit_nano_12_p16_sima")  # plain levels, a norm on each, and a column
SIZE = (64, 96)
SCENE = target([[5, 6, 40, 50], [50, 20, 90, 60]], [1, 4], SIZE)


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def detector(method: str) -> Detector:
    """In evaluation mode; with outputs that find something."""
    detector = fewer(small(method, spread=0.3))
    detector.least_score = 0.001
    return detector


def fewer(detector: Detector) -> Detector:
    """With few regions, for the test's speed."""
    if detector.has_masks:
        detector.rpn._post_nms_top_n = {"training": 80, "testing": 30}
        for stage in detector.stages:
            stage.sampler.batch_size_per_image = 32
    return detector


def lost(detector: Detector, images: Tensor | list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, float]:
    """The losses, which must be finite and whose gradients must be finite and reach every parameter."""
    detector.zero_grad()
    losses = detector(images, targets)
    sum(losses.values()).backward()
    for name, p in ((name, p) for name, p in detector.named_parameters() if p.requires_grad):
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    values = {name: loss.item() for name, loss in losses.items()}
    assert all(math.isfinite(value) for value in values.values()), values
    return values


def check(found: dict[str, Tensor], size: tuple[int, int], masks: bool) -> None:
    n = len(found["boxes"])
    assert found["boxes"].shape == (n, 4)
    assert found["labels"].shape == found["scores"].shape == (n,)
    left, top, right, bottom = found["boxes"].unbind(1)
    assert ((left >= 0) & (top >= 0) & (right > left) & (bottom > top)).all()
    assert ((right <= size[1]) & (bottom <= size[0])).all()
    assert ((found["labels"] >= 0) & (found["labels"] < CLASSES)).all()
    assert (found["scores"].diff() <= 0).all()
    assert ("masks" in found) == masks
    if masks:
        assert found["masks"].shape == (n, *size)
        assert found["masks"].dtype == torch.bool


@torch.no_grad()
def test_boxes_lie_in_their_image(detector: Detector) -> None:
    sizes = [(64, 96), (33, 47), (100, 20)]
    found = detector([torch.randn(3, *size) for size in sizes])
    for one, size in zip(found, sizes, strict=True):
        assert 0 < len(one["boxes"]) <= 100
        check(one, size, detector.has_masks)


@pytest.mark.parametrize("body", BODIES)
def test_gradients_reach_everything(method: str, body: str) -> None:
    """In training mode, with batch statistics, images of several sizes and one without objects."""
    fresh = fewer(small(method, body=ATMNet(**TINY) if body == "norms" else body)).train()
    images = [torch.randn(3, 64, 96), torch.randn(3, 50, 70)]
    values = lost(fresh, images, [SCENE, target([], [], (50, 70))])
    assert all(value > 0 for value in values.values())


def test_levels_that_nobody_looks_at_have_no_layers() -> None:
    """RetinaNet starts at stride 8; the backbone it was made of can still serve another detector."""
    backbone = create_backbone("xcit_nano_12_p16_sima")
    retina = create_detector("retinanet", backbone, 2, width=8)
    assert [sum(p.numel() for p in level.parameters()) > 0 for level in backbone.levels.levels] == [1, 1, 0, 0]
    assert [sum(p.numel() for p in level.parameters()) > 0 for level in retina.backbone.levels.levels] == [0, 1, 0, 0]
    assert retina.backbone.body is backbone.body
    assert create_detector("mask_rcnn", backbone, 2, width=8).backbone is backbone


def test_training_in_bfloat16(method: str) -> None:
    fresh = fewer(small(method)).train()
    with torch.autocast("cpu", torch.bfloat16):
        values = lost(fresh, torch.randn(2, 3, *SIZE), [SCENE, target([], [], SIZE)])
    assert all(value > 0 for value in values.values())


@pytest.mark.parametrize("regions", [0, -3])
def test_regions(method: str, regions: int) -> None:
    if method == "retinanet":
        with pytest.raises(ValueError, match=f"no regions to train on {regions} of"):
            small(method, regions=regions)
        return
    with pytest.raises(
        ValueError, match=f"{method} learns from at least one region of an image, got regions={regions}"
    ):
        small(method, regions=regions)
    stages = small(method, regions=7).stages
    scene = target([[5, 6, 40, 50]], [1], SIZE)
    assert [len(stage.sample([torch.rand(50, 4).sort(1)[0] * 60], [scene]).labels) for stage in stages] == [7] * len(
        stages
    )


def test_no_objects_at_all(detector: Detector) -> None:
    values = lost(detector, torch.randn(2, 3, *SIZE), [target([], [], SIZE)] * 2)
    assert all(value == 0 for name, value in values.items() if "box" in name or "mask" in name)
    assert values.get("class", values.get("class_1", 0)) > 0


def test_an_object_of_one_pixel(detector: Detector) -> None:
    values = lost(detector, torch.randn(1, 3, *SIZE), [target([[30, 30, 31, 31]], [0], SIZE)])
    assert all(value > 0 for name, value in values.items() if name in ("box", "box_1", "mask", "mask_1"))


def test_boxes_outside_and_degenerate(detector: Detector) -> None:
    """They are cut at the border, or left out: the losses are those of what is left."""
    image = torch.randn(1, 3, *SIZE)
    clean = target([[50, 20, 96, 64]], [4], SIZE)
    dirty = target([[50, 20, 300, 400], [-50, -50, -2, -3], [10, 10, 10, 30], [20, 20, 10, 10]], [4, 0, 1, 2], SIZE)
    dirty["masks"][0] = clean["masks"][0]
    losses = []
    for scene in (clean, dirty):
        torch.manual_seed(1)
        losses.append(lost(detector, image, [scene]))
    assert losses[0] == losses[1]
    crowded = {key: torch.cat([value, value]) for key, value in clean.items()}
    crowded["boxes"][1] = torch.tensor([5.0, 5, 30, 30])
    crowded["crowd"] = torch.tensor([False, True])
    torch.manual_seed(1)
    assert lost(detector, image, [crowded]) == losses[0]


def test_empty_masks(detector: Detector) -> None:
    scene = {**SCENE, "masks": torch.zeros_like(SCENE["masks"])}
    lost(detector, torch.randn(1, 3, *SIZE), [scene])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_image_does_not_cost_the_others(detector: Detector, bad: float) -> None:
    images = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        expected = detector(images[1:])[0]
        images[0] = bad
        nothing, found = detector(images)
    assert not len(nothing["boxes"])
    torch.testing.assert_close(found["scores"], expected["scores"])


def test_a_line_of_4000_pixels(detector: Detector) -> None:
    size = (1, 4000)
    lost(detector, torch.randn(1, 3, *size), [target([[100, 0, 900, 1]], [1], size)])
    with torch.no_grad():
        check(detector(torch.randn(1, 3, *size))[0], size, detector.has_masks)


def test_the_same_seed_gives_the_same(detector: Detector) -> None:
    image = torch.randn(2, 3, *SIZE)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append({name: loss.item() for name, loss in detector(image, [SCENE] * 2).items()})
    assert runs[0] == runs[1]
    assert detector.method == "retinanet" or runs[0] != runs[2]  # the others draw samples
    with torch.no_grad():
        first, second = detector(image), detector(image)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_bfloat16(detector: Detector) -> None:
    """Under autocast losses stay near those of float32, and boxes are float32."""
    image = torch.randn(1, 3, *SIZE)
    torch.manual_seed(0)
    plain = detector(image, [SCENE])
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        low = detector(image, [SCENE])
        found = detector(image)[0]
    for name, loss in low.items():
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(plain[name].item(), rel=0.3, abs=0.05), name
    sum(low.values()).backward()
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    check(found, SIZE, detector.has_masks)


@torch.no_grad()
def test_weights_of_bfloat16(detector: Detector) -> None:
    low = copy.deepcopy(detector).bfloat16()
    found = low(torch.randn(2, 3, *SIZE).bfloat16())
    assert found[0]["boxes"].dtype == torch.float32
    check(found[0], SIZE, detector.has_masks)


@torch.no_grad()
def test_padding_changes_nothing_it_should_not(detector: Detector) -> None:
    """An image finds the same alone and in a batch of the same size; a tensor and a list are the same batch."""
    images = torch.randn(2, 3, 40, 50)
    together, alone = detector(images), [detector([image])[0] for image in images]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a["boxes"], b["boxes"], rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(a["scores"], b["scores"], rtol=1e-4, atol=1e-5)


def test_training_state_is_the_callers(detector: Detector) -> None:
    """Targets decide between losses and detections, not the mode: validation has losses too."""
    assert not detector.training
    assert isinstance(detector(torch.randn(1, 3, *SIZE), [SCENE]), dict)
    detector.train()
    with torch.no_grad():
        assert isinstance(detector(torch.randn(2, 3, *SIZE)), list)
    detector.eval()


def test_contract(detector: Detector, method: str) -> None:
    assert detector.method == method
    assert detector.num_classes == CLASSES
    assert detector.no_weight_decay() <= {name for name, _ in detector.named_parameters()}
    sima = create_detector(method, "xcit_tiny_12_p16_sima", 2, width=32)
    assert sima.no_weight_decay() == {f"backbone.{name}" for name in sima.backbone.no_weight_decay()}
    sima.set_grad_checkpointing()
    assert any(getattr(part, "grad_checkpointing", False) for part in sima.backbone.modules())


def test_errors_are_sentences(detector: Detector) -> None:
    image = torch.randn(1, 3, *SIZE)
    with pytest.raises(ValueError, match=r"needs images \(B, 3, H, W\) or a list of \(3, h, w\), got no image"):
        detector([])
    with pytest.raises(ValueError, match=r"got \[\(1, 3, 64, 96\)\]"):
        detector([image])
    with pytest.raises(ValueError, match="1 images came with 2 targets"):
        detector(image, [SCENE, SCENE])
    with pytest.raises(ValueError, match="1 images came with 2 sizes"):
        detector(image, sizes=[SIZE, SIZE])
    with pytest.raises(ValueError, match=r"labels run from 1 to 5 where 0 to 4 are possible"):
        detector(image, [{**SCENE, "labels": torch.tensor([1, 5])}])
    with pytest.raises(ValueError, match="2 boxes and 1 labels"):
        detector(image, [{**SCENE, "labels": torch.tensor([1])}])
    if detector.has_masks:
        with pytest.raises(ValueError, match="learns masks and got a target without them; use method='retinanet'"):
            detector(image, [{key: SCENE[key] for key in ("boxes", "labels")}])
        with pytest.raises(
            ValueError, match=r"2 boxes in an image of \(64, 96\) need masks \(2, 64, 96\), got \(2, 32,"
        ):
            detector(image, [{**SCENE, "masks": SCENE["masks"][:, ::2]}])
    with pytest.raises(ValueError, match="at least one class, got 0; background is not counted"):
        create_detector(detector.method, "resnet10t", 0)


def test_learns_two_scenes_by_heart(method: str) -> None:
    """The loss falls several-fold, the large things are found where they are, and as what they are."""
    torch.manual_seed(0)
    shapes = Shapes(8, side=96)
    scenes = [shapes.sample(i) for i in (0, 1)]
    images = torch.stack([scene.image for scene in scenes]).float() / 127.5 - 1
    targets = [{"boxes": s.boxes, "labels": s.labels, "masks": s.masks} for s in scenes]
    detector = fewer(create_detector(method, "test_convnext", 8, width=32)).train()
    optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    totals = []
    for _ in range(STEPS[method]):
        loss = sum(detector(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 10)
        optimizer.step()
        warm_up.step()
        totals.append(loss.item())
    assert sum(totals[-5:]) / 5 < totals[0] / 3, totals
    detector.eval()
    with torch.no_grad():
        found = detector(images)
    for one, scene in zip(found, scenes, strict=True):
        large = scene.masks.flatten(1).sum(1).argmax()
        overlap = box_iou(scene.boxes[large : large + 1], one["boxes"])[0]
        right = one["labels"] == scene.labels[large]
        assert (overlap[right & (one["scores"] > 0.25)] > 0.5).any(), (overlap, one["labels"], one["scores"])
        if detector.has_masks:
            best = (overlap * right).argmax()
            shared = (one["masks"][best] & scene.masks[large]).sum() / (one["masks"][best] | scene.masks[large]).sum()
            assert shared > 0.5
