"""Adaptive weight mixing: each token composes its mixing weights from a bank."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tokamix.layers import LinearSequential, apply_linear, tokens_to_map
from tokamix.ops import bank_mixing, cpu, dispatch, resize_bank
from tokamix.ops.precision import to_autocast_dtype
from tokamix.ops.weight_mixing.reference import expand_bank

Pair = tuple[int, int]
MAX_KEPT = 2_000_000  # values of a bank's matrices, 8 MB, that are kept between calls for inference on a CPU
POLICY_ACTIVATIONS = ("identity", "softmax", "sigmoid")


class WeightMixing(nn.Module):
    """Mixes the tokens of a window with weights composed from a bank instead of attention.

    AMixer: Adaptive Weight Mixing for Self-Attention Free Vision Transformers, ECCV 2022. A small network, the adapter,
    computes each token's policy over the bank; `tokamix.ops.bank_mixing` does the rest. The pseudocode applies the
    value projection to single heads, which its shapes do not allow; here, as in the authors' code, it precedes the
    split.

    On a grid other than the window, with `partition` the map is padded with zeros at the right and bottom (which take
    part, as in the authors' code) and cut into windows; without, the whole grid is one window and the bank is resized.

    Args:
        dim: channels C.
        window: side or (h, w) of the window of the bank.
        num_heads: heads, each with its own weights.
        bank_size: entries K of the bank; None for 1.5 times the heads.
        activation: normalisation over sources: "softmax", "identity", "l2", "sigmoid" or "layernorm".
        policy_activation: normalisation over the bank: "identity", "softmax" or "sigmoid".
        adaptive: whether the weights depend on the tokens; if not, the bank holds one entry for each head.
        relative: one bank weight for each displacement; False for one for each pair of positions (one size only).
        v_proj: project tokens to values.
        out_proj: project the result.
        partition: cut the map into windows.
        shift: shift of the windows down and right (with `partition`).
        shift_mask: do not mix tokens from opposite borders in shifted windows; the authors' code mixes them.
        backend: the operator's backend; see `tokamix.ops.dispatch`.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        window: int | Pair,
        num_heads: int = 8,
        bank_size: int | None = None,
        activation: str = "softmax",
        policy_activation: str = "identity",
        adaptive: bool = True,
        relative: bool = True,
        v_proj: bool = True,
        out_proj: bool = True,
        partition: bool = False,
        shift: int | Pair = 0,
        shift_mask: bool = True,
        backend: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{dim} channels do not divide into {num_heads} heads; choose a divisor of {dim}")
        if policy_activation not in POLICY_ACTIVATIONS:
            possible = ", ".join(POLICY_ACTIVATIONS)
            raise ValueError(f"unknown policy activation {policy_activation!r}: choose one of {possible}")
        self.num_heads, self.activation, self.policy_activation = num_heads, activation, policy_activation
        self.window = (window, window) if isinstance(window, int) else window
        self.partition, self.shift_mask, self.backend = partition, shift_mask, backend
        self.shift = (shift, shift) if isinstance(shift, int) else shift
        size = int(1.5 * num_heads) if bank_size is None else bank_size
        h, w = self.window
        entries = ((2 * h - 1) * (2 * w - 1),) if relative else (h * w, h * w)
        self.bank = nn.Parameter(torch.empty(size if adaptive else num_heads, *entries, **dd))
        self.adapter: nn.Module | None = None
        if adaptive:
            self.adapter = LinearSequential(
                nn.Linear(dim, dim // 4, **dd), nn.GELU(), nn.Linear(dim // 4, size * num_heads, **dd)
            )
        self.v = nn.Linear(dim, dim, **dd) if v_proj else nn.Identity()
        self.proj = nn.Linear(dim, dim, **dd) if out_proj else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise small bank weights: nearly uniform mixing under softmax."""
        nn.init.normal_(self.bank, std=0.02)

    def set_window(self, window: Pair, shift: Pair = (0, 0)) -> None:
        """Resize the bank to another window, and set the windows' shift."""
        if window != self.window:
            self._check_relative(window)
            bank = resize_bank(self.bank.detach(), self.window, window)
            self.bank = nn.Parameter(bank, requires_grad=self.bank.requires_grad)
        self.window, self.shift = window, shift

    def set_grid(self, grid: Pair) -> None:
        """Resize the bank to another grid if the window is the whole grid."""
        if not self.partition:
            self.set_window(grid)

    def fit(self, bank: Tensor) -> Tensor:
        """Resize a checkpoint's bank, made for a square window, to this window."""
        if bank.ndim == 3:
            return bank
        side = (math.isqrt(bank.shape[1]) + 1) // 2
        return resize_bank(bank, (side, side), self.window)

    def forward(self, x: Tensor, grid: Pair, policy_embed: Tensor | None = None) -> Tensor:
        """Mix tokens x (B, H*W, C) of grid (H, W); `policy_embed` (h*w, C) is added to the adapter's input."""
        with dispatch.sizes_unknown():
            return self._mix(x, grid, policy_embed)

    def _mix(self, x: Tensor, grid: Pair, policy_embed: Tensor | None) -> Tensor:
        height, width = grid
        window, shift = grid, (0, 0)
        bank: Tensor = self.bank
        if self.partition:
            window, shift = self.window, self.shift
            # ONNX export mistranslates -(-height // window[0]) with symbolic sizes
            rows, columns = (height + window[0] - 1) // window[0], (width + window[1] - 1) // window[1]
            grid = (rows * window[0], columns * window[1])
            if padded := not _known_equal(grid, (height, width)):
                pad = (0, 0, 0, grid[1] - width, 0, grid[0] - height)
                x = F.pad(tokens_to_map(x, (height, width)), pad).flatten(1, 2)
        elif not _known_equal(grid, self.window):
            self._check_relative(grid)
            bank = resize_bank(bank, self.window, grid)

        if bank is self.bank and self._is_kept(x):
            bank = cpu.keep(bank, f"matrices {window}", lambda: expand_bank(self.bank, window))
        x = to_autocast_dtype(x)  # once for both projections
        v, policy = apply_linear(self.v, x), None
        if self.adapter is not None:
            policy = self._policy(x if policy_embed is None else x + self._tile(policy_embed, grid))
            v = v.to(policy.dtype)
        x = bank_mixing(
            v.unflatten(2, (self.num_heads, -1)),
            policy,
            bank,
            grid,
            window,
            shift,
            self.shift_mask,
            self.activation,
            self.backend,
        ).flatten(2)
        if self.partition and padded:
            x = tokens_to_map(x, grid)
            # ExecuTorch has no negative padding; a slice would specialise a graph of any size to those that need it
            fixed = dispatch.is_exporting_fixed(height, width)
            x = x[:, :height, :width] if fixed else F.pad(x, [-n for n in pad])
            x = x.flatten(1, 2)
        return apply_linear(self.proj, x)

    def _is_kept(self, x: Tensor) -> bool:
        """Whether the matrices made of the bank are kept between calls: for inference on a CPU, where this is slow."""
        small = self.bank.ndim == 2 and len(self.bank) * (self.window[0] * self.window[1]) ** 2 <= MAX_KEPT
        return small and self.adapter is not None and self.bank.dtype is x.dtype and cpu.usable(x)

    def _policy(self, x: Tensor) -> Tensor:
        assert self.adapter is not None
        if dispatch.is_exporting_to("onnx", "openvino"):
            policy = self._heads_first(x)
        else:
            policy = self.adapter(x).unflatten(2, (-1, self.num_heads))  # (B, N, K, heads)
        if self.policy_activation == "softmax":
            return policy.softmax(2).to(policy.dtype)
        return policy.sigmoid() if self.policy_activation == "sigmoid" else policy

    def _heads_first(self, x: Tensor) -> Tensor:
        """The adapter with permuted weights, which are constants of an ONNX graph: its output is not transposed."""
        assert isinstance(self.adapter, nn.Sequential)
        last: Any = self.adapter[-1]
        weight, bias = (
            t.unflatten(0, (-1, self.num_heads)).transpose(0, 1).flatten(0, 1) for t in (last.weight, last.bias)
        )
        hidden = self.adapter[:-1](x)
        return F.linear(hidden, weight, bias).unflatten(2, (self.num_heads, -1)).transpose(2, 3)  # (B, N, K, heads)

    def _tile(self, embed: Tensor, grid: Pair) -> Tensor:
        """Repeat a window's embedding (h*w, C) over the windows of a grid -> (H*W, C)."""
        (h, w), channels = self.window, embed.shape[-1]
        tiled = embed.view(1, h, 1, w, channels).expand(grid[0] // h, h, grid[1] // w, w, channels)
        return tiled.reshape(*grid, channels).roll(self.shift, (0, 1)).flatten(0, 1)

    def _check_relative(self, window: Pair) -> None:
        if self.bank.ndim == 3:
            raise ValueError(f"an absolute bank for {self.window} cannot be resized to {window}; use relative=True")


def _known_equal(a: Pair, b: Pair) -> bool:
    """Whether two sizes are known to be equal; False for symbolic sizes, so that graphs are not specialised."""
    return bool(statically_known_true(a[0] == b[0]) and statically_known_true(a[1] == b[1]))
