"""Context broadcasting as a module, for the end of an MLP."""

from typing import Any

import torch
from torch import Tensor, nn

from tokamix.ops import broadcast_context

KINDS = ("cb", "cbs", "gate", "hybrid")


class ContextBroadcast(nn.Module):
    """Adds the average token back to every token; see `tokamix.ops.broadcast_context`.

    Args:
        dim: channels C.
        kind: "cb" (no parameters), "cbs" (a learned weight of the mean for each channel), "gate" or "hybrid".
        scale_init: initial value of the weights of "cbs"; with 1 it starts as "cb".
        class_token: whether the tokens begin with a class token, which "gate" and "hybrid" need.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        kind: str = "cb",
        scale_init: float = 1.0,
        class_token: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} of context broadcasting: choose one of {', '.join(KINDS)}")
        if kind in ("gate", "hybrid") and not class_token:
            raise ValueError(f"{kind!r} multiplies by the class token, but class_token is False: use 'cb' or 'cbs'")
        self.kind, self.class_token, self.scale_init = kind, class_token, scale_init
        scale = torch.empty(dim, device=device, dtype=dtype) if kind == "cbs" else None
        self.scale = nn.Parameter(scale) if scale is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weights of the mean."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.scale_init)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) -> tokens (B, N, C)."""
        kind = "cb" if self.kind == "cbs" else self.kind
        return broadcast_context(x, self.scale, kind, class_token=self.class_token)

    def extra_repr(self) -> str:
        """The kind, for print(model)."""
        return self.kind
