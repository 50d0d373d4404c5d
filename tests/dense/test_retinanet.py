"""RetinaNet against torchvision's, and by hand where it differs on purpose."""

import math

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.ops import box_iou

from tests.dense.detectors import CLASSES, Levels, create_target, small_detector
from tokamix.dense import RetinaNet
from tokamix.dense.boxes import AnchorGenerator, BoxCoder, Matcher, match_anchors
from tokamix.dense.detector import batch_images

SIZE = (96, 128)


@pytest.fixture(scope="module")
def ours() -> RetinaNet:
    detector = small_detector("retinanet", spread=0.5)
    assert isinstance(detector, RetinaNet)
    return detector


@pytest.fixture(scope="module")
def theirs(ours: RetinaNet) -> nn.Module:
    """torchvision's RetinaNet with the same layers and anchors."""
    return torchvision.models.detection.RetinaNet(
        Levels(ours),
        CLASSES,
        anchor_generator=ours.anchors,
        head=ours.head,
        detections_per_img=100,
        min_size=SIZE[0],
        max_size=SIZE[1],
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
    ).eval()


TARGETS = [
    create_target([[5, 6, 50, 70], [60, 20, 120, 90]], [1, 4], SIZE),
    create_target([[40, 40, 46, 44]], [0], SIZE),
    create_target([[0, 0, 128, 96], [30.5, 10.25, 58.5, 40], [100, 60, 127, 95]], [2, 3, 3], SIZE),
]


@pytest.mark.parametrize("target", TARGETS)
def test_losses_equal_torchvisions(ours: RetinaNet, theirs: nn.Module, target: dict) -> None:
    """For one image, where both divide by its positives; `eval` excludes the backbone's batch statistics."""
    image = torch.randn(3, *SIZE)
    theirs.training = True  # losses, but no batch statistics
    theirs.transform.training = True
    expected = theirs([image], [{k: target[k] for k in ("boxes", "labels")}])
    losses = ours([image], [target])
    torch.testing.assert_close(losses["class"], expected["classification"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses["box"], expected["bbox_regression"], rtol=1e-5, atol=1e-6)


def test_gradients_equal_torchvisions(ours: RetinaNet, theirs: nn.Module) -> None:
    image, target = torch.randn(3, *SIZE), TARGETS[0]
    theirs.training = theirs.transform.training = True
    grads = []
    for losses in (ours([image], [target]), theirs([image], [{k: target[k] for k in ("boxes", "labels")}])):
        grads.append(torch.autograd.grad(sum(losses.values()), list(ours.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_detections_equal_torchvisions(ours: RetinaNet, theirs: nn.Module) -> None:
    theirs.eval()
    ours.score_threshold = theirs.score_thresh = 0.01
    images = [torch.randn(3, *SIZE) for _ in range(3)]
    for detections, expected in zip(ours(images), theirs(images), strict=True):
        assert len(detections["boxes"]) == 100
        assert list(detections) == ["boxes", "labels", "scores"]
        for key, value in detections.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-4)


def test_losses_are_normalised_over_the_batch(ours: RetinaNet) -> None:
    """Sums over the batch divided by its positives, at least one per image; torchvision averages over images."""
    images = [torch.randn(3, *SIZE) for _ in range(3)]
    targets = [TARGETS[0], TARGETS[2], create_target([], [], SIZE)]
    anchors = ours.anchors(batch_images(images[:1], 32), ours.neck(ours.backbone(images[0][None])))[0]
    counts = []
    for target in targets:
        iou = box_iou(target["boxes"], anchors) if len(target["boxes"]) else torch.zeros(1, len(anchors))
        best = (iou == iou.amax(1, keepdim=True)) & (iou > 0)
        counts.append(max(int(((iou >= 0.5).any(0) | best.any(0)).sum()), 1))
    together, alone = ours(images, targets), [ours([i], [s]) for i, s in zip(images, targets, strict=True)]
    for key, loss in together.items():
        expected = sum(n * one[key] for n, one in zip(counts, alone, strict=True)) / sum(counts)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_anchors_by_hand() -> None:
    """Nine per position, of size 4 strides times 2^(0, 1/3, 2/3), not rounded, at the true strides."""
    anchors = AnchorGenerator((8, 64), [4 * 2 ** (i / 3) for i in range(3)])
    maps = [torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16), torch.zeros(1, 1, 13, 1)]  # 800 px are 13 cells of 64
    got = anchors(batch_images(torch.zeros(2, 3, 800, 40), 1), maps)
    assert len(got) == 2
    assert got[0].dtype == torch.float32
    assert got[0].shape == (9 * (6 + 13), 4)
    width, height = 32 * math.sqrt(2), 32 / math.sqrt(2)  # the first is half as high as wide
    torch.testing.assert_close(got[0][0], torch.tensor([-width, -height, width, height]) / 2)
    cube = 32 * 2 ** (1 / 3)
    torch.testing.assert_close(
        got[0][9 * 4 + 4], torch.tensor([8 - cube / 2, 8 - cube / 2, 8 + cube / 2, 8 + cube / 2])
    )
    centres = (got[0][54:, :2] + got[0][54:, 2:]) / 2
    torch.testing.assert_close(centres[::9], torch.tensor([[0.0, 64.0 * i] for i in range(13)]))


def test_matcher_by_hand() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 8], [0, 0, 10, 4.5], [30, 0, 40, 2], [50, 50, 60, 60]])
    gt_boxes = torch.tensor([[0.0, 0, 10, 10], [30, 0, 40, 10], [0, 0, 10, 7]])  # highest IoUs .2 and .875
    rpn, retina, plain = Matcher(0.7, 0.3, 0.3), Matcher(0.5, 0.4, 0.0), Matcher(0.6, 0.6, None)
    # the second box is the best of the last ground truth with an IoU of 7/8; with the first it has 8/10
    assert rpn.match(gt_boxes, boxes).tolist() == [0, 2, -2, -1, -1]
    assert retina.match(gt_boxes, boxes).tolist() == [0, 2, 2, 1, -1]  # 4.5 / 7 with the last; .2 suffices
    assert plain.match(gt_boxes, boxes).tolist() == [0, 2, 2, -1, -1]
    assert plain.match(gt_boxes[:0], boxes).tolist() == [-1] * 5
    assert plain.match(gt_boxes, boxes[:0]).tolist() == []
    apart = torch.tensor([[200.0, 200, 210, 210]])
    assert retina.match(apart, boxes).tolist() == [-1] * 5  # no overlap, no low-quality match


def test_low_quality_matches_take_precedence() -> None:
    gt_boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 6]])
    boxes = torch.tensor([[0.0, 0, 10, 9]])  # IoU .9 with the first ground truth, 2/3 with the second
    assert Matcher(0.5, 0.5, 0.5).match(gt_boxes, boxes).tolist() == [1]
    assert Matcher(0.5, 0.5, None).match(gt_boxes, boxes).tolist() == [0]
    assert Matcher(0.5, 0.5, 0.7).match(gt_boxes, boxes).tolist() == [0]


def test_anchors_in_batch_padding_are_ignored() -> None:
    anchors = torch.tensor([[-8.0, -8, 8, 8], [22, -8, 38, 8], [24, 24, 40, 40], [60, 60, 68, 68], [56, -4, 64, 4]])
    targets = [create_target([[0, 0, 9, 9]], [0], (20, 33)), create_target([], [], (96, 96))]
    got = match_anchors(Matcher(0.5, 0.4, None), anchors, targets, [(20, 33), (96, 96)], 32)
    # alone, the first image is padded to 32 x 64
    assert got.tolist() == [[-1, -1, -2, -2, -1], [-1] * 5]


def test_box_coder_limits_growth_and_shrinkage() -> None:
    coder = BoxCoder(0.1, 0.2)
    boxes = torch.tensor([[10.0, 20, 30, 60]])
    codes = torch.tensor([[1.0, -1, 5 * math.log(2), 0]])
    torch.testing.assert_close(coder.decode_single(codes, boxes), torch.tensor([[2.0, 16, 42, 56]]))
    far = coder.decode_single(torch.tensor([[0.0, 0, 99, -99]]), boxes)[0]
    torch.testing.assert_close(far[2:] - far[:2], torch.tensor([20 * 62.5, 40 / 62.5]), rtol=1e-4, atol=1e-4)
    gt_boxes = torch.tensor([[3.0, 4, 100, 7]])
    torch.testing.assert_close(coder.decode_single(coder.encode_single(gt_boxes, boxes), boxes), gt_boxes)
    half = coder.decode_single(codes.half(), boxes + 3000)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, torch.tensor([[3002.0, 3016, 3042, 3056]]), rtol=0, atol=0.02)


def test_focal_loss_by_hand(ours: RetinaNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With constant outputs every term is known."""
    logit, code = 0.3, 0.25

    def head(maps: list[Tensor]) -> dict[str, Tensor]:
        n = sum(9 * m.shape[-1] * m.shape[-2] for m in maps)
        return {"cls_logits": torch.full((1, n, CLASSES), logit), "bbox_regression": torch.full((1, n, 4), code)}

    monkeypatch.setattr(ours.head, "forward", head)
    images, target = torch.zeros(1, 3, 32, 32), create_target([[0, 0, 32, 32]], [2], (32, 32))
    features = ours.neck(ours.backbone(images))
    anchors = ours.anchors(batch_images(images, 32), features)[0]
    iou = box_iou(target["boxes"], anchors)[0]
    positive = iou >= 0.5
    negative = int((iou < 0.4).sum())
    p = 1 / (1 + math.exp(-logit))
    hit, miss = 0.25 * (1 - p) ** 2 * -math.log(p), 0.75 * p**2 * -math.log(1 - p)
    n = int(positive.sum())
    assert n > 0
    losses = ours(images, [target])
    expected = (n * hit + (n * (CLASSES - 1) + negative * CLASSES) * miss) / n
    assert losses["class"].item() == pytest.approx(expected, rel=1e-5)
    gt_codes = BoxCoder().encode_single(target["boxes"].expand(n, 4), anchors[positive])
    assert losses["box"].item() == pytest.approx((gt_codes - code).abs().sum().item() / n, rel=1e-5)


def test_initialisation(ours: RetinaNet) -> None:
    fresh = small_detector("retinanet")
    prior = fresh.head.classification_head.cls_logits
    torch.testing.assert_close(prior.bias.sigmoid(), torch.full_like(prior.bias, 0.01))
    for name, p in fresh.head.named_parameters():
        if name.endswith("weight"):
            assert p.std().item() == pytest.approx(0.01, rel=0.1), name
    assert ours.neck.strides == (8, 16, 32, 64, 128)
