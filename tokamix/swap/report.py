"""The report that `swap_mixer` returns."""

from dataclasses import dataclass


@dataclass
class SwapReport:
    """Changes made by `swap_mixer`.

    Attributes:
        replaced: name in the model and former class of each replaced attention.
        dropped: parameters that the model no longer has.
        activations: activations that became ReLU.
        notes: further changes that come with the mixer.
    """

    replaced: dict[str, str]
    dropped: list[str]
    activations: list[str]
    notes: list[str]

    def __str__(self) -> str:
        classes = ", ".join(sorted(set(self.replaced.values())))
        lines = [f"{len(self.replaced)} mixers replaced ({classes}): {', '.join(self.replaced)}"]
        if self.dropped:
            lines.append(f"{len(self.dropped)} parameters dropped: {', '.join(self.dropped)}")
        if self.activations:
            lines.append(f"{len(self.activations)} activations are ReLU now: {', '.join(self.activations)}")
        return "\n".join(lines + self.notes)
