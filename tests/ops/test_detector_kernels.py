"""Detectors give the same results with and without kernels, and compile without graph break."""

import pytest
import torch

from tests.dense.detectors import small_detector
from tests.ops.kernels import DEVICE
from tokamix.dense import detector as detector_module
from tokamix.dense import mask_rcnn, retinanet
from tokamix.dense.detector import batch_images
from tokamix.ops.dispatch import use_backend


@pytest.mark.parametrize("method", ["mask_rcnn", "cascade_mask_rcnn", "retinanet"])
@torch.no_grad()
def test_detectors(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    detector = small_detector(method, spread=1.0).to(DEVICE)
    detector.score_threshold, detector.max_detections, detector.pre_nms_topk = 0.0, 9, 12
    if method != "retinanet":
        detector.rpn._pre_nms_top_n["testing"] = detector.rpn._post_nms_top_n["testing"] = 12
    batch = batch_images([torch.randn(3, 32, 64, device=DEVICE), torch.randn(3, 30, 50, device=DEVICE)], 32)
    with use_backend("eager"):
        expected = detector.detect(batch)
    for module in (detector_module, mask_rcnn, retinanet):  # on a CPU the number of valid columns is read from the data
        monkeypatch.setattr(module, "num_valid", lambda valid: valid.shape[-1])
    detections = torch.compile(detector.detect, backend="aot_eager", fullgraph=True)(batch)
    for name, value in expected.items():
        torch.testing.assert_close(detections[name][:, : value.shape[1]], value, rtol=1e-4, atol=1e-4)
    assert (expected["scores"] > 0).any(1).all()
