"""Cascade Mask R-CNN on cases small enough for hand and pencil."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.dense.detectors import CLASSES, small, target
from tokamix.dense import CascadeMaskRCNN
from tokamix.dense._detector import Coder, collect
from tokamix.dense.cascade import giou_box_loss
from tokamix.dense.mask_rcnn import Sample

SIZE = (96, 128)
ZERO = torch.zeros(1, 4)


@pytest.fixture
def cascade() -> CascadeMaskRCNN:
    detector = small("cascade_mask_rcnn")
    assert isinstance(detector, CascadeMaskRCNN)
    return detector


@pytest.mark.parametrize(
    ("box", "truth", "giou"),
    [
        ([0.0, 0, 10, 10], [0.0, 0, 10, 10], 1.0),
        ([0.0, 0, 10, 10], [5.0, 0, 15, 10], 50 / 150),  # they fill what encloses them
        ([0.0, 0, 10, 10], [5.0, 5, 15, 15], 25 / 175 - (225 - 175) / 225),
        ([0.0, 0, 10, 10], [20.0, 0, 30, 10], 0 - (300 - 200) / 300),  # apart
        ([0.0, 0, 10, 10], [2.0, 2, 4, 4], 4 / 100),  # inside
    ],
)
def test_giou_by_hand(box: list[float], truth: list[float], giou: float) -> None:
    """Codes of zero leave the box where it is; ten times one minus GIoU is lost."""
    loss = giou_box_loss(ZERO, torch.tensor([box]), torch.tensor([truth]), Coder(0.1, 0.2))
    assert loss.item() == pytest.approx(10 * (1 - giou), abs=1e-4)


def test_giou_is_of_decoded_boxes() -> None:
    """A code of 1 moves a box by a stage's share of its width."""
    boxes, truth = torch.tensor([[0.0, 0, 100, 10]]), torch.tensor([[0.0, 0, 100, 10]])
    for shift in (0.1, 0.05, 0.033):
        codes = torch.tensor([[1.0, 0, 0, 0]], requires_grad=True)
        loss = giou_box_loss(codes, boxes, truth, Coder(shift, 2 * shift))
        assert loss.item() == pytest.approx(10 * (1 - (1 - shift) / (1 + shift)), rel=1e-4)
        loss.backward()
        assert codes.grad is not None
        assert codes.grad[0, 0] > 0
    several = giou_box_loss(torch.zeros(3, 4), boxes.expand(3, 4), truth.expand(3, 4) + 5, Coder(0.1, 0.2))
    one = giou_box_loss(torch.zeros(1, 4), boxes, truth + 5, Coder(0.1, 0.2))
    torch.testing.assert_close(several, 3 * one)


def test_stages_are_configured_as_printed(cascade: CascadeMaskRCNN) -> None:
    assert [(s.matcher.high_threshold, s.matcher.low_threshold) for s in cascade.stages] == [
        (i, i) for i in (0.5, 0.6, 0.7)
    ]
    assert not any(s.matcher.allow_low_quality_matches for s in cascade.stages)
    assert [(s.coder.shift, s.coder.size) for s in cascade.stages] == [(0.1, 0.2), (0.05, 0.1), (0.033, 0.067)]
    assert cascade.weights == (1.0, 0.5, 0.25)
    assert cascade.rpn.beta == pytest.approx(1 / 9)
    assert cascade.rpn._post_nms_top_n == {"training": 2000, "testing": 1000}
    for stage in cascade.stages:
        kinds = [type(part) for part in stage.head.modules()]
        assert (kinds.count(nn.Conv2d), kinds.count(nn.BatchNorm2d), kinds.count(nn.Linear)) == (4, 4, 1)


def test_each_stage_asks_for_more(cascade: CascadeMaskRCNN) -> None:
    """Regions that overlap the truth by .55, .65 and .75: two, then one of them turns into background."""
    truth = torch.tensor([[0.0, 0, 20, 20]])
    regions = torch.tensor([[0.0, 0, 20, 20 * share] for share in (0.55, 0.65, 0.75)])
    scene = {"boxes": truth, "labels": torch.tensor([2])}
    kept = [stage.sample([regions], [scene]).labels.tolist() for stage in cascade.stages]
    none = CLASSES
    assert kept == [[2, 2, 2, 2], [2, none, 2, 2], [2, none, none, 2]]  # the truth itself comes first


def test_boxes_move_from_stage_to_stage(cascade: CascadeMaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positives by their class's codes, background by its likeliest; truths the sampler added are left out."""
    scene = target([[10, 10, 50, 50]], [1], SIZE)
    regions = [torch.tensor([[12.0, 10, 52, 50], [100, 60, 126, 90]])]
    seen: list[list[Tensor]] = []
    monkeypatch.setattr(cascade.rpn, "forward", lambda *args: (torch.stack(regions), torch.ones(1, 2).bool(), {}))

    def watch(stage: nn.Module, i: int) -> None:
        sample = stage.sample

        def sampled(proposals: list[Tensor], targets: list) -> Sample:
            seen.append(proposals)
            return sample(proposals, targets)

        def boxes(maps: list[Tensor], given: list[Tensor]) -> tuple[Tensor, Tensor]:
            logits = torch.zeros(len(given[0]), CLASSES + 1)
            logits[:, -1], logits[:, 3] = 9.0, 5.0  # background; of the rest, class 3
            codes = torch.zeros(len(given[0]), CLASSES, 4)
            codes[:, 1, 0] = -0.5  # half a standard deviation to the left
            codes[:, 3, 0] = 2.0  # two to the right
            return logits, codes

        monkeypatch.setattr(stage, "sample", sampled)
        monkeypatch.setattr(stage, "boxes", boxes)

    for i, stage in enumerate(cascade.stages):
        watch(stage, i)
    cascade(torch.zeros(1, 3, *SIZE), [scene])
    torch.testing.assert_close(seen[0][0], regions[0])
    # 40 px wide: -.5 * .1 * 40 = -2; 26 px wide: 2 * .1 * 26 = 5.2, cut at 128
    torch.testing.assert_close(seen[1][0], torch.tensor([[10.0, 10, 50, 50], [105.2, 60, 128, 90]]))
    # -.5 * .05 * 40 = -1; 22.8 px wide: 2 * .05 * 22.8 = 2.28
    torch.testing.assert_close(seen[2][0], torch.tensor([[9.0, 10, 49, 50], [107.48, 60, 128, 90]]))


def test_losses_are_weighted(cascade: CascadeMaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, stage in enumerate(cascade.stages):
        one = {"class": torch.tensor(1.0 + i), "box": torch.tensor(10.0 + i), "mask": torch.tensor(100.0 + i)}
        monkeypatch.setattr(stage, "losses", lambda *args, one=one: one)
    losses = cascade(torch.randn(1, 3, *SIZE), [target([[10, 10, 60, 60]], [1], SIZE)])
    del losses["rpn_class"], losses["rpn_box"]
    assert {name: loss.item() for name, loss in losses.items()} == {
        **{"class_1": 1.0, "box_1": 10.0, "mask_1": 100.0},
        **{"class_2": 1.0, "box_2": 5.5, "mask_2": 50.5},
        **{"class_3": 0.75, "box_3": 3.0, "mask_3": 25.5},
    }


def test_stages_vote(cascade: CascadeMaskRCNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of their logits decides; the last one's box counts; masks are the average of their probabilities."""
    proposal = torch.tensor([[[20.0, 20, 60, 60]]]), torch.tensor([[True]])
    monkeypatch.setattr(cascade.rpn, "forward", lambda *args: (*proposal, {}))
    votes, strokes = ((6.0, 0.0), (0.0, 3.0), (3.0, 0.0)), (2.0, -1.0, 0.5)
    for stage, (first, second), stroke in zip(cascade.stages, votes, strokes, strict=True):
        logits = torch.full((1, CLASSES + 1), -9.0)
        logits[0, 0], logits[0, 4] = first, second
        codes = torch.zeros(1, CLASSES, 4)
        codes[0, 0, 1] = 1.0  # down
        codes[0, 4, 1] = -1.0  # up
        monkeypatch.setattr(stage, "boxes", lambda maps, boxes, answer=(logits, codes): answer)
        monkeypatch.setattr(
            stage, "masks", lambda maps, boxes, labels, stroke=stroke: torch.full((len(labels), 28, 28), stroke)
        )
    batch = collect(torch.zeros(1, 3, *SIZE), 32)
    found = {name: value[0] for name, value in cascade.detect([torch.zeros(1, 32, 8, 8)] * 5, batch).items()}
    assert found["labels"].tolist() == [0, 4]
    total = math.exp(3) + math.exp(1) + 4 * math.exp(-9)
    torch.testing.assert_close(found["scores"], torch.tensor([math.exp(3), math.exp(1)]) / total)
    # the first stage moves it down by .1 * 40 = 4, the second, which prefers class 4, up by .05 * 40 = 2
    top = 20 + 4 - 2
    expected = torch.tensor([[20, top + 1.32, 60, top + 41.32], [20, top - 1.32, 60, top + 38.68]])
    torch.testing.assert_close(found["boxes"], expected)
    probability = sum(1 / (1 + math.exp(-s)) for s in strokes) / 3
    torch.testing.assert_close(found["masks"], torch.full((2, 28, 28), probability))
