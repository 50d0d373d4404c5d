"""Whole models on a GPU: the light path of plain eager calls against the registered operators."""

import pytest
import torch
import torch.nn.functional as F

import tokamix
from tokamix.ops import dispatch

MODELS = ["atmnet_xtiny", "stvit_small", "amixer_tiny", "xcit_tiny_12_p16_sima", "deit_small_sima"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_both_paths(name: str) -> None:
    """Under autocast; the second call of each path finds cached launches."""
    torch.manual_seed(0)
    model = tokamix.create_model(name).cuda()
    images, labels = torch.randn(2, 3, 224, 224, device="cuda"), torch.tensor([1, 2], device="cuda")
    results = []
    for light in (True, True, False):
        with dispatch.use_light(light):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(images)
            F.cross_entropy(logits, labels).backward()
            grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
            results.append((logits.detach(), grads))
    for logits, grads in results[:2]:
        torch.testing.assert_close(logits, results[2][0])
        assert (grads - results[2][1]).norm() < 1e-3 * results[2][1].norm()
