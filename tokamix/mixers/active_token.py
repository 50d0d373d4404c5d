"""The active token mixer: each channel of a token samples other tokens at learned offsets."""

from typing import Any

import torch
from torch import Tensor, nn

from tokamix.layers import LayerNorm, LinearSequential, Mlp, apply_linear, tokens_to_map
from tokamix.ops import active_gather_axes, active_gather_joint, dispatch
from tokamix.ops.active_token.op import GatherPlan, plan_gather_axes
from tokamix.ops.branch_fusion.op import branch_summary, fuse_branches
from tokamix.ops.precision import to_autocast_dtype

OFFSETS = ("axial", "joint", "zero")


class ActiveOffset(LinearSequential):
    """Predicts sampling offsets: LayerNorm, then Linear to two offsets for each context and `share` channels.

    Tokens (..., C) -> (..., contexts * 2 * C / share): for each context first the offsets along the width, then those
    along the height, in tokens.
    """

    def __init__(self, dim: int, share: int = 4, contexts: int = 1, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        if dim % share:
            raise ValueError(f"{dim} channels cannot share offsets in groups of {share}: choose a divisor of {dim}")
        super().__init__(LayerNorm(dim, **dd), nn.Linear(dim, contexts * 2 * (dim // share), **dd))


class ActiveTokenMixer(nn.Module):
    """Recomposes tokens along the width and along the height and fuses them with the query token.

    Active Token Mixer, arXiv 2203.06108, as in the authors' code where the paper differs: positions are fractional; the
    fusion weighs the *embedded* branches, with one weight for each channel and image, from the mean over all tokens
    (the paper's equations 3 and 4 can be read as one for each token); a last Linear follows.

    The ablations of the paper's figure 2 leave details open. "joint" recomposes one token from bilinear samples, so two
    branches are fused instead of three. With several `contexts`, one Linear embeds all the samples of a direction, and
    each sample starts at the query token.

    Args:
        dim: channels.
        share: neighbouring channels that share an offset.
        contexts: samples for each channel and direction.
        offsets: "axial"; "joint", one offset along both axes; "zero", the baseline of the paper's table 8
            without mixing.
        predict: whether the mixer has its own offset layer, for calls without `offset`.
        out_dim: channels of the mixed tokens; None for `dim`.
    """

    def __init__(
        self,
        dim: int,
        share: int = 4,
        contexts: int = 1,
        offsets: str = "axial",
        predict: bool = True,
        out_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if offsets not in OFFSETS:
            raise ValueError(f"unknown kind {offsets!r} of offsets: choose one of {', '.join(OFFSETS)}")
        out_dim = out_dim or dim
        self.offsets, self.contexts = offsets, contexts
        directions = 1 if offsets == "joint" else 2
        self.offset = ActiveOffset(dim, share, contexts, **dd) if predict and offsets != "zero" else None
        self.embed = nn.ModuleList(nn.Linear(contexts * dim, out_dim, **dd) for _ in range(directions))  # width, height
        self.embed_query = nn.Linear(dim, out_dim, bias=False, **dd)
        self.fusion = Mlp(out_dim, max(out_dim // 4, 1), (directions + 1) * out_dim, **dd)
        self.proj = nn.Linear(out_dim, out_dim, **dd)

    def forward(self, x: Tensor, grid: tuple[int, int], offset: Tensor | GatherPlan | None = None) -> Tensor:
        """Mix tokens.

        Args:
            x: tokens (B, H*W, C).
            grid: (H, W).
            offset: (B, H*W, contexts * 2 * C / share), see `ActiveOffset`, or the result of `plan`; None predicts
                them from x.
        """
        if offset is None and self.offset is not None:
            offset = self.offset(x)
        x = to_autocast_dtype(x)
        samples = self._sample(x, grid, offset)
        branches = [apply_linear(embed, sample) for embed, sample in zip(self.embed, samples, strict=True)]
        branches.append(apply_linear(self.embed_query, x))
        logits = self.fusion(branch_summary(branches))
        return apply_linear(self.proj, fuse_branches(branches, logits))

    def plan(self, x: Tensor, grid: tuple[int, int], offset: Tensor) -> Tensor | GatherPlan:
        """Offsets in the cheapest form for several mixers that use the same offsets on tokens of the shape of x.

        Only in inference mode: a plan does not pass gradients through gradient checkpoints, and takes more memory.
        """
        fixed = dispatch.is_exporting_fixed(*x.shape, *grid)
        if not fixed and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled()):
            return offset
        if self.offsets != "axial" or self.contexts > 1 or dispatch.prefers_kernels(x):
            return offset
        plan = plan_gather_axes(tokens_to_map(x, grid), tokens_to_map(offset, grid))
        return plan if isinstance(plan, GatherPlan) else offset

    def _sample(self, x: Tensor, grid: tuple[int, int], offset: Tensor | GatherPlan | None) -> list[Tensor]:
        """The samples of each direction, (B, H*W, contexts * C) each."""
        if self.offsets == "zero":
            return [x.repeat(1, 1, self.contexts) if self.contexts > 1 else x] * len(self.embed)
        if offset is None:
            raise ValueError("a mixer created with predict=False does not predict offsets: pass offset")
        x = tokens_to_map(x, grid)
        if isinstance(offset, GatherPlan):
            return [s.flatten(1, 2) for s in active_gather_axes(x, offset)]
        if self.offsets == "axial" and self.contexts == 1:
            return [s.flatten(1, 2) for s in active_gather_axes(x, tokens_to_map(offset, grid))]
        samples = []  # by context, then by direction
        for part in tokens_to_map(offset, grid).chunk(self.contexts, dim=-1):
            samples.append(active_gather_axes(x, part) if self.offsets == "axial" else (active_gather_joint(x, part),))
        if self.contexts == 1:
            return [s.flatten(1, 2) for s in samples[0]]
        return [torch.cat(direction, dim=-1).flatten(1, 2) for direction in zip(*samples, strict=True)]
