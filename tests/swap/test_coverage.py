"""The recorded sweep over timm, docs/_scripts/swap.py: the number of models that can be swapped does not fall."""

import json
from pathlib import Path

import timm

from tests.swap.hosts import is_missing
from tokamix.swap.inspect import ADAPTERS, KEPT

RECORD = json.loads((Path(__file__).parent / "coverage.json").read_text())


def test_coverage_does_not_fall() -> None:
    """The names whose modules with softmax all have adapters, or are kept for a reason, counted from the tables."""
    groups = {tuple(classes.split()): count for classes, count in RECORD["groups"].items()}
    assert sum(groups.values()) == RECORD["names"]
    covered = sum(
        count
        for classes, count in groups.items()
        if all(name in ADAPTERS or name in KEPT for name in classes) and any(name in ADAPTERS for name in classes)
    )
    assert covered == RECORD["swapped"]
    assert covered >= 674


def test_the_tables_name_classes_of_timm() -> None:
    """A misspelt name would never be found."""
    missing = []
    for path in (*ADAPTERS, *KEPT):
        module, _, name = path.rpartition(".")
        if is_missing(module.removeprefix("timm.models.")):
            continue
        if module.startswith("timm.") and not hasattr(__import__(module, fromlist=[name]), name):
            missing.append(path)
    assert not missing, timm.__version__
