"""Training metrics, summed on the device and read occasionally, so that no step waits for the host."""

import torch
import torch.distributed as dist
from torch import Tensor


class Meter:
    """Means over the steps since the last reading, and the first step that was not finite."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Start a new reading."""
        self.count = 0
        self.sums = torch.zeros(max(1, len(self.keys)), device=self.device)
        self.first_bad = torch.full((), torch.inf, device=self.device)

    @torch.no_grad()
    def add(self, logs: dict[str, Tensor], finite: Tensor, update: int) -> None:
        """Add the scalars of a step, and whether they are finite."""
        if not self.keys:
            self.keys = list(logs)
            self.reset()
        self.sums += torch.stack([value.detach().float() for value in logs.values()])
        step = torch.full_like(self.first_bad, update)
        self.first_bad = torch.minimum(self.first_bad, torch.where(finite, torch.inf, step))
        self.count += 1

    def read(self) -> tuple[dict[str, float], int, int | None]:
        """Means over steps and processes, the number of steps, and the first step that was not finite, if any."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums)
            self.sums /= dist.get_world_size()
            dist.all_reduce(self.first_bad, dist.ReduceOp.MIN)
        *sums, bad = torch.cat([self.sums, self.first_bad[None]]).tolist()
        count = self.count
        means = {key: value / max(1, count) for key, value in zip(self.keys, sums, strict=False)}
        self.reset()
        return means, count, None if bad == float("inf") else int(bad)
