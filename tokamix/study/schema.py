"""The schema of studies: arms, seeds, settings and claims, as validated YAML files under studies/."""

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tokamix.recipes import create_recipe, load_recipe
from tokamix.recipes.load import Loader
from tokamix.recipes.schema import nearest

FOLDER = Path(__file__).parent / "studies"
DIVERGES = "diverges"
PROBES = ("occlusion", "fgsm", "attention_entropy")  # see probes.py
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "imagenette": 9_469}  # training images of data sets, by name
Settings = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A statement about the difference between arms, and the rule that decides whether it holds.

    Attributes:
        claim: the statement, as its source makes it.
        source: paper and table.
        printed: the number of the source.
        arms: weight of each arm's mean in the difference, such as {cb: 1, softmax: -1}.
        holds: "diverges", or {above: x, below: y}: the claim holds if the difference lies in this range.
        fails: the claim does not hold if the difference lies in this range; default: outside `holds`.
        metric: the metric of the difference; default: the study's.
    """

    claim: str
    source: str
    printed: str
    arms: dict[str, float]
    holds: Any
    fails: Any = None
    metric: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """The range of differences in which the claim holds."""
        return _range(self.holds)

    @property
    def fail_ranges(self) -> list[tuple[float, float]]:
        """The ranges of differences in which the claim does not hold."""
        if self.fails is not None:
            return [_range(self.fails)]
        low, high = self.range
        return [r for r in ((-math.inf, low), (high, math.inf)) if not math.isinf(r[0]) or not math.isinf(r[1])]

    @property
    def rule(self) -> str:
        """The rule in words."""
        if self.holds == DIVERGES:
            return "holds if every run diverges, does not hold if none does"
        if self.fails is not None:
            return f"holds if {_in_words(*self.range)}, does not hold if {_in_words(*_range(self.fails))}"
        return f"holds if {_in_words(*self.range)}, does not hold if outside"


@dataclass(frozen=True)
class Arm:
    """One network and its settings.

    Attributes:
        name: of the arm.
        settings: keys of a recipe.
        data: name of the data set.
        images: training images, drawn anew for each seed with the same number of each class; None for all.
        tuned: whether the learning rate is tuned.
        equal_time: the arm whose training time it gets: its epochs are scaled by the measured throughput.
        probes: further measurements of the last weights: "occlusion", "fgsm", "attention_entropy".
        minutes: estimated GPU minutes of a run that shares the GPU; from `images_per_second` of all runs together.
    """

    name: str
    settings: Settings
    data: str
    images: int | None = None
    tuned: bool = True
    equal_time: str | None = None
    probes: tuple[str, ...] = ()
    minutes: float = 0.0


@dataclass(frozen=True)
class Study:
    """An experiment: what is trained, how often, and what is concluded from it.

    Attributes:
        name: of the study.
        title: for headings.
        protocol: how the runs are made, for people.
        data: sources of the data sets, by name, as `tokamix train --data` takes them.
        arms: what is compared.
        claims: what is concluded.
        looks: numbers of seeds per arm after which the claims are tested; arms of undecided claims get more seeds.
        first_seed: of the runs on the test set; tuning has seed 0.
        holdout: images held out of the training set for tuning.
        tune: {lr: [factors on each arm's learning rate], set: {settings}}; None: nothing is tuned.
        metric: the metric of the last weights, averaged if EMA is on; "score" for the one of each arm's task.
        sigma: standard deviation between seeds that is expected, in points of the metric; 0: unknown.
        sizes: image sides at which the arms' speed is measured, each with changes of the model's arguments.
        figure: name of the PNG file beside docs/claims.md that `tokamix study --figure` drew; "" for none.
        bodies: prefixes of arm names, such as column and pyramid; the figure has one row for each mixer.
        order: of the study in docs/claims.md.
    """

    name: str
    title: str
    protocol: str
    data: dict[str, str]
    arms: dict[str, Arm]
    claims: tuple[Claim, ...] = ()
    looks: tuple[int, ...] = (3,)
    first_seed: int = 10
    holdout: int = 0
    tune: Settings | None = None
    metric: str = "top1"
    sigma: float = 0.0
    sizes: dict[int, Settings] = field(default_factory=dict)
    figure: str = ""
    bodies: tuple[str, ...] = ()
    order: int = 99

    def select(self, only: str) -> list[Arm]:
        """The arms that match a pattern such as "column_*", or one of several with commas between them."""
        return [arm for arm in self.arms.values() if any(fnmatch(arm.name, part.strip()) for part in only.split(","))]


def list_studies() -> list[str]:
    """Names of the library's studies, in the order of docs/claims.md."""
    orders = {path.stem: yaml.load(path.read_text(), Loader).get("order", 99) for path in FOLDER.glob("[!_]*.yaml")}
    return sorted(orders, key=lambda name: (orders[name], name))


def load_study(name_or_path: str | Path) -> Study:
    """Load a study of the library by its name, or a YAML file of the same form."""
    text = str(name_or_path)
    path = Path(text) if text.endswith((".yaml", ".yml")) else FOLDER / f"{text}.yaml"
    if not path.is_file():
        hint = nearest(text, list_studies()) or f"; there are {', '.join(list_studies())}"
        raise ValueError(f"there is no study {text!r}{hint}")
    try:
        values = yaml.load(path.read_text(), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a study in YAML: {' '.join(str(error).split())}") from None
    return create_study(path.stem, values)


def create_study(name: str, values: Any) -> Study:
    """Create a study from the values of its file; every problem is one sentence."""
    if not isinstance(values, dict):
        raise ValueError(f"study {name}: the file holds a {type(values).__name__}, but needs lines of `key: value`")
    values = dict(values)
    bases = yaml.load((FOLDER / "_bases.yaml").read_text(), Loader) | values.pop("bases", {})
    arms = values.pop("arms", {})
    minutes, speed = values.pop("run_minutes", 0.0), values.pop("images_per_second", None)
    _check_keys(Study, f"study {name}", values | {"name": name, "arms": arms})
    if not isinstance(arms, dict) or not arms:
        raise ValueError(f"study {name}: arms is {arms!r}, but must be a mapping of names to their settings")
    estimate = {"minutes": minutes, "images_per_second": speed}
    created = {
        arm: _create_arm(name, arm, {**estimate, **(given or {})}, bases, values["data"]) for arm, given in arms.items()
    }
    claims = tuple(_create_claim(name, given, created) for given in values.pop("claims", ()))
    values |= {key: tuple(values[key]) for key in ("looks", "bodies") if key in values}
    study = Study(name=name, arms=created, claims=claims, **values)
    _check_study(study)
    return study


def merge_settings(settings: Settings, changes: Settings) -> Settings:
    """Settings with changes; mappings in both are merged, and none empties a mapping."""
    both = {key: changes[key] for key in settings if isinstance(settings[key], dict) and key in changes}
    merged = {key: merge_settings(settings[key], change) if change else {} for key, change in both.items()}
    return {**settings, **changes, **merged}


def _check_study(study: Study) -> None:
    where = f"study {study.name}"
    if not isinstance(study.sizes, dict) or any(not isinstance(size, int) for size in study.sizes):
        raise ValueError(f"{where}: sizes is {study.sizes!r}, but must map image sides to changes, such as 224: {{}}")
    if not study.looks or any(b <= a for a, b in pairwise((0, *study.looks))):
        raise ValueError(f"{where}: looks is {list(study.looks)}, but must be rising numbers of seeds, such as [3, 5]")
    for body in study.bodies:
        if not any(arm.startswith(f"{body}_") for arm in study.arms):
            raise ValueError(f"{where}: bodies has {body!r}, but no arm is called {body}_*")
    if study.tune is not None:
        if set(study.tune) != {"lr", "set"} or not study.tune["lr"]:
            raise ValueError(f"{where}: tune is {study.tune!r}, but must have lr, a list of factors, and set")
        if not study.holdout:
            raise ValueError(f"{where}: tuning needs images that are held out of the training set; set holdout")
    for arm in study.arms.values():
        if arm.equal_time is not None and arm.equal_time not in study.arms:
            raise ValueError(f"{where}: arm {arm.name} has the time of {arm.equal_time!r}, which is no arm")
        if arm.equal_time is not None and not study.sizes:
            raise ValueError(f"{where}: arm {arm.name} needs measured throughputs; set sizes")


def _create_arm(study: str, name: str, given: Settings, bases: Settings, data: Settings) -> Arm:
    where = f"study {study}: arm {name}"
    known = {"use", "set", "recipe", "data", "images", "tuned", "equal_time", "probes", "minutes"}
    known.add("images_per_second")
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"{where}: a name has letters, digits and underscores only")
    if unknown := [key for key in given if key not in known]:
        hint = nearest(unknown[0], sorted(known)) or f"; the keys are {', '.join(sorted(known))}"
        raise ValueError(f"{where}: there is no key {unknown[0]!r}{hint}")
    settings: Settings = {}
    if "recipe" in given:
        row = load_recipe(given["recipe"]).to_dict()
        settings = {key: value for key, value in row.items() if key not in ("name", "source", "data", "seed")}
    for base in given.get("use", ()):
        if base not in bases:
            raise ValueError(f"{where}: there is no base {base!r}{nearest(base, list(bases))}")
        settings = merge_settings(settings, bases[base])
    settings = merge_settings(settings, given.get("set", {}))
    try:
        create_recipe({"name": name, **settings})
    except ValueError as error:
        raise ValueError(f"study {study}: {error}") from None
    source = given.get("data", next(iter(data)))
    if source not in data:
        raise ValueError(f"{where}: its data {source!r} is not one of {', '.join(data)}")
    rest = {key: given[key] for key in ("images", "tuned", "equal_time") if key in given}
    if unknown := [probe for probe in given.get("probes", ()) if probe not in PROBES]:
        raise ValueError(f"{where}: there is no probe {unknown[0]!r}; choose from {', '.join(PROBES)}")
    probes = tuple(given.get("probes", ()))
    arm = Arm(name, settings, source, minutes=given["minutes"], probes=probes, **rest)
    if (speed := given["images_per_second"]) and (images := train_images(arm)):
        return replace(arm, minutes=settings["epochs"] * images / speed / 60)
    return arm


def train_images(arm: Arm) -> int | None:
    """Training images of an arm; None for data that is not known here."""
    return arm.images or IMAGES.get(arm.data)


def _create_claim(study: str, given: Settings, arms: Mapping[str, Arm]) -> Claim:
    where = f"study {study}: claim {given.get('claim', '')!r}"
    _check_keys(Claim, where, given)
    if unknown := [arm for arm in given["arms"] if arm not in arms]:
        raise ValueError(f"{where}: there is no arm {unknown[0]!r}{nearest(unknown[0], list(arms))}")
    claim = Claim(**{**given, "printed": str(given["printed"])})
    if claim.holds == DIVERGES:
        if len(claim.arms) != 1:
            raise ValueError(f"{where}: one arm diverges, but {len(claim.arms)} are given")
        return claim
    if abs(sum(claim.arms.values())) > 1e-9:
        raise ValueError(f"{where}: the weights of a difference must add up to 0, got {claim.arms}")
    for given_range in (claim.holds, claim.fails):
        if given_range is not None:
            _range(given_range, where)
    return claim


def _range(values: Any, where: str = "claim") -> tuple[float, float]:
    if not isinstance(values, dict) or not values or not set(values) <= {"above", "below"}:
        raise ValueError(f"{where}: a range is {values!r}, but must have above, below or both")
    low, high = float(values.get("above", -math.inf)), float(values.get("below", math.inf))
    if low >= high:
        raise ValueError(f"{where}: the range above {low:g} and below {high:g} is empty")
    return low, high


def _in_words(low: float, high: float) -> str:
    if math.isinf(high):
        return f"above {_signed(low)}"
    if math.isinf(low):
        return f"below {_signed(high)}"
    return f"within ±{high:g}" if low == -high else f"between {_signed(low)} and {_signed(high)}"


def _signed(number: float) -> str:
    return f"{number:+g}" if number else "0"


def _check_keys(schema: Any, where: str, values: Settings) -> None:
    keys = {f.name: f for f in fields(schema)}
    for key in values:
        if key not in keys:
            hint = nearest(str(key), list(keys)) or f"; the keys are {', '.join(keys)}"
            raise ValueError(f"{where}: there is no key {key!r}{hint}")
    for key, one in keys.items():
        if one.default is MISSING and one.default_factory is MISSING and key not in values:
            raise ValueError(f"{where}: the key {key} is missing")
