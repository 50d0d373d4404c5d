"""Training losses with and without kernels are equal."""

import pytest
import torch
import torch.nn.functional as F

import tokamix
from tests.ops.kernels import DEVICE
from tokamix.ops import dispatch

STEPS = 3


@pytest.mark.parametrize(
    ("mixer", "context_broadcast"),
    [("sima", None), ("active_token", None), ("super_token", None), ("weight_mixing", None), ("softmax", "cbs")],
)
def test_losses_with_and_without_kernels(mixer: str, context_broadcast: str | None) -> None:
    images, labels = torch.randn(2, 3, 12, 12, device=DEVICE), torch.arange(2, device=DEVICE)
    losses: dict[str, list[float]] = {}
    for backend in ("eager", "triton"):
        torch.manual_seed(0)
        sizes = {"img_size": 12, "patch_size": 4, "dim": 16, "depth": 1, "num_heads": 2, "num_classes": 4}
        model = tokamix.create_body("columnar_tiny", mixer, context_broadcast=context_broadcast, **sizes).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with dispatch.use_backend(backend):
            losses[backend] = [step(model, optimizer, images, labels) for _ in range(STEPS)]
    assert losses["triton"] == pytest.approx(losses["eager"], rel=1e-4)
    assert losses["eager"][-1] < losses["eager"][0]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> float:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
