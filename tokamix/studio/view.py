"""What the tab Look shows, as a value that a link can carry."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tokamix._hints import suggest
from tokamix.explain import QUESTIONS
from tokamix.studio.photos import SAMPLES

MAX_MODELS = 3
MAX_NAME = 300  # characters of a model's name
DEFAULT_MODELS = tuple(f"pyramid_nano_{mixer}.imagenette" for mixer in ("sima", "active_token", "super_token"))
DEFAULT_PICTURES = ("mixing_row", "receptive_field", "sampled_positions", "super_token_regions")


@dataclass(frozen=True)
class View:
    """A photo, models, questions and a token.

    Attributes:
        photo: a sample's name, or the key of an upload.
        models: up to three names.
        pictures: keys of `tokamix.explain.QUESTIONS`.
        layer: counted from 1; 0: a late one of each model.
        head: counted from 1; 0: the mean over heads.
        y: of the token, from 0 (top) to 1.
        x: of the token, from 0 (left) to 1.
    """

    photo: str = SAMPLES[0]
    models: tuple[str, ...] = DEFAULT_MODELS
    pictures: tuple[str, ...] = DEFAULT_PICTURES
    layer: int = 0
    head: int = 0
    y: float = 0.5
    x: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= len(self.models) <= MAX_MODELS:
            raise ValueError(f"choose one to {MAX_MODELS} models")
        if any(not name or len(name) > MAX_NAME for name in self.models):
            raise ValueError(f"the name of a model has 1 to {MAX_NAME} characters")
        for key in self.pictures:
            if key not in QUESTIONS:
                raise ValueError(f"there is no picture {key[:50]!r}; {suggest(key[:50], QUESTIONS)}")
        if not (0 <= self.y <= 1 and 0 <= self.x <= 1):
            raise ValueError("the token is outside of the image: give fractions from 0 to 1")
        if self.layer < 0 or self.head < 0:
            raise ValueError("layers and heads are counted from 1; 0 is the default")

    @property
    def query(self) -> str:
        """The view as the query of an address; an uploaded photo is not part of it."""
        values = {"photo": self.photo} if self.photo in SAMPLES else {}
        values |= {"models": ",".join(self.models), "pictures": ",".join(self.pictures)}
        values |= {"layer": str(self.layer), "head": str(self.head), "token": f"{self.y:.3g},{self.x:.3g}"}
        return urlencode(values, safe=",")

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "View":
        """The view of an address; what the address does not say has its default."""
        values: dict[str, Any] = {key: tuple(query[key].split(",")) for key in ("models", "pictures") if query.get(key)}
        if query.get("photo"):
            values["photo"] = query["photo"]
            if values["photo"] not in SAMPLES:
                raise ValueError(f"there is no sample {query['photo'][:50]!r}: choose one of {', '.join(SAMPLES)}")
        try:
            values |= {key: int(query[key]) for key in ("layer", "head") if query.get(key)}
            if query.get("token"):
                values["y"], values["x"] = map(float, query["token"].split(","))
        except ValueError:
            raise ValueError("the link is damaged: layer and head are numbers, the token is two fractions") from None
        return cls(**values)
