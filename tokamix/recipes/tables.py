"""Generate the tables of docs/recipes.md: `python -m tokamix.recipes.tables docs/recipes.md`."""

import csv
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path

from tokamix.recipes.load import list_recipes, recipe_rows
from tokamix.recipes.schema import RECIPES, Recipe, default_of, type_hints

TITLES = ("recipe", "model", "data", "length", "printed", "source")
RESULTS = Path(__file__).parents[2] / "results/studies/recipes.csv"
# measured in the table of results above it, on the pages of the shipped weights and of self-supervised training
ON_OTHER_PAGES = (
    "cifar100_fast",
    "cifar100_pyramid",
    "imagenette",
    "cifar100_nano",
    "imagenette_nano",
    "imagenette_dino",
)
METRICS = {"classify": "% top-1", "segment": "mIoU", "detect": "mask AP", "dino": "% 20-NN", "vqa": "% accuracy"}
LABELS = {"miou": "mIoU", "miou_ms": "mIoU, multi-scale", "box_ap": "box AP", "mask_ap": "mask AP", "knn": "20-NN"}


def rows(*tasks: str) -> list[tuple[str, str, str, str, str, str]]:
    """One row of text for each recipe of some tasks and model, under TITLES, grouped by paper, ours first."""
    recipes = [recipe for name in list_recipes() for recipe in recipe_rows(name)]
    chosen = [recipe for recipe in recipes if recipe.task in tasks]
    chosen.sort(key=lambda r: (r.source != "ours", r.source.partition(",")[0]))
    return [(r.name, r.model or "any", r.data or "any", duration(r), printed(r), r.source) for r in chosen]


def duration(recipe: Recipe) -> str:
    """The length of training, in words."""
    if recipe.iterations is None:
        return f"{recipe.epochs} epochs"
    count = recipe.iterations
    return f"{count // 1000}k iterations" if count % 1000 == 0 else f"{count} iterations"


def printed(recipe: Recipe) -> str:
    """The numbers that the paper prints."""
    numbers = getattr(recipe, "printed", {})  # of dense recipes
    words = ", ".join(f"{value} {LABELS.get(key, key)}" for key, value in numbers.items())
    return words or str(getattr(recipe, "top1", None) or "")


def measured_rows(results: Path = RESULTS) -> list[tuple[str, str, str, str, str, str]]:
    """Recipe, model, data, result, training time and device of our recipes that `tokamix study recipes` runs.

    Recipes that are measured elsewhere are left out.
    """
    found: dict[str, dict[str, str]] = {}
    with suppress(FileNotFoundError), results.open(newline="") as file:
        csv.field_size_limit(10**8)
        found = {row["arm"]: row for row in csv.DictReader(file) if row["status"] == "finished"}
    table = []
    for recipe in (recipe for name in list_recipes() for recipe in recipe_rows(name)):
        if recipe.source != "ours" or recipe.name in ON_OTHER_PAGES:
            continue
        if (row := found.get(recipe.name)) is None:
            table.append((recipe.name, recipe.model or "any", recipe.data or "any", "not measured", "", ""))
            continue
        shared = f", {row['processes']} runs at a time" if int(row["processes"]) > 1 else ""
        images = f", {int(row['train_images']):,} images" if row["train_images"] else ""
        result = f"{float(row['score']):.1f} {METRICS[recipe.task]}"
        device = "CPU" if row["gpu"] == "cpu" else row["gpu"]
        table.append(
            (
                recipe.name,
                row["model"],
                row["data"] + images,
                result,
                f"{float(row['train_seconds']):.0f} s",
                device + shared,
            )
        )
    return table


def key_rows() -> list[tuple[str, str, str, str]]:
    """One row for each key of the recipes: its name, the tasks that have it, its default and its meaning."""
    classes = dict.fromkeys(c for schema in RECIPES.values() for c in reversed(schema.mro()) if issubclass(c, Recipe))
    ordered = sorted(classes, key=lambda schema: len(schema.mro()))  # shared keys first
    rows: dict[str, tuple[str, str, str, str]] = {}
    for schema in ordered:
        meanings = dict(re.findall(r"^ {8}(\w+): (.+)$", schema.__doc__ or "", re.MULTILINE))
        for key in type_hints(schema):
            tasks = [task for task, other in RECIPES.items() if key in type_hints(other)]
            default = "classify" if key == "task" else default_of(schema, key)
            shown = "required" if default is MISSING else "none" if default is None else default
            shown = list(shown) if isinstance(shown, tuple) else shown
            shown = str(shown).lower() if isinstance(shown, bool) else str(shown)
            row = key, "all" if len(tasks) == len(RECIPES) else ", ".join(tasks), shown, meanings.get(key, "")
            if key not in rows:
                rows[key] = row
            elif key == "method":
                rows[key] = key, row[1], shown, f"{rows[key][3].rstrip('.')} (segment); {row[3].rstrip('.')} (detect)."
    return list(rows.values())


def markdown(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column is code."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *([f"`{first}`", *rest] for first, *rest in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def fill(page: str) -> str:
    """The page with its tables regenerated; each stands between `<!-- name -->` and `<!-- end -->`."""
    titles = ("recipe", "model", "data", "result", "training time", "device")
    tables = {
        "measured recipes": markdown(titles, measured_rows()),
        "recipes": markdown((*TITLES[:4], "top-1", TITLES[5]), rows("classify")),
        "dense recipes": markdown(TITLES, rows("segment", "detect")),
        "self-supervised recipes": markdown(TITLES, rows("dino")),
        "question answering recipes": markdown(TITLES, rows("vqa")),
        "keys": markdown(("key", "task", "default", "meaning"), key_rows()),
    }
    for name, table in tables.items():
        if f"<!-- {name} -->" not in page:
            raise ValueError(f"the page has no marker <!-- {name} --> for a table")
        before, start, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        page = f"{before}{start}\n{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill(path.read_text()))
