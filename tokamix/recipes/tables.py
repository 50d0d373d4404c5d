"""The tables of the recipes' page; `python -m tokamix.recipes.tables docs/recipes.md` writes them again."""

import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path

from tokamix.recipes import Recipe, list_recipes, recipe_rows

TITLES = ("recipe", "model", "data", "length", "printed", "source")
LABELS = {"miou": "mIoU", "miou_ms": "mIoU, multi-scale", "box_ap": "box AP", "mask_ap": "mask AP"}


def rows(dense: bool) -> list[tuple[str, str, str, str, str, str]]:
    """One row of text for each recipe and model, under TITLES: those of a paper together, ours first."""
    recipes = [recipe for name in list_recipes() for recipe in recipe_rows(name)]
    chosen = [recipe for recipe in recipes if (recipe.task != "classify") == dense]
    chosen.sort(key=lambda r: (r.source != "ours", r.source.partition(",")[0]))
    return [(r.name, r.model or "any", r.data or "any", duration(r), printed(r), r.source) for r in chosen]


def duration(recipe: Recipe) -> str:
    """How long it trains, in words."""
    if recipe.iterations is None:
        return f"{recipe.epochs} epochs"
    count = recipe.iterations
    return f"{count // 1000}k iterations" if count % 1000 == 0 else f"{count} iterations"


def printed(recipe: Recipe) -> str:
    """The numbers that the paper prints."""
    if recipe.task == "classify":
        return str(recipe.top1 or "")
    return ", ".join(f"{value} {LABELS.get(key, key)}" for key, value in recipe.printed.items())


def key_rows() -> list[tuple[str, str, str]]:
    """One row for each key of a recipe: its name, its default, what it is."""
    words = dict(re.findall(r"^ {8}(\w+): (.+)$", Recipe.__doc__ or "", re.MULTILINE))
    rows = []
    for f in fields(Recipe):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        shown = "" if default is MISSING else "none" if default is None else default
        shown = list(shown) if isinstance(shown, tuple) else str(shown).lower() if isinstance(shown, bool) else shown
        rows.append((f.name, str(shown), words[f.name]))
    return rows


def markdown(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column is code."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *([f"`{first}`", *rest] for first, *rest in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def fill(page: str) -> str:
    """The page with its tables as they are now; each stands between `<!-- name -->` and `<!-- end -->`."""
    tables = {
        "recipes": markdown((*TITLES[:4], "top-1", TITLES[5]), rows(dense=False)),
        "dense recipes": markdown(TITLES, rows(dense=True)),
        "keys": markdown(("key", "default", "what it is"), key_rows()),
    }
    for name, table in tables.items():
        if f"<!-- {name} -->" not in page:
            raise ValueError(f"the page has no place <!-- {name} --> for a table")
        before, start, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        page = f"{before}{start}\n{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill(path.read_text()))
