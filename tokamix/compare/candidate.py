"""`Candidate`: a mixer in a comparison."""

from dataclasses import dataclass
from typing import Self

from tokamix.mixers.registry import get_mixer


@dataclass(frozen=True)
class Candidate:
    """A mixer in a comparison, as the page presents it.

    Attributes:
        key: name of its folder.
        title: name on the page.
        mixer: registered name.
        description: one line on the page.
        link: address of its paper.
        context_broadcast: "cb" or "cbs" adds context broadcasting to each MLP.
    """

    key: str
    title: str
    mixer: str
    description: str = ""
    link: str = ""
    context_broadcast: str | None = None

    @classmethod
    def from_registry(cls, mixer: str) -> Self:
        """A registered mixer with the title and address of its paper."""
        entry = get_mixer(mixer)
        kind, _, number = entry.paper_ids.partition(":")
        link = {"arxiv": f"https://arxiv.org/abs/{number}", "doi": f"https://doi.org/{number}"}.get(kind.lower(), "")
        return cls(mixer, mixer, mixer, entry.paper_name, link)
