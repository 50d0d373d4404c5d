"""Reading recipes: files, rows of tables and overrides.

One YAML file is one row of a paper's table, or one of our own settings for small data; a user's file has the same form.
`extends: name` takes the values of another recipe (of the library, or of a file beside it) and replaces some of them.
Where the rows of a table differ in the model and little else, one file holds them all: `rows: {model: {key: value}}`.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tokamix.recipes.schema import RECIPES, Recipe, create_recipe, default_of, nearest

FOLDER = Path(__file__).parent
_log = logging.getLogger("tokamix")


def list_recipes() -> list[str]:
    """Names of the library's recipes."""
    return sorted(path.stem for path in FOLDER.rglob("[!_]*.yaml"))


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    model: str | None = None,
    task: str | None = None,
) -> Recipe:
    """Load a recipe of the library by its name, or a YAML file, as the class of its task.

    Warm-up, milestones and the evaluation interval scale with `epochs` or `iterations` where these are overridden.

    Args:
        name_or_path: a name of `list_recipes()`, or a path that ends in .yaml or .yml, such as a run's recipe.yaml.
        overrides: strings such as "lr=1e-3" or "model_kwargs.depth=6", or a mapping of the same keys.
        model: selects the row of this model where the file has rows; default: the row of the file's own model.
        task: the task that the recipe must have; a file that states none gets this one.
    """
    path = _find(str(name_or_path))
    values = {"name": path.stem} | _read(path, ())
    overrides = load_overrides(overrides)
    values.setdefault("task", task if task and FOLDER not in path.parents else "classify")
    if task is not None and values["task"] != task:
        raise ValueError(f"the recipe {values['name']} is for task {values['task']}, not {task}; name another recipe")
    _select_row(values, model or overrides.get("model"))
    if "epochs" in overrides and values.get("iterations") and overrides.get("iterations", 1) not in (None, "none"):
        raise ValueError(
            f"recipe {values['name']}: it has {values['iterations']} iterations, not epochs; set iterations=..., or"
            " iterations=none and eval_every=none as well"
        )
    before = dict(values)
    for key, value in overrides.items():
        key, dot, inner = key.partition(".")
        if dot:
            if not isinstance(mapping := values.get(key, {}), dict):
                raise ValueError(f"recipe {values['name']}: {key} is {mapping!r}, which has no {inner!r} to set")
            value = {**mapping, yaml.load(inner, Loader): value}  # a key such as 260 is a number
        values[key] = value
    _scale_schedule(before, values, {key.partition(".")[0] for key in overrides})
    return create_recipe(values)


def load_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Parse strings such as "lr=1e-3" into keys and values."""
    return dict(overrides if isinstance(overrides, Mapping) else map(_parse, overrides))


def recipe_rows(name: str) -> list[Recipe]:
    """A recipe of the library for each model that it has a row for."""
    rows = _read(_find(name), ()).get("rows") or {None: {}}
    return [load_recipe(name, model=model) for model in rows]


def _select_row(values: dict[str, Any], model: Any) -> None:
    """Apply the row of this model; a model without a row keeps the file's own values."""
    rows = values.pop("rows", None)
    if rows is None:
        return
    if not (isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values())):
        raise ValueError(f"recipe {values['name']}: rows is {rows!r}, but must be a mapping of models to their values")
    model = model or values.get("model") or next(iter(rows), None)
    if model in rows:
        values |= {"model": model, **rows[model]}


def _scale_schedule(before: dict[str, Any], values: dict[str, Any], overridden: set[str]) -> None:
    """Scale warm-up, milestones and evaluation interval with an overridden length, unless overridden themselves."""
    schema = RECIPES.get(values.get("task", "classify"), Recipe)
    unit = "iterations" if before.get("iterations") else "epochs"
    old: Any = before.get(unit, default_of(schema, unit))
    new: Any = values.get(unit)
    numbers = all(isinstance(length, int | float) and not isinstance(length, bool) for length in (old, new))
    if unit not in overridden or not numbers or new == old or new < 1 or new != int(new):
        return  # the schema refuses what is no length
    new = int(new)
    changes: dict[str, Any] = {}

    def scaled(key: str) -> Any:
        return values.get(key, default_of(schema, key)) if key not in overridden else None

    if unit == "epochs" and values.get("warmup_iterations") is None and (warmup := scaled("warmup_epochs")):
        changes["warmup_epochs"] = round(warmup * new / old, 4)
    if warmup := scaled("warmup_iterations"):
        changes["warmup_iterations"] = int(warmup * new / old)
    if values.get("task") == "dino" and unit == "epochs" and (warmup := scaled("teacher_temp_warmup")):
        changes["teacher_temp_warmup"] = round(warmup * new / old, 4)
    if milestones := scaled("milestones"):
        changes["milestones"] = [round(milestone * new / old, 4) for milestone in milestones]
    if (later := scaled("drop_path_later")) and unit == "epochs":
        moved = {max(1, round(epoch * new / old)): rate for epoch, rate in later.items()}
        changes["drop_path_later"] = {epoch: rate for epoch, rate in moved.items() if epoch < new}
    if every := scaled("eval_every"):
        changes["eval_every"] = max(1, round(every * new / old))
        if unit == "iterations":  # the interval must divide them
            changes["eval_every"] = new // next(n for n in range(max(1, old // every), 0, -1) if new % n == 0)
    if changes:
        shown = ", ".join(f"{key} {values.get(key, default_of(schema, key))} -> {v}" for key, v in changes.items())
        _log.warning("%s changed from %s to %s, so the schedule scales: %s", unit, old, new, shown)
    values |= changes


class Loader(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number, unlike YAML 1.1, and refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping whose keys are all different."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if duplicates := {str(key) for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"duplicate key {', '.join(sorted(duplicates))}")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _find(name: str, user: Path | None = None) -> Path:
    """The file of that name or path, beside the file that extends it or in the library."""
    if name.endswith((".yaml", ".yml")):
        path = user.parent / name if user else Path(name)
        if not path.is_file():
            raise ValueError(f"there is no recipe file {path}; give the path of a file, or a name without .yaml")
        return path
    candidates = sorted(FOLDER.rglob(f"{name}.yaml")) if re.fullmatch(r"\w+", name) else []
    for path in [user.parent / f"{name}.yaml", *candidates] if user else candidates:
        if path.is_file() and path != user:
            return path
    hint = nearest(name, list_recipes()) or "; `tokamix recipes` lists them, and a file's name ends in .yaml"
    raise ValueError(f"there is no recipe {name!r}{hint}")


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file over those of the recipe it extends."""
    if path.resolve() in seen:
        raise ValueError(f"{path.name} extends itself, through {' and '.join(p.stem for p in seen)}")
    try:
        values = yaml.load(path.read_text(), Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a recipe in YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, but a recipe is lines of `key: value`")
    base = values.pop("extends", None)
    if base is None:
        return values
    inherited = _read(_find(str(base), path), (*seen, path.resolve()))
    # a changed recipe is no longer the paper's row, so the printed numbers are not inherited
    printed = ("top1", "printed")
    inherited = {key: value for key, value in inherited.items() if key not in printed}
    if rows := inherited.get("rows"):
        inherited["rows"] = {model: {k: v for k, v in row.items() if k not in printed} for model, row in rows.items()}
    return inherited | {"name": path.stem, "source": f"after {base}"} | values


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"{text!r} is not an override: write key=value, such as lr=1e-3")
    try:
        return key.strip(), yaml.load(value, Loader)
    except yaml.YAMLError:
        raise ValueError(f"the value of {text!r} is not valid YAML") from None
