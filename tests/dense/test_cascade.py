"""Cascade Mask R-CNN on cases small enough to compute by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.dense.detectors import CLASSES, create_target, small_detector
from tokamix.dense import CascadeMaskRCNN
from tokamix.dense.boxes import BoxCoder
from tokamix.dense.cascade import giou_box_loss
from tokamix.dense.detector import batch_images
from tokamix.dense.mask_rcnn import SampledRoIs

SIZE = (96, 128)
ZERO = torch.zeros(1, 4)


@pytest.fixture
def cascade() -> CascadeMaskRCNN:
    detector = small_detector("cascade_mask_rcnn")
    assert isinstance(detector, CascadeMaskRCNN)
    return detector


@pytest.mark.parametrize(
    ("box", "gt_box", "giou"),
    [
        ([0.0, 0, 10, 10], [0.0, 0, 10, 10], 1.0),
        ([0.0, 0, 10, 10], [5.0, 0, 15, 10], 50 / 150),  # the union fills the enclosing box
        ([0.0, 0, 10, 10], [5.0, 5, 15, 15], 25 / 175 - (225 - 175) / 225),
        ([0.0, 0, 10, 10], [20.0, 0, 30, 10], 0 - (300 - 200) / 300),  # disjoint
        ([0.0, 0, 10, 10], [2.0, 2, 4, 4], 4 / 100),  # inside
    ],
)
def test_giou_by_hand(box: list[float], gt_box: list[float], giou: float) -> None:
    """Codes of zero leave the box unchanged; the loss is 10 (1 - GIoU)."""
    loss = giou_box_loss(ZERO, torch.tensor([box]), torch.tensor([gt_box]), BoxCoder(0.1, 0.2))
    assert loss.item() == pytest.approx(10 * (1 - giou), abs=1e-4)


def test_giou_is_of_decoded_boxes() -> None:
    """A code of 1 moves a box by the standard deviation of the stage times its width."""
    boxes, gt_box = torch.tensor([[0.0, 0, 100, 10]]), torch.tensor([[0.0, 0, 100, 10]])
    for std in (0.1, 0.05, 0.033):
        codes = torch.tensor([[1.0, 0, 0, 0]], requires_grad=True)
        loss = giou_box_loss(codes, boxes, gt_box, BoxCoder(std, 2 * std))
        assert loss.item() == pytest.approx(10 * (1 - (1 - std) / (1 + std)), rel=1e-4)
        loss.backward()
        assert codes.grad is not None
        assert codes.grad[0, 0] > 0
    several = giou_box_loss(torch.zeros(3, 4), boxes.expand(3, 4), gt_box.expand(3, 4) + 5, BoxCoder(0.1, 0.2))
    one = giou_box_loss(torch.zeros(1, 4), boxes, gt_box + 5, BoxCoder(0.1, 0.2))
    torch.testing.assert_close(several, 3 * one)


def test_stages_have_the_papers_settings(cascade: CascadeMaskRCNN) -> None:
    assert [(s.matcher.high_threshold, s.matcher.low_threshold) for s in cascade.stages] == [
        (i, i) for i in (0.5, 0.6, 0.7)
    ]
    assert not any(s.matcher.allow_low_quality_matches for s in cascade.stages)
    stds = [(s.box_coder.center_std, s.box_coder.size_std) for s in cascade.stages]
    assert stds == [(0.1, 0.2), (0.05, 0.1), (0.033, 0.067)]
    assert cascade.stage_weights == (1.0, 0.5, 0.25)
    assert cascade.rpn.beta == pytest.approx(1 / 9)
    assert cascade.rpn._post_nms_top_n == {"training": 2000, "testing": 1000}
    for stage in cascade.stages:
        kinds = [type(part) for part in stage.head.modules()]
        assert (kinds.count(nn.Conv2d), kinds.count(nn.BatchNorm2d), kinds.count(nn.Linear)) == (4, 4, 1)


def test_each_stage_has_a_higher_iou_threshold(cascade: CascadeMaskRCNN) -> None:
    """RoIs with IoUs of .55, .65 and .75: the second stage makes the first background, the third also the second."""
    gt_box = torch.tensor([[0.0, 0, 20, 20]])
    proposals = torch.tensor([[0.0, 0, 20, 20 * iou] for iou in (0.55, 0.65, 0.75)])
    target = {"boxes": gt_box, "labels": torch.tensor([2])}
    labels = [stage.sample_rois([proposals], [target]).labels.tolist() for stage in cascade.stages]
    background = CLASSES
    # the ground truth itself comes first
    assert labels == [[2, 2, 2, 2], [2, background, 2, 2], [2, background, background, 2]]


def test_boxes_are_refined_from_stage_to_stage(cascade: CascadeMaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positives by the codes of their class, background by its top class; added ground-truth boxes are removed."""
    target = create_target([[10, 10, 50, 50]], [1], SIZE)
    proposals = [torch.tensor([[12.0, 10, 52, 50], [100, 60, 126, 90]])]
    seen: list[list[Tensor]] = []
    monkeypatch.setattr(cascade.rpn, "forward", lambda *args: (torch.stack(proposals), torch.ones(1, 2).bool(), {}))

    def watch(stage: nn.Module) -> None:
        sample_rois = stage.sample_rois

        def watched(proposals: list[Tensor], targets: list) -> SampledRoIs:
            seen.append(proposals)
            return sample_rois(proposals, targets)

        def predict_boxes(maps: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
            logits = torch.zeros(len(boxes[0]), CLASSES + 1)
            logits[:, -1], logits[:, 3] = 9.0, 5.0  # background, then class 3
            codes = torch.zeros(len(boxes[0]), CLASSES, 4)
            codes[:, 1, 0] = -0.5  # half a standard deviation to the left
            codes[:, 3, 0] = 2.0  # two to the right
            return logits, codes

        monkeypatch.setattr(stage, "sample_rois", watched)
        monkeypatch.setattr(stage, "predict_boxes", predict_boxes)

    for stage in cascade.stages:
        watch(stage)
    cascade(torch.zeros(1, 3, *SIZE), [target])
    torch.testing.assert_close(seen[0][0], proposals[0])
    # 40 px wide: -.5 * .1 * 40 = -2; 26 px wide: 2 * .1 * 26 = 5.2, clipped at 128
    torch.testing.assert_close(seen[1][0], torch.tensor([[10.0, 10, 50, 50], [105.2, 60, 128, 90]]))
    # -.5 * .05 * 40 = -1; 22.8 px wide: 2 * .05 * 22.8 = 2.28
    torch.testing.assert_close(seen[2][0], torch.tensor([[9.0, 10, 49, 50], [107.48, 60, 128, 90]]))


def test_losses_are_weighted(cascade: CascadeMaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, stage in enumerate(cascade.stages):
        one = {"class": torch.tensor(1.0 + i), "box": torch.tensor(10.0 + i), "mask": torch.tensor(100.0 + i)}
        monkeypatch.setattr(stage, "compute_losses", lambda *args, one=one: one)
    losses = cascade(torch.randn(1, 3, *SIZE), [create_target([[10, 10, 60, 60]], [1], SIZE)])
    del losses["rpn_class"], losses["rpn_box"]
    assert {name: loss.item() for name, loss in losses.items()} == {
        **{"class_1": 1.0, "box_1": 10.0, "mask_1": 100.0},
        **{"class_2": 1.0, "box_2": 5.5, "mask_2": 50.5},
        **{"class_3": 0.75, "box_3": 3.0, "mask_3": 25.5},
    }


def test_stages_are_averaged(cascade: CascadeMaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean of the logits, box of the last stage, mean of the mask probabilities."""
    proposal = torch.tensor([[[20.0, 20, 60, 60]]]), torch.tensor([[True]])
    monkeypatch.setattr(cascade.rpn, "forward", lambda *args: (*proposal, {}))
    all_logits, mask_logits = ((6.0, 0.0), (0.0, 3.0), (3.0, 0.0)), (2.0, -1.0, 0.5)
    for stage, (first, second), mask_logit in zip(cascade.stages, all_logits, mask_logits, strict=True):
        logits = torch.full((1, CLASSES + 1), -9.0)
        logits[0, 0], logits[0, 4] = first, second
        codes = torch.zeros(1, CLASSES, 4)
        codes[0, 0, 1] = 1.0  # down
        codes[0, 4, 1] = -1.0  # up
        monkeypatch.setattr(stage, "predict_boxes", lambda maps, boxes, outputs=(logits, codes): outputs)
        monkeypatch.setattr(
            stage,
            "predict_masks",
            lambda maps, boxes, labels, value=mask_logit: torch.full((len(labels), 28, 28), value),
        )
    batch = batch_images(torch.zeros(1, 3, *SIZE), 32)
    detections = {name: value[0] for name, value in cascade.predict([torch.zeros(1, 32, 8, 8)] * 5, batch).items()}
    assert detections["labels"].tolist() == [0, 4]
    total = math.exp(3) + math.exp(1) + 4 * math.exp(-9)
    torch.testing.assert_close(detections["scores"], torch.tensor([math.exp(3), math.exp(1)]) / total)
    # the first stage moves it down by .1 * 40 = 4, the second, whose top class is 4, up by .05 * 40 = 2
    top = 20 + 4 - 2
    expected = torch.tensor([[20, top + 1.32, 60, top + 41.32], [20, top - 1.32, 60, top + 38.68]])
    torch.testing.assert_close(detections["boxes"], expected)
    probability = sum(1 / (1 + math.exp(-s)) for s in mask_logits) / 3
    torch.testing.assert_close(detections["masks"], torch.full((2, 28, 28), probability))
