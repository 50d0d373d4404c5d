"""Parameters and FLOPs of the segmenters against the paper's tables 2 and 3."""

import functools
from pathlib import Path

import pytest
import torch

from tests.dense import test_sizes_detect as detectors
from tests.dense.test_necks import TABLE_7
from tests.dense.test_necks import gmacs as neck_gmacs
from tests.dense.test_sizes_detect import PRINTED, SIZES, meta_backbone, meta_detector, millions
from tokamix import count_macs
from tokamix.dense import FPN, AtmFPN, create_segmenter

pytestmark = pytest.mark.xdist_group("sizes")

# Semantic FPN: parameters derived from MMSegmentation's layers (19.1, 30.9 ... in the table), GMACs at 512x512
SEMANTIC_FPN = {
    "atmnet_xtiny": (19_103_798, 33.1),
    "atmnet_tiny": (30_906_902, 42.4),
    "atmnet_small": (42_386_118, 57.8),
    "atmnet_base": (55_909_462, 74.7),
    "atmnet_large": (79_843_518, 86.6),
}
# UperNet with auxiliary head (45, 57 ... in the table), GMACs at 512x2048
UPERNET = {
    "atmnet_xtiny": (45.325, 889),
    "atmnet_tiny": (57.128, 927),
    "atmnet_small": (68.607, 988),
    "atmnet_base": (82.131, 1055),
    "atmnet_large": (107.892, 1106),
}


@functools.cache
def size(method: str, name: str, image: tuple[int, int], neck: str = "fpn") -> tuple[float, float]:
    # MMSegmentation's ResNet has a stem of three 3x3 convolutions; that of MMDetection is one of 7x7
    stem = {"stem_type": "deep", "stem_width": 32} if name == "resnet50" else {}
    with torch.device("meta"):
        model = create_segmenter(method, meta_backbone(name, **stem), 150, neck=neck)
    return sum(p.numel() for p in model.parameters()), count_macs(model, image) / 1e9


@pytest.mark.parametrize("name", SEMANTIC_FPN)
def test_semantic_fpn(name: str) -> None:
    """Ours is lower by less than 1.1 %.

    The paper uses mmcv's counter, which counts by layer: convolutions and Linear as we do, plus biases, 2 for each
    normalised value, and 1 for each ReLU, pooled and upsampled value. It omits functions that are not layers
    (interpolation, softmax, the products of attention in Swin) and does not run the auxiliary head.
    """
    parameters, gmacs = size("semantic_fpn", name, (512, 512))
    assert parameters == SEMANTIC_FPN[name][0]
    assert 0.989 < gmacs / SEMANTIC_FPN[name][1] < 1


@pytest.mark.parametrize("name", UPERNET)
def test_upernet(name: str) -> None:
    parameters, gmacs = size("upernet", name, (512, 2048))
    assert round(parameters / 1e6, 3) == UPERNET[name][0]
    assert 0.997 < gmacs / UPERNET[name][1] < 1


def test_upernet_of_swin() -> None:
    """A timm backbone with the same head: the paper prints 60 M and 945 G."""
    parameters, gmacs = size("upernet", "swin_tiny_patch4_window7_224", (512, 2048))
    assert round(parameters / 1e6) == 60
    assert gmacs == pytest.approx(945, rel=0.003)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of docs/guides/dense.md."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "dense.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_page_on_segmenters() -> None:
    table = {row[0]: row[1:] for row in rows("Segmenters")}
    assert table.keys() == SEMANTIC_FPN.keys()
    for name, cells in table.items():
        parameters, gmacs = size("semantic_fpn", name, (512, 512))
        assert cells[:4:2] == [f"{parameters / 1e6:.2f}", f"{gmacs:.1f}"]
        parameters, gmacs = size("upernet", name, (512, 2048))
        assert cells[4::2] == [f"{parameters / 1e6:.2f}", f"{gmacs:.1f}"]


def test_page_on_detectors() -> None:
    """The paper's numbers and ours; test_sizes_detect.py counts them."""
    for row, size in zip(rows("Detectors"), SIZES, strict=True):
        assert row[0] == f"atmnet_{size}"
        for i, (method, printed) in enumerate(PRINTED.items()):
            ours = f"{millions(meta_detector(method, row[0])):.1f}", f"{detectors.gmacs(method, row[0]):.0f}"
            stated = printed[SIZES.index(size)]
            assert row[1 + 4 * i : 5 + 4 * i] == [ours[0], str(stated[0]), ours[1], str(stated[1])]


def test_page_on_atm_fpn() -> None:
    """Our numbers in the comparison; all are within 1.6 % of the paper's, except the one that the page names."""
    table = {row[0]: [float(cell) for cell in row[1:]] for row in rows("ATMFPN")}
    labels = ("ResNet-50", "Swin-T", "ATMNet-T", "ATMNet-L")
    for label, (name, (channels, *_)) in zip(labels, TABLE_7.items(), strict=True):
        fpn, mask_rcnn = size("semantic_fpn", name, (512, 512))[1], detectors.gmacs("mask_rcnn", name)
        extra = neck_gmacs(AtmFPN, channels, (512, 512)) - neck_gmacs(FPN, channels, (512, 512))
        if label == "ResNet-50":  # the models differ in their necks only
            assert size("semantic_fpn", name, (512, 512), "atm_fpn")[1] == pytest.approx(fpn + extra, rel=1e-9)
        pooled = [neck_gmacs(kind, channels, (800, 1280), num_outs=5, extra_levels="pool") for kind in (FPN, AtmFPN)]
        ours = [fpn, fpn + extra, mask_rcnn, mask_rcnn + pooled[1] - pooled[0]]
        assert table[label][::2] == [round(total, 1) for total in ours]
        for i, (mine, printed) in enumerate(zip(ours, table[label][1::2], strict=True)):
            assert mine == pytest.approx(printed, rel=0.016) or (label, i) == ("ResNet-50", 1)
