"""The demo: its candidates and recipes. The comparison itself is tested in tests/compare."""

import re
from pathlib import Path

import pytest

from tests.cli.test_cli import call
from tests.compare.conftest import quick  # noqa: F401
from tokamix.demo import CANDIDATES
from tokamix.demo.run import QUICK, create_recipe
from tokamix.mixers import list_mixers
from tokamix.recipes import load_recipe


def test_only_the_mixer_differs() -> None:
    """All values are those of the recipe `digits`, except for the mixer and context broadcasting."""
    recipe = load_recipe("digits")
    for candidate in CANDIDATES:
        own = create_recipe(candidate, 0)
        assert own.model == f"columnar_tiny_{candidate.mixer}"
        kwargs = dict(own.model_kwargs)
        assert kwargs.pop("context_broadcast") == candidate.context_broadcast
        assert kwargs == recipe.model_kwargs
        same = set(own.to_dict()) - {"model", "model_kwargs"}
        assert {key: getattr(own, key) for key in same} == {key: getattr(recipe, key) for key in same}


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in the table and on the page; a folder keeps one demo."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr("tokamix.demo.run.QUICK", {**QUICK, "model_kwargs.depth": 1})
    out = call("demo", "--quick", "--output", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    table = out.partition("token mixer")[2]
    for candidate in CANDIDATES:
        row = next(line for line in table.splitlines() if line.startswith(candidate.title))
        accuracy, parameters = row.removeprefix(candidate.title).split()[:3:2]
        assert re.search(f">{candidate.title}</a>.*<td>{accuracy}\u00a0%</td><td>{parameters}", page)
    rows = out.partition("all mixers, untrained")[2].split()
    assert all(mixer in rows and f"<code>{mixer}</code>" in page for mixer in list_mixers())
    assert len(list(tmp_path.rglob("last.safetensors"))) == len(CANDIDATES) == 6
    again = " ".join(call("demo", "--output", str(tmp_path), code=1).split())  # the folder's name breaks lines
    assert "are not trained again" in again
    assert "settings: " in again
