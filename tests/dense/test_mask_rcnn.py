"""Mask R-CNN against torchvision's, and by hand where it differs on purpose."""

import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.ops import poolers

from tests.dense.detectors import CLASSES, Levels, create_target, small_detector
from tokamix.dense import MaskRCNN, mask_rcnn
from tokamix.dense.boxes import BoxCoder, MultiScaleRoIAlign
from tokamix.dense.detector import batch_images
from tokamix.dense.mask_rcnn import RoIHead, SampledRoIs, crop_masks, l1_box_loss
from tokamix.ops.mask_paste.op import paste_masks

SIZE = (96, 128)
ALL = 10**6  # larger than the number of samples
TARGET = create_target([[5, 6, 50, 70], [60, 20, 120, 90]], [1, 4], SIZE)


class OurRoIAlign(poolers.MultiScaleRoIAlign):
    """Our RoIAlign with the interface of torchvision's."""

    def __init__(self, pool: MultiScaleRoIAlign) -> None:
        super().__init__(list("0123"), pool.output_size, 0)
        self.pool = pool

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> Tensor:
        return self.pool(list(features.values())[:4], boxes)


class BoxPredictor(nn.Module):
    """The last box layers in torchvision's order: background first, and with a box."""

    def __init__(self, stage: RoIHead) -> None:
        super().__init__()
        self.classify, self.regress = stage.classify, stage.regress

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.classify(x).roll(1, 1), F.pad(self.regress(x), (4, 0))


class MaskPredictor(nn.Module):
    def __init__(self, stage: RoIHead) -> None:
        super().__init__()
        self.predict = stage.mask_predictor

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.predict(x), (0, 0, 0, 0, 1, 0))


@pytest.fixture(scope="module")
def ours() -> MaskRCNN:
    detector = small_detector("mask_rcnn", spread=0.3)
    assert isinstance(detector, MaskRCNN)
    return detector


@pytest.fixture(scope="module")
def theirs(ours: MaskRCNN) -> nn.Module:
    """torchvision's Mask R-CNN with the same layers, anchors and RoIAlign, trained on all RoIs."""
    stage = ours.stages[0]
    return torchvision.models.detection.MaskRCNN(
        Levels(ours),
        rpn_anchor_generator=ours.rpn.anchor_generator,
        rpn_head=ours.rpn.head,
        rpn_pre_nms_top_n_test=1000,
        rpn_post_nms_top_n_train=1000,
        rpn_batch_size_per_image=ALL,
        box_roi_pool=OurRoIAlign(stage.box_pool),
        box_head=stage.head,
        box_predictor=BoxPredictor(stage),
        box_batch_size_per_image=ALL,
        box_positive_fraction=0.5,
        mask_roi_pool=OurRoIAlign(stage.mask_pool),
        mask_head=stage.mask_head,
        mask_predictor=MaskPredictor(stage),
        min_size=SIZE[0],
        max_size=SIZE[1],
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
    ).eval()


@pytest.fixture
def torchvision_settings(ours: MaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give our detector torchvision's settings where they differ."""
    stage = ours.stages[0]
    monkeypatch.setattr(ours.rpn, "beta", 1 / 9)
    monkeypatch.setattr(ours.rpn.proposal_matcher, "low_quality_iou", 0.0)
    monkeypatch.setattr(ours.rpn.fg_bg_sampler, "batch_size_per_image", ALL)
    monkeypatch.setattr(stage.sampler, "batch_size_per_image", ALL)
    monkeypatch.setattr(stage.sampler, "positive_fraction", 0.5)
    monkeypatch.setattr(stage.matcher, "allow_low_quality_matches", False)
    monkeypatch.setattr(mask_rcnn, "crop_masks", lambda masks, i, boxes: project_masks_on_boxes(masks, boxes, i, 28))

    def smooth_l1(codes: Tensor, boxes: Tensor, gt_boxes: Tensor, coder: BoxCoder) -> Tensor:
        return F.smooth_l1_loss(codes, coder.encode_single(gt_boxes, boxes), beta=1 / 9, reduction="sum")

    monkeypatch.setattr(stage, "box_loss", smooth_l1)


def for_torchvision(target: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**target, "labels": target["labels"] + 1, "masks": target["masks"].to(torch.uint8)}


def set_training(model: nn.Module, flag: bool) -> None:
    """torchvision's switch between losses and detections, without batch statistics."""
    for part in (model, model.transform, model.rpn, model.roi_heads):
        part.training = flag


NAMES = {
    "rpn_class": "loss_objectness",
    "rpn_box": "loss_rpn_box_reg",
    "class": "loss_classifier",
    "box": "loss_box_reg",
    "mask": "loss_mask",
}


@pytest.mark.usefixtures("torchvision_settings")
@pytest.mark.parametrize(
    "targets", [[TARGET], [TARGET, create_target([[20, 20, 100, 80]], [0], SIZE), create_target([], [], SIZE)]]
)
def test_losses_equal_torchvisions(ours: MaskRCNN, theirs: nn.Module, targets: list) -> None:
    set_training(theirs, True)
    images = [torch.randn(3, *SIZE) for _ in targets]
    expected, losses = theirs(images, [for_torchvision(target) for target in targets]), ours(images, targets)
    assert set(losses) == set(NAMES)
    for name, loss in losses.items():
        assert loss.item() > 0
        torch.testing.assert_close(loss, expected[NAMES[name]], rtol=1e-5, atol=1e-6)
    parts = list(ours.parameters())
    grads = [torch.autograd.grad(sum(one.values()), parts, allow_unused=True) for one in (losses, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_detections_equal_torchvisions(ours: MaskRCNN, theirs: nn.Module) -> None:
    """Boxes, classes, scores, and the masks inside their boxes."""
    set_training(theirs, False)
    images = [torch.randn(3, *SIZE) for _ in range(2)]
    batch = batch_images(images, 32)
    features = ours.neck(ours.backbone(batch.tensors))
    named = {str(i): x for i, x in enumerate(features)}
    proposals, _ = theirs.rpn(batch, named)
    boxes, valid, _ = ours.rpn(batch, features)
    for a, real, b in zip(boxes, valid, proposals, strict=True):
        torch.testing.assert_close(a[real], b, rtol=1e-5, atol=1e-4)
    expected, _ = theirs.roi_heads(named, proposals, batch.image_sizes)
    detections = ours.predict(features, batch)
    assert detections["scores"].shape == (2, 100)
    for i, b in enumerate(expected):
        a = {name: value[i] for name, value in detections.items()}
        torch.testing.assert_close(a["boxes"], b["boxes"], rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(a["labels"], b["labels"] - 1)
        torch.testing.assert_close(a["scores"], b["scores"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a["masks"], b["masks"][:, 0], rtol=1e-5, atol=1e-4)


def test_roi_align_by_hand() -> None:
    """On a map of pixel coordinates, the cells of an RoI hold the coordinates of their centres."""
    strides = (4, 8, 16, 32)
    maps = []
    for stride in strides:
        y, x = torch.meshgrid(*[(torch.arange(1024 // stride) + 0.5) * stride] * 2, indexing="ij")
        maps.append(torch.stack([x, y]).expand(2, 2, -1, -1) + 10_000 * stride)  # the offset identifies the level
    sides = [20.0, 111, 112, 223, 224, 447.5, 448, 900]
    boxes = [torch.tensor([[50.0, 60, 50 + s, 60 + s] for s in part]) for part in (sides[::2], sides[1::2])]
    pooled = MultiScaleRoIAlign(7, strides)(maps, boxes)
    expected = [4, 8, 16, 32, 4, 8, 16, 32]  # strides for the sides above, those of the first image first
    for cells, side, stride in zip(pooled, sides[::2] + sides[1::2], expected, strict=True):
        centres = (torch.arange(7) + 0.5) * side / 7
        torch.testing.assert_close(cells[0, 3] - 10_000 * stride, 50 + centres, rtol=0, atol=0.05)
        torch.testing.assert_close(cells[1, :, 3] - 10_000 * stride, 60 + centres, rtol=0, atol=0.05)
    assert MultiScaleRoIAlign(7, strides)(maps, [boxes[0][:0], boxes[1][:0]]).shape == (0, 2, 7, 7)


def test_roi_align_of_half_precision_maps(ours: MaskRCNN) -> None:
    """16-bit maps are converted to 32 bits: in 16 bits, positions at 3000 px would be 2 px apart."""
    x = torch.arange(1000, dtype=torch.float32).expand(1, 32, 8, -1).contiguous() / 500
    for dtype in (torch.float16, torch.bfloat16):
        maps = [x.to(dtype), *(x[..., ::s].to(dtype) for s in (2, 4, 8))]
        box = torch.tensor([[3000.5, 4, 3028.5, 28]])
        pooled = ours.stages[0].box_pool(maps, [box])
        assert pooled.dtype == dtype
        pooled = pooled.float()
        torch.testing.assert_close(
            pooled, ours.stages[0].box_pool([x, x, x, x], [box]), rtol=2 * torch.finfo(dtype).eps, atol=0
        )


def test_crop_masks_by_hand() -> None:
    """Binary, and exactly half of a box whose left half is the mask; torchvision's are not binary at the edge."""
    masks = torch.zeros(2, 40, 60, dtype=torch.bool)
    masks[1, 10:30, 10:24] = True
    boxes = torch.tensor([[10.0, 10, 38, 30], [10, 10, 24, 30], [0, 0, 5, 5]])
    got = crop_masks(masks, torch.tensor([1, 1, 1]), boxes)
    half = torch.zeros(28, 28)
    half[:, :14] = 1
    torch.testing.assert_close(got, torch.stack([half, torch.ones(28, 28), torch.zeros(28, 28)]))
    assert crop_masks(masks, torch.tensor([0]), boxes[:1]).sum() == 0
    odd = crop_masks(masks, torch.tensor([1]), torch.tensor([[9.3, 9.7, 37.9, 31.2]]))
    assert set(odd.unique().tolist()) == {0.0, 1.0}
    soft = project_masks_on_boxes(masks, boxes[:1], torch.tensor([1]), 28)
    assert ((soft > 0) & (soft < 1)).any()
    assert crop_masks(masks[:0], torch.tensor([], dtype=torch.int64), boxes[:0]).shape == (0, 28, 28)


def test_roi_head_losses_by_hand(ours: MaskRCNN) -> None:
    """Two RoIs, one of class 1: mean cross-entropy of both, and the L1 loss of the codes of class 1 divided by two."""
    stage = ours.stages[0]
    boxes, gt_box = torch.tensor([[10.0, 10, 30, 50], [60, 60, 80, 80]]), torch.tensor([[12.0, 6, 32, 46]])
    is_ground_truth = [torch.tensor([False, False])]
    rois = SampledRoIs([boxes], [torch.tensor([0, -1])], is_ground_truth, torch.tensor([1, CLASSES]), gt_box)
    logits = torch.zeros(2, CLASSES + 1)
    logits[0, 1] = 2.0
    codes = torch.full((2, CLASSES, 4), 100.0)  # the codes of different classes do not count
    codes[0, 1] = torch.tensor([0.5, 0.0, 0.25, 0.0])
    maps = [torch.randn(1, 32, 96 // s, 128 // s) for s in (4, 8, 16, 32)]
    target = {"boxes": gt_box, "labels": torch.tensor([1]), "masks": torch.ones(1, *SIZE, dtype=torch.bool)}
    losses = stage.compute_losses(maps, rois, logits, codes, [target])
    probability = math.exp(2) / (math.exp(2) + CLASSES)
    assert losses["class"].item() == pytest.approx((-math.log(probability) + math.log(CLASSES + 1)) / 2, rel=1e-5)
    # the ground truth is an offset of (2 / 20, -4 / 40), in units of 0.1: the code is (1, -1, 0, 0)
    assert losses["box"].item() == pytest.approx((0.5 + 1 + 0.25) / 2, rel=1e-5)
    drawn = stage.predict_masks(maps, [boxes[:1]], torch.tensor([1]))
    assert losses["mask"].item() == pytest.approx(F.softplus(-drawn).mean().item(), rel=1e-5)
    assert l1_box_loss(codes[:0, 1], boxes[:0], gt_box[:0], stage.box_coder) == 0


def test_sampled_rois(ours: MaskRCNN) -> None:
    """512 RoIs, at most a quarter positive, with the ground truth added after matching."""
    torch.manual_seed(0)
    gt_box = torch.tensor([[10.0, 10, 60, 60]])
    near = gt_box + torch.rand(300, 4) * 4
    far = torch.tensor([70.0, 70, 90, 90]) + torch.rand(900, 4) * 4
    target = {"boxes": gt_box, "labels": torch.tensor([3])}
    rois = ours.stages[0].sample_rois([torch.cat([near, far])], [target])
    assert len(rois.labels) == len(rois.boxes[0]) == 512
    assert (rois.labels == 3).sum() == 128
    assert rois.is_ground_truth[0].sum() <= 1
    assert (rois.labels == CLASSES).sum() == 384
    torch.testing.assert_close(rois.gt_boxes, gt_box.expand(128, 4))
    few = ours.stages[0].sample_rois([far[:5]], [target])
    assert few.is_ground_truth[0].tolist() == [True] + [False] * 5
    assert few.labels.tolist() == [3] + [CLASSES] * 5
    torch.testing.assert_close(few.boxes[0][0], gt_box[0])


def test_proposal_loss_by_hand(ours: MaskRCNN) -> None:
    """L1 of positives and cross-entropy of all samples, both divided by the number of samples of the batch."""
    anchors = torch.tensor([[0.0, 0, 10, 10], [40, 0, 50, 10], [80, 0, 90, 10]])
    matched = torch.tensor([[0, -1, -2], [-1, -1, -1]])  # one is ignored
    logits, codes = torch.full((2, 3), 0.5), torch.zeros(2, 3, 4)
    losses = ours.rpn._losses(logits, codes, anchors, matched, [torch.tensor([[1.0, 0, 11, 10]]), torch.zeros(0, 4)])
    hit, miss = math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5))
    assert losses["rpn_class"].item() == pytest.approx((hit + 4 * miss) / 5, rel=1e-5)
    assert losses["rpn_box"].item() == pytest.approx(0.1 / 5, rel=1e-5)


def test_without_proposals_the_whole_image_is_one(ours: MaskRCNN) -> None:
    broken = torch.full((1, 3, 4), math.nan)
    got = ours.rpn._propose([broken[..., :1]], [broken], torch.zeros(3, 4), [(7, 9)], "testing")
    assert [x.tolist() for x in got] == [[[[0, 0, 9, 7]]], [[True]]]


def test_nan_scores_are_not_proposals(ours: MaskRCNN) -> None:
    """Nor do they displace other proposals, although NaN is sorted first."""
    scores = torch.tensor([math.nan, 1.0, math.nan, 2.0]).view(1, 4, 1)
    anchors = torch.tensor([[0.0, 0, 3, 3], [4, 0, 7, 3], [0, 4, 3, 7], [4, 4, 7, 7]])
    boxes, valid = ours.rpn._propose([scores], [torch.zeros(1, 4, 4)], anchors, [(9, 9)], "testing")
    assert valid.tolist() == [[True, True]]
    torch.testing.assert_close(boxes[0], anchors[[3, 1]])


@torch.no_grad()
def test_output_sizes(ours: MaskRCNN) -> None:
    """Boxes are scaled; masks are pasted at the output size, not resized."""
    image = torch.randn(1, 3, *SIZE)
    original, large = ours(image)[0], ours(image, sizes=[(192, 384)])[0]
    torch.testing.assert_close(large["boxes"], original["boxes"] * torch.tensor([3.0, 2, 3, 2]))
    assert large["masks"].shape == (len(large["boxes"]), 192, 384)
    detections = ours.predict(ours.neck(ours.backbone(image)), batch_images(image, 32))
    torch.testing.assert_close(large["masks"], paste_masks(detections["masks"][0], large["boxes"], (192, 384)))


def test_initialisation() -> None:
    fresh = small_detector("mask_rcnn").stages[0]
    assert fresh.classify.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert fresh.regress.weight.std().item() == pytest.approx(0.001, rel=0.1)
    bound = math.sqrt(6 / (1024 + 1024))
    assert fresh.head.fc7.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert all(not p.any() for n, p in fresh.named_parameters() if n.endswith("bias"))
    assert MaskRCNN.num_train_proposals == 1000
