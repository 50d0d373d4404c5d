"""The demo's trainings; the whole command is tested in tests/test_cli.py."""

from pathlib import Path

import pytest
import torch

from tokamix.demo.run import ENTRANTS, Job, _all
from tokamix.recipes import load_recipe


def jobs(folder: Path) -> list[Job]:
    return [Job(entrant, entrant.recipe(0, quick=True), folder / entrant.key, True) for entrant in ENTRANTS[::3]]


def test_trainings_side_by_side_are_the_same(tmp_path, monkeypatch) -> None:
    pytest.importorskip("sklearn")
    alone = list(_all(jobs(tmp_path / "alone")))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    beside = list(_all(jobs(tmp_path / "beside")))
    assert len(alone) == len(beside) == 2
    for a, b in zip(sorted(tmp_path.glob("alone/*/last*")), sorted(tmp_path.glob("beside/*/last*")), strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_only_the_mixer_differs() -> None:
    """Everything that decides about a training is the recipe's, but for the mixer and context broadcasting."""
    recipe = load_recipe("digits")
    for entrant in ENTRANTS:
        own = entrant.recipe(0, quick=False)
        assert own.model == f"columnar_tiny_{entrant.mixer}"
        kwargs = own.model_kwargs | {}
        assert kwargs.pop("context_broadcast") == entrant.context_broadcast
        assert kwargs == recipe.model_kwargs
        same = set(own.to_dict()) - {"model", "model_kwargs"}
        assert {key: getattr(own, key) for key in same} == {key: getattr(recipe, key) for key in same}
