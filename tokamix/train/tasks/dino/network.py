"""Student and teacher of DINO: two backbones with projection heads, of which the first alone gets gradients."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn


class DinoHead(nn.Module):
    """Three layers to a narrow, normalised vector, and its products with `out_dim` vectors of norm 1.

    Args:
        in_dim: features of the backbone.
        out_dim: outputs.
        hidden_dim: width of the hidden layers.
        bottleneck_dim: width of the normalised vector.
        norm_last_layer: the vectors of the last layer keep norm 1; otherwise their norms are learned.
        batch_norm: BatchNorm in the hidden layers.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        hidden_dim: int,
        bottleneck_dim: int,
        norm_last_layer: bool = True,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = (in_dim, hidden_dim, hidden_dim, bottleneck_dim)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            linear = nn.Linear(before, after)
            trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.BatchNorm1d(after), nn.GELU()] if batch_norm else [linear, nn.GELU()]
        self.mlp = nn.Sequential(*layers[: -2 if batch_norm else -1])
        # of the last layer; only their directions matter, but the shorter they are, the faster these change
        self.directions = nn.Parameter(nn.Linear(bottleneck_dim, out_dim, bias=False).weight.detach())
        self.norms = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, in_dim) -> logits (B, out_dim), in float32: the teacher divides them by 0.04."""
        x = self.mlp(x)
        with torch.autocast(x.device.type, enabled=False):
            x = F.normalize(x.float(), dim=-1)
            return F.linear(x, F.normalize(self.directions, dim=-1) * self.norms)


class Branch(nn.Module):
    """A backbone and its head."""

    def __init__(self, backbone: nn.Module, head: DinoHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head


class DinoNetwork(nn.Module):
    """Student and teacher; both start with the same weights.

    The teacher's weights follow the student's. It has no stochastic depth and no dropout; its BatchNorm layers, like
    the student's, normalise by the statistics of the batch and keep running ones of their own, as in the published
    code.

    Args:
        backbone: returns features (B, in_dim) of images.
        head: of the student.
    """

    center: Tensor

    def __init__(self, backbone: nn.Module, head: DinoHead) -> None:
        super().__init__()
        self.student = Branch(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for module in self.teacher.modules():
            if isinstance(module, DropPath):
                module.drop_prob = 0.0
            elif isinstance(module, nn.Dropout):
                module.p = 0.0
        self.register_buffer("center", torch.zeros(len(head.directions)))

    def forward(self, crops: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Crops of each size (n * B, C, H, W), the global ones first -> logits of student and teacher, and features.

        Returns:
            the student's logits of all crops, the teacher's logits of the global ones, and their features.
        """
        student = self.student.head(torch.cat([self.student.backbone(x) for x in crops]))
        with torch.no_grad():
            features = self.teacher.backbone(crops[0])
            return student, self.teacher.head(features), features

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """Move the teacher's weights towards the student's."""
        pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
        torch._foreach_lerp_([teacher for teacher, _ in pairs], [student for _, student in pairs], 1 - momentum)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay: those of the backbone."""
        names_of_backbone = getattr(self.student.backbone, "no_weight_decay", None)
        names = names_of_backbone() if callable(names_of_backbone) else ()
        return {f"student.backbone.{name}" for name in names}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the student's blocks in the backward pass."""
        self.student.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]
