"""The report that `swap_mixer` returns."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tokamix.cost import count_exp, count_macs


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass of one image of a size.

    Attributes:
        image_size: height and width of the image.
        parameters: number of parameters.
        macs: multiply-accumulates.
        exp: evaluations of exp by kind, as `count_exp` counts them.
    """

    image_size: tuple[int, int]
    parameters: int
    macs: int
    exp: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module, image_size: tuple[int, int]) -> "Cost":
        """Count the cost of a model."""
        macs, exp = count_macs(model, image_size), dict(count_exp(model, image_size))
        return cls(image_size, sum(p.numel() for p in model.parameters()), macs, exp)


@dataclass
class SwapReport:
    """Changes made by `swap_mixer`; `str` gives them as text, `to_dict` as plain data.

    Attributes:
        mixer: name of the new mixer.
        replaced: name in the model and former class of each replaced attention.
        kept: name and reason of each module that still computes a softmax.
        dropped: parameters that the model no longer has.
        added: parameters and buffers that the model did not have, with their number of elements.
        carried: attentions whose relative position bias the new mixer starts from.
        activations: activations that became ReLU.
        notes: further changes that come with the mixer.
        before: cost before the swap, if an image size was given.
        after: cost after it.
    """

    mixer: str
    replaced: dict[str, str]
    kept: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    carried: list[str] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    before: Cost | None = None
    after: Cost | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        classes = ", ".join(sorted(set(self.replaced.values())))
        lines = [f"{len(self.replaced)} mixers replaced by {self.mixer} ({classes}): {', '.join(self.replaced)}"]
        if self.kept:
            reasons: dict[str, list[str]] = {}
            for name, reason in self.kept.items():
                reasons.setdefault(reason, []).append(name)
            lines += [f"{len(names)} kept, {reason}: {', '.join(names)}" for reason, names in reasons.items()]
        if self.dropped:
            lines.append(f"{len(self.dropped)} parameters dropped: {', '.join(self.dropped)}")
        if self.added:
            lines.append(
                f"{len(self.added)} parameters added ({sum(self.added.values()):,} values): {', '.join(self.added)}"
            )
        if self.carried:
            names = ", ".join(self.carried)
            lines.append(f"{len(self.carried)} relative position biases carried over into the banks of {names}")
        if self.activations:
            lines.append(f"{len(self.activations)} activations are ReLU now: {', '.join(self.activations)}")
        if self.before and self.after:
            height, width = self.before.image_size
            lines.append(
                f"at {height}x{width}: parameters {self.before.parameters:,} -> {self.after.parameters:,},"
                f" MACs {self.before.macs:,} -> {self.after.macs:,},"
                f" exp {sum(self.before.exp.values()):,} -> {sum(self.after.exp.values()):,}"
            )
        return "\n".join(lines + self.notes)
