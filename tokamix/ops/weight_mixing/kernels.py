"""Adaptive weight mixing in Triton.

For one source the logits of all heads of all windows are one matrix product, policies (windows * heads, K) times the
bank's row (K, destinations), so the source is the outermost loop. For softmax and the product with the values, a window
and a head are outermost. The change of order goes through memory once, in the inputs' precision: `logits`
(pairs, N, PITCH), where a pair is a window and a head, N its tokens, and PITCH is N rounded up to whole vectors.
Writing and reading it takes 4 N^2 bytes per pair in half precision. It is scratch memory: the backward pass recomputes
it, replaces it by its gradient in place, and reads that once more for policy and bank. There are no atomics: results
are deterministic.

Windows, shifts and heads are resolved by address; maps are neither rolled nor cut.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch
from tokamix.ops.weight_mixing.compose import compose_backward_kernel, compose_kernel, displacements_kernel
from tokamix.ops.weight_mixing.mix import mix_backward_kernel, mix_backward_tiles_kernel, mix_kernel, mix_tiles_kernel

Pair = tuple[int, int]
VECTOR = 8  # elements of a 16-byte access in half precision
MAX_BLOCK = 256  # destinations per program
TILE = 64  # sources and destinations of a tile
SCRATCH_BYTES = 2**30  # larger batches are processed in parts


def forward(
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    sums: Tensor,
    grid: Pair,
    window: Pair,
    shift: Pair,
    shift_mask: bool,
    activation: str,
) -> Tensor:
    """Mixed values (B, N, heads, d); under softmax the logarithms of its sums are written to sums (pairs, h*w)."""
    v, policy, bank = v.contiguous(), policy.contiguous(), bank.contiguous()  # no copy for outputs of Linear layers
    plan = plan_for(v, bank, grid, window, shift, shift_mask, activation)
    out = torch.empty_like(v)
    for images, pairs, logits in plan.parts(v.device):
        plan.compose(_part(policy, images), bank, logits)
        plan.mix(logits, _part(v, images), _part(out, images), _part(sums, pairs))
    return out


def backward(
    grad: Tensor,
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    out: Tensor,
    sums: Tensor,
    grid: Pair,
    window: Pair,
    shift: Pair,
    shift_mask: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, policy and bank."""
    grad, v, policy, bank = grad.contiguous(), v.contiguous(), policy.contiguous(), bank.contiguous()
    plan = plan_for(v, bank, grid, window, shift, shift_mask, activation)
    grad_v, grad_policy, grad_bank = torch.empty_like(v), torch.empty_like(policy), None
    for images, pairs, logits in plan.parts(v.device):
        values, mixed, grads = _part(v, images), _part(out, images), _part(grad, images)
        plan.compose(_part(policy, images), bank, logits)
        plan.mix_backward(logits, values, mixed, _part(sums, pairs), grads, _part(grad_v, images))
        part = plan.compose_backward(logits, _part(policy, images), bank, _part(grad_policy, images))
        grad_bank = part if grad_bank is None else grad_bank + part
    assert grad_bank is not None
    return grad_v, grad_policy, grad_bank.to(bank.dtype)


def _part(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[rows]


def plan_for(
    v: Tensor, bank: Tensor, grid: Pair, window: Pair, shift: Pair, shift_mask: bool, activation: str
) -> "Plan":
    """The plan of a call."""
    return _plan(v.shape, v.dtype, bank.shape, grid, window, shift, shift_mask, activation, MAX_BLOCK, TILE)


class Plan:
    """Geometry, block sizes and launches of calls with the same shapes and options; all tensors are contiguous."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        bank_shape: tuple[int, ...],
        grid: Pair,
        window: Pair,
        shift: Pair,
        shift_mask: bool,
        activation: str,
        max_block: int = MAX_BLOCK,
        tile: int = TILE,
    ) -> None:
        (self.batch, _, self.heads, self.dim), self.entries = shape, bank_shape[0]
        self.tile = tile
        self.launches: dict[tuple[str, int], Launch] = {}
        self.tokens = window[0] * window[1]
        self.windows = grid[0] * grid[1] // self.tokens
        self.map = (self.windows, *grid, *shift)
        self.window = (self.heads, *window)
        self.relative = len(bank_shape) == 2
        self.activation = (shift_mask and shift != (0, 0), activation)
        self.pitch = triton.cdiv(self.tokens, VECTOR) * VECTOR
        self.dtype = dtype

        self.block_d = max(16, triton.next_power_of_2(self.dim))
        self.block_k = max(16, triton.next_power_of_2(self.entries))
        half = self.dtype.itemsize == 2  # float32 products do not use tensor cores and need smaller blocks
        most = min(max_block, 16384 // self.block_d) if half else 64
        self.block_all = min(most, max(16, triton.next_power_of_2(self.tokens)))
        # all sources of a few destinations at once: softmax needs one pass and little exchange between warps; a small
        # window fits a single warp, which exchanges nothing
        small = half and self.block_all <= 64
        self.mix_block = min(self.block_all, 64 if small else 32)
        self.mix_warps = max(1, self.block_d // 32) if small else 4
        self.mix_backward_rows = min(self.block_all, 128)
        self.mix_backward_block = min(self.block_all, 64 if small else 32)
        self.mix_backward_warps = 4 if self.mix_backward_rows <= 64 else 8
        # the accumulator (block_k, compose_m) must stay in registers
        self.compose_m = min(self.block_all, (16384 if half else 4096) // self.block_k)
        self.compose_p = self.compose_backward_p = 64 if half else 32
        self.compose_warps = self.compose_backward_warps = 4 if half and self.compose_m * self.block_k <= 4096 else 8
        self.compose_programs, self.compose_backward_programs = 2048, 512
        # with masks or wider heads, tiles exceed the registers
        fits = self.dim <= 32 and tile < self.tokens <= max_block
        self.tiled = half and fits and self.activation == (False, "softmax")
        if self.tiled:
            self.compose_programs = 4 * self.tokens

    def parts(self, device: torch.device) -> Iterator[tuple[slice | None, slice | None, Tensor]]:
        """Parts of the batch: images, their pairs (None: all), and scratch memory for the pairs' logits."""
        size = self.tokens * self.pitch
        pairs = self.windows * self.heads
        images = max(1, SCRATCH_BYTES // (pairs * size * self.dtype.itemsize))
        scratch = torch.empty(min(images, self.batch) * pairs, size, device=device, dtype=self.dtype)
        if images >= self.batch:
            yield None, None, scratch
            return
        for first in range(0, self.batch, images):
            last = min(first + images, self.batch)
            yield slice(first, last), slice(first * pairs, last * pairs), scratch[: (last - first) * pairs]

    def compose(self, policy: Tensor, bank: Tensor, logits: Tensor) -> None:
        """Write the logits of all pairs."""
        self._launch("compose", len(logits))(policy, bank, logits)

    def mix(self, logits: Tensor, v: Tensor, out: Tensor, sums: Tensor) -> None:
        """Write the mixed values, and the logarithms of softmax's sums."""
        self._launch("mix", len(logits))(logits, v, out, sums)

    def mix_backward(self, logits: Tensor, v: Tensor, out: Tensor, sums: Tensor, grad: Tensor, grad_v: Tensor) -> None:
        """Write the gradient of the values, and replace the logits by theirs."""
        self._launch("mix_backward", len(logits))(logits, v, out, sums, grad, grad_v)

    def compose_backward(self, grad_logits: Tensor, policy: Tensor, bank: Tensor, grad_policy: Tensor) -> Tensor:
        """Write the gradient of the policies; return the bank's, in float32."""
        launch = self._launch("compose_backward", len(grad_logits))
        _, parts, splits = launch.grid
        by_part = grad_policy if parts == 1 else grad_policy.new_empty(parts, *grad_policy.shape, dtype=torch.float32)
        by_pair = bank.new_empty(splits, self.tokens, self.entries, self.tokens, dtype=torch.float32)
        launch(grad_logits, policy, bank, by_part, by_pair)
        if parts > 1:
            grad_policy.copy_(by_part.sum(0))
        if not self.relative:
            return by_pair.sum(0).transpose(0, 1)
        table = torch.empty_like(bank, dtype=torch.float32)
        self._launch("displacements", splits)(by_pair, table)
        return table

    def _launch(self, name: str, count: int) -> Launch:
        """The launch of a kernel for `count` pairs (of "displacements": parts of the pairs)."""
        launch = self.launches.get((name, count))
        if launch is None:
            launch = self.launches[name, count] = getattr(self, f"_{name}_launch")(count)
        return launch

    def _compose_launch(self, pairs: int) -> Launch:
        return self._composing(compose_kernel, pairs, self.compose_p, self.compose_programs, self.compose_warps)

    def _compose_backward_launch(self, pairs: int) -> Launch:
        block, programs = self.compose_backward_p, self.compose_backward_programs
        return self._composing(compose_backward_kernel, pairs, block, programs, self.compose_backward_warps)

    def _mix_launch(self, pairs: int) -> Launch:
        sizes = (*self.map, self.dim, *self.window)
        if self.tiled:
            return Launch(mix_tiles_kernel, (pairs,), *sizes, self.pitch, *self._tiles(), num_warps=4, num_stages=1)
        grid, blocks = (pairs, triton.cdiv(self.tokens, self.mix_block)), (self.block_all, self.mix_block, self.block_d)
        return Launch(mix_kernel, grid, *sizes, *self.activation, self.pitch, *blocks, num_warps=self.mix_warps)

    def _mix_backward_launch(self, pairs: int) -> Launch:
        sizes = (*self.map, self.dim, *self.window)
        if self.tiled:
            return Launch(
                mix_backward_tiles_kernel, (pairs, triton.cdiv(self.tokens, self.tile)), *sizes, self.pitch,
                *self._tiles(), num_warps=4, num_stages=2, maxnreg=168,
            )  # fmt: skip
        rows, block, warps = self.mix_backward_rows, self.mix_backward_block, self.mix_backward_warps
        return Launch(
            mix_backward_kernel, (pairs, triton.cdiv(self.tokens, rows)), *sizes, *self.activation, self.pitch,
            rows, block, self.block_d, num_warps=warps,
        )  # fmt: skip

    def _displacements_launch(self, splits: int) -> Launch:
        _, height, width = self.window
        grid = (self.entries, triton.cdiv((2 * height - 1) * (2 * width - 1), 64))
        return Launch(displacements_kernel, grid, self.entries, splits, height, width, 32, 64, num_warps=4)

    def _tiles(self) -> tuple[int, ...]:
        """BLOCK, REST, BLOCK_ALL and BLOCK_D of the tiled kernels."""
        rest = self.tokens % self.tile
        return self.tile, max(16, triton.next_power_of_2(rest)) if rest else 0, self.block_all, self.block_d

    def _composing(self, kernel: Any, pairs: int, block: int, programs: int, warps: int) -> Launch:
        """One program per source, part of the destinations and part of the pairs; enough to fill a GPU."""
        parts = triton.cdiv(self.tokens, self.compose_m)
        grid = self.tokens, parts, min(triton.cdiv(pairs, block), triton.cdiv(programs, self.tokens * parts))
        return Launch(
            kernel, grid, pairs, *self.map, self.entries, *self.window, self.relative, self.pitch, block,
            self.compose_m, self.block_k, num_warps=warps,
        )  # fmt: skip


_plan = lru_cache(CACHE_SIZE)(Plan)
