"""All detectors: losses, gradients and detections on ordinary and degenerate inputs, and overfitting."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_iou

from tests.dense.detectors import CLASSES, create_target, small_detector
from tests.models.test_atmnet import TINY
from tokamix.data.shapes import Shapes
from tokamix.dense import Detector, create_backbone, create_detector
from tokamix.dense.create import DETECTORS
from tokamix.models.atmnet import ATMNet
from tokamix.tasks import METHODS

STEPS = {"retinanet": 80, "mask_rcnn": 40, "cascade_mask_rcnn": 40}
BACKBONES = ("resnet10t", "norms", "xcit_nano_12_p16_sima")  # plain levels, level norms, a columnar model
SIZE = (64, 96)
TARGET = create_target([[5, 6, 40, 50], [50, 20, 90, 60]], [1, 4], SIZE)


@pytest.fixture(scope="module", params=METHODS["detect"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def detector(method: str) -> Detector:
    """In evaluation mode, with heads whose untrained outputs give detections."""
    detector = with_few_rois(small_detector(method, spread=0.3))
    detector.score_threshold = 0.001
    return detector


def with_few_rois(detector: Detector) -> Detector:
    """The detector with few proposals and RoIs, for speed."""
    if detector.has_masks:
        detector.rpn._post_nms_top_n = {"training": 80, "testing": 30}
        for stage in detector.stages:
            stage.sampler.batch_size_per_image = 32
    return detector


def check_losses(
    detector: Detector, images: Tensor | list[Tensor], targets: list[dict[str, Tensor]]
) -> dict[str, float]:
    """Return the losses; assert that they and the gradients of all parameters are finite."""
    detector.zero_grad()
    losses = detector(images, targets)
    sum(losses.values()).backward()
    for name, p in ((name, p) for name, p in detector.named_parameters() if p.requires_grad):
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    values = {name: loss.item() for name, loss in losses.items()}
    assert all(math.isfinite(value) for value in values.values()), values
    return values


def check_detections(detections: dict[str, Tensor], size: tuple[int, int], masks: bool) -> None:
    n = len(detections["boxes"])
    assert detections["boxes"].shape == (n, 4)
    assert detections["labels"].shape == detections["scores"].shape == (n,)
    left, top, right, bottom = detections["boxes"].unbind(1)
    assert ((left >= 0) & (top >= 0) & (right > left) & (bottom > top)).all()
    assert ((right <= size[1]) & (bottom <= size[0])).all()
    assert ((detections["labels"] >= 0) & (detections["labels"] < CLASSES)).all()
    assert (detections["scores"].diff() <= 0).all()
    assert ("masks" in detections) == masks
    if masks:
        assert detections["masks"].shape == (n, *size)
        assert detections["masks"].dtype == torch.bool


@torch.no_grad()
def test_boxes_lie_in_their_image(detector: Detector) -> None:
    sizes = [(64, 96), (33, 47), (100, 20)]
    detections = detector([torch.randn(3, *size) for size in sizes])
    for one, size in zip(detections, sizes, strict=True):
        assert 0 < len(one["boxes"]) <= 100
        check_detections(one, size, detector.has_masks)


@pytest.mark.parametrize("body", BACKBONES)
def test_gradients_reach_all_parameters(method: str, body: str) -> None:
    """In training mode, with batch statistics, images of several sizes and one without objects."""
    fresh = with_few_rois(small_detector(method, body=ATMNet(**TINY) if body == "norms" else body)).train()
    images = [torch.randn(3, 64, 96), torch.randn(3, 50, 70)]
    values = check_losses(fresh, images, [TARGET, create_target([], [], (50, 70))])
    assert all(value > 0 for value in values.values())


def test_unused_levels_have_no_layers() -> None:
    """RetinaNet starts at stride 8; its backbone can still be used for another detector."""
    backbone = create_backbone("xcit_nano_12_p16_sima")
    retina = create_detector("retinanet", backbone, 2, width=8)
    assert [sum(p.numel() for p in level.parameters()) > 0 for level in backbone.levels.levels] == [1, 1, 0, 0]
    assert [sum(p.numel() for p in level.parameters()) > 0 for level in retina.backbone.levels.levels] == [0, 1, 0, 0]
    assert retina.backbone.body is backbone.body
    assert create_detector("mask_rcnn", backbone, 2, width=8).backbone is backbone


def test_training_in_bfloat16(method: str) -> None:
    fresh = with_few_rois(small_detector(method)).train()
    with torch.autocast("cpu", torch.bfloat16):
        values = check_losses(fresh, torch.randn(2, 3, *SIZE), [TARGET, create_target([], [], SIZE)])
    assert all(value > 0 for value in values.values())


@pytest.mark.parametrize("count", [0, -3])
def test_rois_per_image(method: str, count: int) -> None:
    if method == "retinanet":
        with pytest.raises(ValueError, match=f"RetinaNet has no RoIs, got rois_per_image={count}"):
            small_detector(method, rois_per_image=count)
        return
    with pytest.raises(ValueError, match=f"{method} needs rois_per_image of at least 1, got {count}"):
        small_detector(method, rois_per_image=count)
    stages = small_detector(method, rois_per_image=7).stages
    target = create_target([[5, 6, 40, 50]], [1], SIZE)
    proposals = [torch.rand(50, 4).sort(1)[0] * 60]
    assert [len(stage.sample_rois(proposals, [target]).labels) for stage in stages] == [7] * len(stages)


def test_no_objects_at_all(detector: Detector) -> None:
    values = check_losses(detector, torch.randn(2, 3, *SIZE), [create_target([], [], SIZE)] * 2)
    assert all(value == 0 for name, value in values.items() if "box" in name or "mask" in name)
    assert values.get("class", values.get("class_1", 0)) > 0


def test_an_object_of_one_pixel(detector: Detector) -> None:
    values = check_losses(detector, torch.randn(1, 3, *SIZE), [create_target([[30, 30, 31, 31]], [0], SIZE)])
    assert all(value > 0 for name, value in values.items() if name in ("box", "box_1", "mask", "mask_1"))


def test_boxes_outside_and_degenerate(detector: Detector) -> None:
    """They are clipped or removed: the losses equal those of the remaining boxes."""
    image = torch.randn(1, 3, *SIZE)
    clean = create_target([[50, 20, 96, 64]], [4], SIZE)
    dirty = create_target(
        [[50, 20, 300, 400], [-50, -50, -2, -3], [10, 10, 10, 30], [20, 20, 10, 10]], [4, 0, 1, 2], SIZE
    )
    dirty["masks"][0] = clean["masks"][0]
    losses = []
    for target in (clean, dirty):
        torch.manual_seed(1)
        losses.append(check_losses(detector, image, [target]))
    assert losses[0] == losses[1]
    crowded = {key: torch.cat([value, value]) for key, value in clean.items()}
    crowded["boxes"][1] = torch.tensor([5.0, 5, 30, 30])
    crowded["crowd"] = torch.tensor([False, True])
    torch.manual_seed(1)
    assert check_losses(detector, image, [crowded]) == losses[0]


def test_empty_masks(detector: Detector) -> None:
    target = {**TARGET, "masks": torch.zeros_like(TARGET["masks"])}
    check_losses(detector, torch.randn(1, 3, *SIZE), [target])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_image_does_not_affect_the_others(detector: Detector, bad: float) -> None:
    images = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        expected = detector(images[1:])[0]
        images[0] = bad
        of_bad_image, detections = detector(images)
    assert not len(of_bad_image["boxes"])
    torch.testing.assert_close(detections["scores"], expected["scores"])


def test_an_image_of_1x4000_pixels(detector: Detector) -> None:
    size = (1, 4000)
    check_losses(detector, torch.randn(1, 3, *size), [create_target([[100, 0, 900, 1]], [1], size)])
    with torch.no_grad():
        check_detections(detector(torch.randn(1, 3, *size))[0], size, detector.has_masks)


def test_the_same_seed_gives_the_same_losses(detector: Detector) -> None:
    image = torch.randn(2, 3, *SIZE)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append({name: loss.item() for name, loss in detector(image, [TARGET] * 2).items()})
    assert runs[0] == runs[1]
    assert detector.method == "retinanet" or runs[0] != runs[2]  # the others sample randomly
    with torch.no_grad():
        first, second = detector(image), detector(image)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_bfloat16(detector: Detector) -> None:
    """Under autocast, losses are close to those of float32, and boxes are float32."""
    image = torch.randn(1, 3, *SIZE)
    torch.manual_seed(0)
    plain = detector(image, [TARGET])
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        low = detector(image, [TARGET])
        detections = detector(image)[0]
    for name, loss in low.items():
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(plain[name].item(), rel=0.3, abs=0.05), name
    sum(low.values()).backward()
    assert detections["boxes"].dtype == detections["scores"].dtype == torch.float32
    check_detections(detections, SIZE, detector.has_masks)


@torch.no_grad()
def test_weights_of_bfloat16(detector: Detector) -> None:
    low = copy.deepcopy(detector).bfloat16()
    detections = low(torch.randn(2, 3, *SIZE).bfloat16())
    assert detections[0]["boxes"].dtype == torch.float32
    check_detections(detections[0], SIZE, detector.has_masks)


@torch.no_grad()
def test_detections_do_not_depend_on_the_batch(detector: Detector) -> None:
    """An image gives the same detections alone and in a batch of the same size, as a tensor or a list."""
    images = torch.randn(2, 3, 40, 50)
    together, alone = detector(images), [detector([image])[0] for image in images]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a["boxes"], b["boxes"], rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(a["scores"], b["scores"], rtol=1e-4, atol=1e-5)


def test_targets_select_losses_in_either_mode(detector: Detector) -> None:
    """Targets, not the mode, select between losses and detections: validation has losses too."""
    assert not detector.training
    assert isinstance(detector(torch.randn(1, 3, *SIZE), [TARGET]), dict)
    detector.train()
    with torch.no_grad():
        assert isinstance(detector(torch.randn(2, 3, *SIZE)), list)
    detector.eval()


def test_contract(detector: Detector, method: str) -> None:
    assert tuple(DETECTORS) == METHODS["detect"]
    assert detector.method == method
    assert detector.num_classes == CLASSES
    assert detector.no_weight_decay() <= {name for name, _ in detector.named_parameters()}
    sima = create_detector(method, "xcit_tiny_12_p16_sima", 2, width=32)
    assert sima.no_weight_decay() == {f"backbone.{name}" for name in sima.backbone.no_weight_decay()}
    sima.set_grad_checkpointing()
    assert any(getattr(part, "grad_checkpointing", False) for part in sima.backbone.modules())


def test_errors(detector: Detector) -> None:
    image = torch.randn(1, 3, *SIZE)
    with pytest.raises(ValueError, match=r"needs images \(B, 3, H, W\) or a list of \(3, h, w\), got no image"):
        detector([])
    with pytest.raises(TypeError, match=r"a detector needs normalised images as a torch.Tensor, got ndarray"):
        detector(image.numpy())
    with pytest.raises(ValueError, match=r"got \[\(1, 3, 64, 96\)\]"):
        detector([image])
    with pytest.raises(ValueError, match="got 1 images and 2 targets"):
        detector(image, [TARGET, TARGET])
    with pytest.raises(ValueError, match="got 1 images and 2 sizes"):
        detector(image, sizes=[SIZE, SIZE])
    with pytest.raises(ValueError, match=r"labels must be 0 to 4, got labels from 1 to 5"):
        detector(image, [{**TARGET, "labels": torch.tensor([1, 5])}])
    with pytest.raises(ValueError, match="2 boxes and 1 labels"):
        detector(image, [{**TARGET, "labels": torch.tensor([1])}])
    if detector.has_masks:
        with pytest.raises(ValueError, match="needs masks, but a target has none; add them or use method='retinanet'"):
            detector(image, [{key: TARGET[key] for key in ("boxes", "labels")}])
        with pytest.raises(
            ValueError, match=r"2 boxes in an image of \(64, 96\) need masks \(2, 64, 96\), got \(2, 32,"
        ):
            detector(image, [{**TARGET, "masks": TARGET["masks"][:, ::2]}])
    with pytest.raises(ValueError, match="at least one class, got 0; background is not counted"):
        create_detector(detector.method, "resnet10t", 0)


def test_overfits_two_images(method: str) -> None:
    """The loss falls to a third, and the largest object of each image is detected with its class, box and mask."""
    torch.manual_seed(0)
    side, width = (96, 32) if method == "retinanet" else (64, 16)  # RetinaNet starts at stride 8
    shapes = Shapes(8, side=side)
    samples = [shapes.sample(i) for i in (0, 1)]
    images = torch.stack([sample.image for sample in samples]).float() / 127.5 - 1
    targets = [{"boxes": s.boxes, "labels": s.labels, "masks": s.masks} for s in samples]
    detector = with_few_rois(create_detector(method, "test_convnext", 8, width=width)).train()
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
        all_detections = detector(images)
    for detections, sample in zip(all_detections, samples, strict=True):
        largest = sample.masks.flatten(1).sum(1).argmax()
        iou = box_iou(sample.boxes[largest : largest + 1], detections["boxes"])[0]
        correct = detections["labels"] == sample.labels[largest]
        assert (iou[correct & (detections["scores"] > 0.25)] > 0.5).any(), (iou, detections)
        if detector.has_masks:
            mask, gt_mask = detections["masks"][(iou * correct).argmax()], sample.masks[largest]
            assert (mask & gt_mask).sum() / (mask | gt_mask).sum() > 0.5
