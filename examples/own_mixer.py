"""Register your own token mixer and train it beside softmax attention: same body, same recipe."""

import torch
from torch import Tensor, nn

import tokamix
from tokamix.mixers import register_mixer


class Strips(nn.Module):
    """Combine every token with the means of its row and its column."""

    def __init__(self, dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * dim, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens = x.unflatten(1, grid)  # (B, H, W, C)
        rows = tokens.mean(2, keepdim=True).expand_as(tokens)
        columns = tokens.mean(1, keepdim=True).expand_as(tokens)
        return self.proj(torch.cat([tokens, rows, columns], dim=-1).flatten(1, 2))


register_mixer("strips", lambda site, **options: Strips(site.dim, **options))

for mixer in ("softmax", "strips"):
    settings = {"epochs": 1, "warmup_epochs": 0, "model_kwargs.depth": 1, "model_kwargs.dim": 32}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    result = tokamix.train(
        f"columnar_tiny_{mixer}", "digits", "digits", f"runs/{mixer}", overrides=overrides, quiet=True
    )
    macs = tokamix.count_macs(result.load(), 32)
    print(f"{mixer:8} {result.top1:.1f} % after one epoch, {macs:,} multiply-accumulates")
