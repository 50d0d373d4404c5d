"""Numbers of the training steps, summed on the device and read now and then: no step waits for the host."""

import torch
import torch.distributed as dist
from torch import Tensor


class Meter:
    """Means of the steps since the last reading, and the first step that was not healthy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.count = 0
        self.sums = torch.zeros(max(1, len(self.keys)), device=self.device)
        self.bad = torch.full((), torch.inf, device=self.device)

    @torch.no_grad()
    def add(self, logs: dict[str, Tensor], healthy: Tensor, update: int) -> None:
        """Add the scalars of a step, and whether it was healthy."""
        if not self.keys:
            self.keys = list(logs)
            self.reset()
        self.sums += torch.stack([value.detach().float() for value in logs.values()])
        step = torch.full_like(self.bad, update)
        self.bad = torch.minimum(self.bad, torch.where(healthy, torch.inf, step))
        self.count += 1

    def read(self) -> tuple[dict[str, float], int, int | None]:
        """Means over steps and processes, the number of steps, and the first bad step if there is one."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums)
            self.sums /= dist.get_world_size()
            dist.all_reduce(self.bad, dist.ReduceOp.MIN)
        *sums, bad = torch.cat([self.sums, self.bad[None]]).tolist()
        count = self.count
        means = {key: value / max(1, count) for key, value in zip(self.keys, sums, strict=False)}
        self.reset()
        return means, count, None if bad == float("inf") else int(bad)
