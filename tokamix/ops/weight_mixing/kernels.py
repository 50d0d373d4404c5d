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

import torch
import triton
from torch import Tensor

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
    plan = Plan(v, bank, grid, window, shift, shift_mask, activation)
    out = torch.empty_like(v)
    for images, pairs, logits in plan.parts():
        plan.compose(policy[images], bank, logits)
        plan.mix(logits, v[images], out[images], sums[pairs])
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
    plan = Plan(v, bank, grid, window, shift, shift_mask, activation)
    grad_v, grad_policy, grad_bank = torch.empty_like(v), torch.empty_like(policy), None
    for images, pairs, logits in plan.parts():
        plan.compose(policy[images], bank, logits)
        plan.mix_backward(logits, v[images], out[images], sums[pairs], grad[images], grad_v[images])
        part = plan.compose_backward(logits, policy[images], bank, grad_policy[images])
        grad_bank = part if grad_bank is None else grad_bank + part
    assert grad_bank is not None
    return grad_v, grad_policy, grad_bank.to(bank.dtype)


class Plan:
    """Geometry and block sizes of one call, and its launches; all tensors are contiguous."""

    def __init__(
        self, v: Tensor, bank: Tensor, grid: Pair, window: Pair, shift: Pair, shift_mask: bool, activation: str
    ) -> None:
        self.batch, self.heads, self.dim, self.entries = v.shape[0], v.shape[2], v.shape[3], bank.shape[0]
        self.tokens = window[0] * window[1]
        self.windows = grid[0] * grid[1] // self.tokens
        self.map = (self.windows, *grid, *shift)
        self.window = (self.heads, *window)
        self.relative = bank.ndim == 2
        self.activation = (shift_mask and shift != (0, 0), activation)
        self.pitch = triton.cdiv(self.tokens, VECTOR) * VECTOR
        self.dtype, self.device = v.dtype, v.device

        self.block_d = max(16, triton.next_power_of_2(self.dim))
        self.block_k = max(16, triton.next_power_of_2(self.entries))
        half = self.dtype.itemsize == 2  # float32 products do not use tensor cores and need smaller blocks
        most = min(MAX_BLOCK, 16384 // self.block_d) if half else 64
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
        fits = self.dim <= 32 and TILE < self.tokens <= MAX_BLOCK
        self.tiled = half and fits and self.activation == (False, "softmax")
        if self.tiled:
            self.compose_programs = 4 * self.tokens

    def parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Parts of the batch: images, their pairs, and scratch memory for the pairs' logits."""
        size = self.tokens * self.pitch
        pairs = self.windows * self.heads
        images = max(1, SCRATCH_BYTES // (pairs * size * self.dtype.itemsize))
        scratch = torch.empty(min(images, self.batch) * pairs, size, device=self.device, dtype=self.dtype)
        for first in range(0, self.batch, images):
            last = min(first + images, self.batch)
            yield slice(first, last), slice(first * pairs, last * pairs), scratch[: (last - first) * pairs]

    def compose(self, policy: Tensor, bank: Tensor, logits: Tensor) -> None:
        """Write the logits of all pairs."""
        launch = self._compose_launch(len(logits), self.compose_p, self.compose_programs)
        compose_kernel[launch](
            policy, bank, logits, *self._compose_arguments(len(logits), self.compose_p), num_warps=self.compose_warps
        )

    def mix(self, logits: Tensor, v: Tensor, out: Tensor, sums: Tensor) -> None:
        """Write the mixed values, and the logarithms of softmax's sums."""
        if self.tiled:
            mix_tiles_kernel[(len(logits),)](
                logits, v, out, sums, *self.map, self.dim, *self.window, self.pitch, *self._tiles(),
                num_warps=4, num_stages=1,
            )  # fmt: skip
            return
        mix_kernel[len(logits), triton.cdiv(self.tokens, self.mix_block)](
            logits, v, out, sums, *self.map, self.dim, *self.window, *self.activation, self.pitch,
            self.block_all, self.mix_block, self.block_d, num_warps=self.mix_warps,
        )  # fmt: skip

    def mix_backward(self, logits: Tensor, v: Tensor, out: Tensor, sums: Tensor, grad: Tensor, grad_v: Tensor) -> None:
        """Write the gradient of the values, and replace the logits by theirs."""
        if self.tiled:
            mix_backward_tiles_kernel[len(logits), triton.cdiv(self.tokens, TILE)](
                logits, v, out, sums, grad, grad_v, *self.map, self.dim, *self.window, self.pitch, *self._tiles(),
                num_warps=4, num_stages=2, maxnreg=168,
            )  # fmt: skip
            return
        mix_backward_kernel[len(logits), triton.cdiv(self.tokens, self.mix_backward_rows)](
            logits, v, out, sums, grad, grad_v, *self.map, self.dim, *self.window, *self.activation, self.pitch,
            self.mix_backward_rows, self.mix_backward_block, self.block_d, num_warps=self.mix_backward_warps,
        )  # fmt: skip

    def compose_backward(self, grad_logits: Tensor, policy: Tensor, bank: Tensor, grad_policy: Tensor) -> Tensor:
        """Write the gradient of the policies; return the bank's, in float32."""
        launch = self._compose_launch(len(grad_logits), self.compose_backward_p, self.compose_backward_programs)
        _, parts, splits = launch
        by_part = grad_policy if parts == 1 else grad_policy.new_empty(parts, *grad_policy.shape, dtype=torch.float32)
        by_pair = bank.new_empty(splits, self.tokens, self.entries, self.tokens, dtype=torch.float32)
        compose_backward_kernel[launch](
            grad_logits, policy, bank, by_part, by_pair,
            *self._compose_arguments(len(grad_logits), self.compose_backward_p), num_warps=self.compose_backward_warps,
        )  # fmt: skip
        if parts > 1:
            grad_policy.copy_(by_part.sum(0))
        if not self.relative:
            return by_pair.sum(0).transpose(0, 1)
        table = torch.empty_like(bank, dtype=torch.float32)
        displacements_kernel[self.entries, triton.cdiv(table.shape[1], 64)](
            by_pair, table, self.entries, splits, *self.window[1:], 32, 64, num_warps=4
        )
        return table

    def _tiles(self) -> tuple[int, ...]:
        """BLOCK, REST, BLOCK_ALL and BLOCK_D of the tiled kernels."""
        rest = self.tokens % TILE
        return TILE, max(16, triton.next_power_of_2(rest)) if rest else 0, self.block_all, self.block_d

    def _compose_launch(self, pairs: int, block: int, programs: int) -> tuple[int, int, int]:
        """One program per source, part of the destinations and part of the pairs; enough to fill a GPU."""
        parts = triton.cdiv(self.tokens, self.compose_m)
        return self.tokens, parts, min(triton.cdiv(pairs, block), triton.cdiv(programs, self.tokens * parts))

    def _compose_arguments(self, pairs: int, block: int) -> tuple[object, ...]:
        return (
            pairs, *self.map, self.entries, *self.window, self.relative, self.pitch, block, self.compose_m, self.block_k
        )  # fmt: skip
