"""Hints for unknown names in error messages."""

import difflib
from collections.abc import Iterable


def suggest(name: str, names: Iterable[str], otherwise: str | None = None) -> str:
    """Suggest the most similar of `names`: "did you mean sima?".

    Args:
        name: the unknown name.
        names: the possible names.
        otherwise: the hint if no name is similar; None lists all names.
    """
    names = list(names)
    similar = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    return otherwise or f"choose one of {', '.join(names)}"
