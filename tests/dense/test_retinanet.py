"""RetinaNet against torchvision's, and by hand where it differs on purpose."""

import math

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.ops import box_iou

from tests.dense.detectors import CLASSES, Levels, small, target
from tokamix.dense import RetinaNet
from tokamix.dense._detector import Anchors, Assigner, Coder, assign_anchors, collect

SIZE = (96, 128)


@pytest.fixture(scope="module")
def ours() -> RetinaNet:
    detector = small("retinanet", spread=0.5)
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


SCENES = [
    target([[5, 6, 50, 70], [60, 20, 120, 90]], [1, 4], SIZE),
    target([[40, 40, 46, 44]], [0], SIZE),
    target([[0, 0, 128, 96], [30.5, 10.25, 58.5, 40], [100, 60, 127, 95]], [2, 3, 3], SIZE),
]


@pytest.mark.parametrize("scene", SCENES)
def test_losses_are_torchvisions(ours: RetinaNet, theirs: nn.Module, scene: dict) -> None:
    """For one image, where both divide by its positives; `eval` keeps the backbone's batch statistics out."""
    image = torch.randn(3, *SIZE)
    theirs.training = True  # losses, but no batch statistics
    theirs.transform.training = True
    expected = theirs([image], [{k: scene[k] for k in ("boxes", "labels")}])
    losses = ours([image], [scene])
    torch.testing.assert_close(losses["class"], expected["classification"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses["box"], expected["bbox_regression"], rtol=1e-5, atol=1e-6)


def test_gradients_are_torchvisions(ours: RetinaNet, theirs: nn.Module) -> None:
    image, scene = torch.randn(3, *SIZE), SCENES[0]
    theirs.training = theirs.transform.training = True
    grads = []
    for losses in (ours([image], [scene]), theirs([image], [{k: scene[k] for k in ("boxes", "labels")}])):
        grads.append(torch.autograd.grad(sum(losses.values()), list(ours.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_detections_are_torchvisions(ours: RetinaNet, theirs: nn.Module) -> None:
    theirs.eval()
    ours.least_score = theirs.score_thresh = 0.01
    images = [torch.randn(3, *SIZE) for _ in range(3)]
    for found, expected in zip(ours(images), theirs(images), strict=True):
        assert len(found["boxes"]) == 100
        assert list(found) == ["boxes", "labels", "scores"]
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-4)


def test_two_images_share_one_normaliser(ours: RetinaNet) -> None:
    """Sums over the batch by its positives, each image counted as having one at least; torchvision averages images."""
    images = [torch.randn(3, *SIZE) for _ in range(3)]
    scenes = [SCENES[0], SCENES[2], target([], [], SIZE)]
    anchors = ours.anchors(collect(images[:1], 32), ours.neck(ours.backbone(images[0][None])))[0]
    counts = []
    for scene in scenes:
        overlap = box_iou(scene["boxes"], anchors) if len(scene["boxes"]) else torch.zeros(1, len(anchors))
        best = (overlap == overlap.amax(1, keepdim=True)) & (overlap > 0)
        counts.append(max(int(((overlap >= 0.5).any(0) | best.any(0)).sum()), 1))
    together, alone = ours(images, scenes), [ours([i], [s]) for i, s in zip(images, scenes, strict=True)]
    for key, loss in together.items():
        expected = sum(n * one[key] for n, one in zip(counts, alone, strict=True)) / sum(counts)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_anchors_by_hand() -> None:
    """Nine to a place, 4 strides large times 2^(0, 1/3, 2/3), not rounded, at true strides."""
    anchors = Anchors((8, 64), [4 * 2 ** (i / 3) for i in range(3)])
    maps = [torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16), torch.zeros(1, 1, 13, 1)]  # 800 px are 13 cells of 64
    got = anchors(collect(torch.zeros(2, 3, 800, 40), 1), maps)
    assert len(got) == 2
    assert got[0].dtype == torch.float32
    assert got[0].shape == (9 * (6 + 13), 4)
    width, height = 32 * math.sqrt(2), 32 / math.sqrt(2)  # the first has half as much height as width
    torch.testing.assert_close(got[0][0], torch.tensor([-width, -height, width, height]) / 2)
    cube = 32 * 2 ** (1 / 3)
    torch.testing.assert_close(
        got[0][9 * 4 + 4], torch.tensor([8 - cube / 2, 8 - cube / 2, 8 + cube / 2, 8 + cube / 2])
    )
    centres = (got[0][54:, :2] + got[0][54:, 2:]) / 2
    torch.testing.assert_close(centres[::9], torch.tensor([[0.0, 64.0 * i] for i in range(13)]))


def test_assignment_by_hand() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 8], [0, 0, 10, 4.5], [30, 0, 40, 2], [50, 50, 60, 60]])
    truths = torch.tensor([[0.0, 0, 10, 10], [30, 0, 40, 10], [0, 0, 10, 7]])  # overlaps .2 and .875 at best
    rpn, retina, plain = Assigner(0.7, 0.3, 0.3), Assigner(0.5, 0.4, 0.0), Assigner(0.6, 0.6, None)
    # the second box is the last truth's best and overlaps it by 7/8, the first truth by 8/10
    assert rpn.assign(truths, boxes).tolist() == [0, 2, -2, -1, -1]
    assert retina.assign(truths, boxes).tolist() == [0, 2, 2, 1, -1]  # 4.5 / 7 of the last; a fifth is enough to claim
    assert plain.assign(truths, boxes).tolist() == [0, 2, 2, -1, -1]
    assert plain.assign(truths[:0], boxes).tolist() == [-1] * 5
    assert plain.assign(truths, boxes[:0]).tolist() == []
    apart = torch.tensor([[200.0, 200, 210, 210]])
    assert retina.assign(apart, boxes).tolist() == [-1] * 5  # a truth that nothing overlaps claims nothing


def test_a_claimed_box_belongs_to_its_claimant() -> None:
    truths = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 6]])
    boxes = torch.tensor([[0.0, 0, 10, 9]])  # .9 of the first truth, 2/3 of the second, whose only one it is
    assert Assigner(0.5, 0.5, 0.5).assign(truths, boxes).tolist() == [1]
    assert Assigner(0.5, 0.5, None).assign(truths, boxes).tolist() == [0]
    assert Assigner(0.5, 0.5, 0.7).assign(truths, boxes).tolist() == [0]


def test_anchors_in_another_images_room_are_not_background() -> None:
    anchors = torch.tensor([[-8.0, -8, 8, 8], [22, -8, 38, 8], [24, 24, 40, 40], [60, 60, 68, 68], [56, -4, 64, 4]])
    targets = [target([[0, 0, 9, 9]], [0], (20, 33)), target([], [], (96, 96))]
    got = assign_anchors(Assigner(0.5, 0.4, None), anchors, targets, [(20, 33), (96, 96)], 32)
    # the first image is padded to 32 x 64 by itself
    assert got.tolist() == [[-1, -1, -2, -2, -1], [-1] * 5]


def test_coder_is_bounded_both_ways() -> None:
    coder = Coder(0.1, 0.2)
    boxes = torch.tensor([[10.0, 20, 30, 60]])
    codes = torch.tensor([[1.0, -1, 5 * math.log(2), 0]])
    torch.testing.assert_close(coder.decode_single(codes, boxes), torch.tensor([[2.0, 16, 42, 56]]))
    far = coder.decode_single(torch.tensor([[0.0, 0, 99, -99]]), boxes)[0]
    torch.testing.assert_close(far[2:] - far[:2], torch.tensor([20 * 62.5, 40 / 62.5]), rtol=1e-4, atol=1e-4)
    truths = torch.tensor([[3.0, 4, 100, 7]])
    torch.testing.assert_close(coder.decode_single(coder.encode_single(truths, boxes), boxes), truths)
    half = coder.decode_single(codes.half(), boxes + 3000)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, torch.tensor([[3002.0, 3016, 3042, 3056]]), rtol=0, atol=0.02)


def test_focal_loss_by_hand(ours: RetinaNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant outputs: every term is known."""
    logit, code = 0.3, 0.25

    def head(maps: list[Tensor]) -> dict[str, Tensor]:
        n = sum(9 * m.shape[-1] * m.shape[-2] for m in maps)
        return {"cls_logits": torch.full((1, n, CLASSES), logit), "bbox_regression": torch.full((1, n, 4), code)}

    monkeypatch.setattr(ours.head, "forward", head)
    images, scene = torch.zeros(1, 3, 32, 32), target([[0, 0, 32, 32]], [2], (32, 32))
    features = ours.neck(ours.backbone(images))
    anchors = ours.anchors(collect(images, 32), features)[0]
    overlap = box_iou(scene["boxes"], anchors)[0]
    positive = overlap >= 0.5
    negative = int((overlap < 0.4).sum())
    p = 1 / (1 + math.exp(-logit))
    hit, miss = 0.25 * (1 - p) ** 2 * -math.log(p), 0.75 * p**2 * -math.log(1 - p)
    n = int(positive.sum())
    assert n > 0
    losses = ours(images, [scene])
    expected = (n * hit + (n * (CLASSES - 1) + negative * CLASSES) * miss) / n
    assert losses["class"].item() == pytest.approx(expected, rel=1e-5)
    wanted = Coder().encode_single(scene["boxes"].expand(n, 4), anchors[positive])
    assert losses["box"].item() == pytest.approx((wanted - code).abs().sum().item() / n, rel=1e-5)


def test_initialisation(ours: RetinaNet) -> None:
    fresh = small("retinanet")
    prior = fresh.head.classification_head.cls_logits
    torch.testing.assert_close(prior.bias.sigmoid(), torch.full_like(prior.bias, 0.01))
    for name, p in fresh.head.named_parameters():
        if name.endswith("weight"):
            assert p.std().item() == pytest.approx(0.01, rel=0.1), name
    assert ours.neck.strides == (8, 16, 32, 64, 128)
