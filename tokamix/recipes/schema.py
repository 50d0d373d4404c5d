"""Recipes: how a model is trained, as data.

One YAML file is one row of a paper's table, or one of our own settings for small data; a user's file has the same form.
`extends: name` takes the values of another recipe (of the library, or of a file beside it) and replaces what it states.
Where the rows of a table differ in the model and little else, one file has them all: `rows: {model: {key: value}}`.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from timm.optim import list_optimizers

from tokamix.tasks import METHODS

FOLDER = Path(__file__).parent
UNUSED = {  # what one dense task has and the other has not
    "segment": ("scales", "crop_then_scale"),
    "detect": ("scale_range", "cat_max", "test_scales", "test_flip", "window", "window_stride"),
}
AUGMENTS = ("3-augment", "3a", "augmix", "original", "rand", "v0")  # how a string of timm's auto augmentation starts


class Range(NamedTuple):
    """The numbers that a value may have: those from low to high, without an end that is called open."""

    low: float
    high: float = math.inf
    open: str = ""

    def __contains__(self, number: object) -> bool:
        return self.low <= number <= self.high and (not self.open or number != getattr(self, self.open))  # type: ignore[operator]

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open == "low" else f"of at least {self.low:g}"
        high = f"below {self.high:g}" if self.open == "high" else f"of at most {self.high:g}"
        return low if math.isinf(self.high) else f"{low} and {high}"


Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, open="low")]
Rate = Annotated[float, Range(0, 1, open="high")]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open="low")]
Count = Annotated[int, Range(1)]
Counter = Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides how a model is trained, checked when it is made.

    Attributes:
        name: what the recipe is called.
        source: the paper, its section and table row; or "ours".
        data: what the row was trained on; a hint, since the data is given with the command.
        top1: the accuracy in percent that the paper prints for this row, if it does.
        printed: the numbers in percent that the paper prints for this row of a dense task, such as {miou: 46.5}.
        task: what is learned: the class of an image, that of each pixel, or where things are.
        method: how a backbone becomes a segmenter (semantic_fpn, upernet) or a detector.
        method_kwargs: arguments of that method.
        neck: what joins the levels of the backbone, where the method has a choice.
        model: a model's name, the backbone's in dense tasks; a command or call may name another.
        model_kwargs: arguments of that model; `{}` for another one that does not take them.
        finetune: whether training starts from given weights.
        image_size: side of the images in pixels.
        crop_pct: share of the resized image's side that the centre crop keeps in evaluation; none: the model's own.
        interpolation: how images are resized.
        epochs: passes over the training set.
        iterations: optimizer steps in all, instead of `epochs`; what is called an epoch then ends at each evaluation.
        eval_every: iterations from one evaluation to the next, where `iterations` is set; none: one at the end.
        batch_size: images of one optimizer step, over all processes and accumulation steps.
        accumulate: forward passes of one optimizer step.
        optimizer: a name of timm's optimizers.
        lr: the learning rate after warm-up.
        lr_per: the batch size that `lr` is given for, scaled linearly to `batch_size`; none: `lr` is used as it is.
        min_lr: where the cosine ends; never scaled.
        warmup_epochs: epochs of linear warm-up, part of `epochs`.
        warmup_lr: where the warm-up starts; never scaled.
        warmup_iterations: iterations of linear warm-up; none: `warmup_epochs`, or no warm-up where `iterations` is set.
        warmup_ratio: where that warm-up starts, as a share of the learning rate.
        schedule: what follows the warm-up; "poly" goes down to `min_lr`, "step" to a tenth at each of `milestones`.
        power: of the poly schedule.
        milestones: epochs at which the step schedule goes down; iterations where `iterations` is set.
        betas: of Adam-like optimizers; none: the optimizer's own.
        eps: of Adam-like optimizers; none: the optimizer's own.
        momentum: of SGD-like optimizers.
        weight_decay: not applied to norms, biases and what the model names.
        clip_grad: largest norm of all gradients together; none: no clipping.
        layer_decay: factor of the learning rate from each layer to the one below; none: the same for all.
        drop_rate: dropout in front of the classifier.
        drop_path: stochastic depth; none: the model's own.
        drop_path_later: epoch -> stochastic depth from that epoch on.
        eval_mode: train in evaluation mode: BatchNorm keeps its statistics, and nothing is dropped.
        mixup: alpha of mixup; 0: off.
        cutmix: alpha of CutMix; 0: off.
        mixup_prob: probability that a batch is mixed at all.
        mixup_switch_prob: probability of CutMix where both are on.
        label_smoothing: share of the label that is spread over all classes.
        augment: timm's auto augmentation, such as "rand-m9-mstd0.5-inc1"; "3-augment"; none: crops and flips alone.
        color_jitter: strength of colour jitter; timm leaves it out where `augment` is a policy of colours itself.
        hflip: probability of a horizontal flip.
        crop_scale: area of a random crop, resized to the image's size; none: no such crop.
        crop_padding: pixels of padding before a random crop of the image's own size, as CIFAR's crops; 0: no such crop.
        random_erasing: probability that a rectangle becomes noise.
        scale: [long, short]: dense images are resized to fit into it, with their proportions; none: their own size.
        scale_range: factor on `scale`, drawn for each image; none: 1.
        scales: short sides to draw one from for each image, instead of that of `scale`; []: always that one.
        crop_size: side of the random crop that a segmenter is trained on.
        crop_then_scale: half of the time, a random part of the image is cut out before `scales`, as DETR does.
        cat_max: largest share of a crop that one class may fill; a crop above it is drawn again, up to ten times.
        photometric: change brightness, contrast, saturation and hue of dense images at random.
        test_scales: factors on `scale` over which the answers of a segmenter are averaged in evaluation.
        test_flip: average with the answers to mirrored images, too.
        window: side of a sliding window in evaluation; none: the whole image at once.
        window_stride: from one window to the next; none: two thirds of `window`.
        repeated_augmentation: copies of an image in a batch, each augmented in its own way; 1: off.
        ema: decay of the moving average of the weights; none: off.
        teacher: a model with its weights (a timm name, a checkpoint or an ONNX file) to distil from.
        distillation: "hard" learns the teacher's choice, "soft" its distribution.
        distill_alpha: the teacher's share of the loss.
        distill_tau: temperature of soft distillation.
        precision: of the forward and backward pass; the weights are float32.
        compile: use torch.compile.
        channels_last: the memory order of images.
        grad_checkpointing: compute activations again in the backward pass, to save memory.
        seed: of everything random.
    """

    name: str
    source: str = "ours"
    data: str | None = None
    top1: Annotated[float, Range(0, 100)] | None = None
    printed: dict[str, Annotated[float, Range(0, 100)]] = field(default_factory=dict)
    task: Literal["classify", "segment", "detect"] = "classify"
    method: str | None = None
    method_kwargs: dict[str, Any] = field(default_factory=dict)
    neck: Literal["fpn", "atm_fpn"] = "fpn"

    model: str | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    finetune: bool = False
    image_size: Count = 224
    crop_pct: Part | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic"

    epochs: Count = 50
    iterations: Count | None = None
    eval_every: Count | None = None
    batch_size: Count = 128
    accumulate: Count = 1

    optimizer: str = "adamw"
    lr: NotNegative = 1e-3
    lr_per: Count | None = None
    min_lr: NotNegative = 1e-5
    warmup_epochs: NotNegative = 5.0
    warmup_lr: NotNegative = 1e-6
    warmup_iterations: Counter | None = None
    warmup_ratio: Share = 0.001
    schedule: Literal["cosine", "constant", "poly", "step"] = "cosine"
    power: Positive = 1.0
    milestones: tuple[Count, ...] = ()
    betas: tuple[Rate, Rate] | None = None
    eps: NotNegative | None = None
    momentum: Rate = 0.9
    weight_decay: NotNegative = 0.05
    clip_grad: Positive | None = None
    layer_decay: Part | None = None

    drop_rate: Rate = 0.0
    drop_path: Rate | None = None
    drop_path_later: dict[int, Rate] = field(default_factory=dict)
    eval_mode: bool = False

    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    mixup_prob: Share = 1.0
    mixup_switch_prob: Share = 0.5
    label_smoothing: Share = 0.1
    augment: str | None = None
    color_jitter: NotNegative | None = None
    hflip: Share = 0.5
    crop_scale: tuple[Share, Share] | None = (0.08, 1.0)
    crop_padding: Counter = 0
    random_erasing: Share = 0.0
    scale: tuple[Count, Count] | None = None
    scale_range: tuple[Positive, Positive] | None = None
    scales: tuple[Count, ...] = ()
    crop_size: Count | None = None
    crop_then_scale: bool = False
    cat_max: Part = 1.0
    photometric: bool = False
    test_scales: tuple[Positive, ...] = (1.0,)
    test_flip: bool = False
    window: Count | None = None
    window_stride: Count | None = None
    repeated_augmentation: Count = 1

    ema: Rate | None = None
    teacher: str | None = None
    distillation: Literal["none", "hard", "soft"] = "none"
    distill_alpha: Share = 0.5
    distill_tau: Positive = 1.0

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    channels_last: bool = False
    grad_checkpointing: bool = False
    seed: Counter = 0

    def __post_init__(self) -> None:
        for key, hint in _hints().items():
            value = getattr(self, key)
            try:
                object.__setattr__(self, key, _fit(value, hint))
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"recipe {self.name}: {key} is {value!r}, but must be {_words(hint)}") from None
        if problem := self._contradiction():
            raise ValueError(f"recipe {self.name}: {problem}")

    def _contradiction(self) -> str | None:
        """What cannot be, although each value is possible by itself."""
        if self.batch_size % self.accumulate:
            return f"batch_size {self.batch_size} cannot be divided by accumulate {self.accumulate}"
        if self.optimizer not in list_optimizers():
            near = _nearest(self.optimizer, list_optimizers())
            return f"timm has no optimizer {self.optimizer!r}{near or '; timm.optim.list_optimizers() has them all'}"
        if self.iterations is None and self.warmup_iterations is None and self.warmup_epochs >= self.epochs:
            return f"warmup_epochs {self.warmup_epochs:g} leaves nothing of epochs {self.epochs}; set it lower"
        if self.schedule in ("cosine", "poly") and self.min_lr > self.peak_lr:
            return f"min_lr {self.min_lr:g} is above the learning rate {self.peak_lr:g} at batch {self.batch_size}"
        if wrong := [epoch for epoch in self.drop_path_later if not 0 < epoch < self.epochs]:
            return f"drop_path_later names epoch {wrong[0]} of {self.epochs}; set it to {{}} for no change"
        if self.crop_scale and not 0 < self.crop_scale[0] <= self.crop_scale[1]:
            return f"crop_scale is {list(self.crop_scale)}, but must be two rising numbers above 0"
        if self.crop_scale and self.crop_padding:
            return "crop_scale and crop_padding are two kinds of crop; set one of them to none or 0"
        if self.augment is not None and not self.augment.startswith(AUGMENTS):
            return f"augment is {self.augment!r}, but must be none or start with one of {', '.join(AUGMENTS)}"
        if self.repeated_augmentation > self.batch_size:
            return f"{self.repeated_augmentation} copies of an image do not fit into a batch of {self.batch_size}"
        if self.distillation != "none" and self.teacher is None:
            return f"{self.distillation} distillation needs a teacher: a timm model, a checkpoint or an ONNX file"
        if self.teacher is not None and self.distillation == "none":
            return f"the teacher {self.teacher} is not used; set distillation to hard or soft, or teacher to none"
        return self._contradiction_in_time() or self._contradiction_in_task()

    def _contradiction_in_time(self) -> str | None:
        total, word = (self.iterations, "iterations") if self.iterations else (self.epochs, "epochs")
        if self.eval_every is not None:
            if self.iterations is None:
                return f"eval_every {self.eval_every} counts iterations; set `iterations` too, or eval_every to none"
            if self.iterations % self.eval_every:
                return f"iterations {self.iterations} cannot be divided by eval_every {self.eval_every}"
        if self.iterations and (self.warmup_iterations or 0) >= self.iterations:
            words = f"warmup_iterations {self.warmup_iterations} leaves nothing of iterations {self.iterations}"
            return f"{words}; set it lower, as by --set warmup_iterations=0"
        if (self.schedule == "step") != bool(self.milestones):
            return f"milestones {list(self.milestones)} do not go with schedule {self.schedule}: step needs them alone"
        if list(self.milestones) != sorted({m for m in self.milestones if m < total}):
            return f"milestones are {list(self.milestones)}, but must rise and stay below the {total} {word}"
        return None

    def _contradiction_in_task(self) -> str | None:
        if self.task == "classify":
            return f"method {self.method} goes with task segment or detect" if self.method else None
        if self.method not in METHODS[self.task]:
            return f"method is {self.method or 'none'}, but task {self.task} has {', '.join(METHODS[self.task])}"
        if self.task == "segment" and self.crop_size is None:
            return "task segment needs crop_size, the side of its training images, such as 512"
        unused = [key for key in ("mixup", "cutmix", "random_erasing", "augment", "layer_decay") if getattr(self, key)]
        unused += [key for key in UNUSED[self.task] if getattr(self, key) != getattr(Recipe, key)]
        if unused or self.distillation != "none":
            return f"task {self.task} does not know {(unused or ['distillation'])[0]}; leave it out"
        if self.scale_range and self.scale_range[0] > self.scale_range[1]:
            return f"scale_range is {list(self.scale_range)}, but must be two rising numbers"
        if self.scale and self.scale[0] < self.scale[1]:
            return f"scale is {list(self.scale)}, but must be the long side, then the short one"
        if self.window_stride and self.window_stride > (self.window or 0):
            return f"window_stride {self.window_stride} leaves gaps between windows of {self.window or 0} px"
        return None

    @property
    def rounds(self) -> int:
        """How often the model is evaluated: after each epoch, or each `eval_every` of so many iterations."""
        return self.iterations // (self.eval_every or self.iterations) if self.iterations else self.epochs

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up, at this batch size."""
        return self.lr * self.batch_size / self.lr_per if self.lr_per else self.lr

    def micro_batch(self, processes: int = 1) -> int:
        """Images of one forward pass in each of so many processes."""
        size, rest = divmod(self.batch_size, processes * self.accumulate)
        if rest or not size:
            raise ValueError(
                f"recipe {self.name}: batch_size {self.batch_size} cannot be divided by {processes} processes times"
                f" accumulate {self.accumulate}; set batch_size to a multiple of {processes * self.accumulate}"
            )
        return size

    def to_dict(self) -> dict[str, Any]:
        """All values, as plain lists and dicts."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def to_yaml(self) -> str:
        """All values, as a file that `load_recipe` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=1000)


def list_recipes() -> list[str]:
    """Names of the library's recipes."""
    return sorted(path.stem for path in FOLDER.rglob("[!_]*.yaml"))


def load_recipe(
    name_or_path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), model: str | None = None
) -> Recipe:
    """A recipe of the library by its name, or a YAML file; single values may be replaced.

    Args:
        name_or_path: a name of `list_recipes()`, or a path that ends in .yaml or .yml.
        overrides: strings such as "lr=1e-3" or "model_kwargs.depth=6", or a mapping of the same keys.
        model: takes the row of this model where the file has rows; default: the row of the file's own model.
    """
    path = _find(str(name_or_path))
    values = {"name": path.stem} | _read(path, ())
    overrides = load_overrides(overrides)
    _take_row(values, model or overrides.get("model"))
    if "epochs" in overrides and values.get("iterations") and overrides.get("iterations", 1) not in (None, "none"):
        raise ValueError(
            f"recipe {values['name']}: it has {values['iterations']} iterations, not epochs; set iterations=..., or"
            " iterations=none and eval_every=none as well"
        )
    for key, value in overrides.items():
        key, dot, inner = key.partition(".")
        if dot:
            if not isinstance(mapping := values.get(key, {}), dict):
                raise ValueError(f"recipe {values['name']}: {key} is {mapping!r}, which has no {inner!r} to set")
            value = {**mapping, yaml.load(inner, Loader): value}  # 260 is a number there, too
        values[key] = value
    return make_recipe(values)


def load_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Values by their keys, out of strings such as "lr=1e-3"."""
    return dict(overrides if isinstance(overrides, Mapping) else map(_parse, overrides))


def recipe_rows(name: str) -> list[Recipe]:
    """A recipe of the library for each model that it has a row for."""
    rows = _read(_find(name), ()).get("rows") or {None: {}}
    return [load_recipe(name, model=model) for model in rows]


def _take_row(values: dict[str, Any], model: Any) -> None:
    """Replace what the table has for this model; a model that it does not have keeps the file's own values."""
    rows = values.pop("rows", None)
    if rows is None:
        return
    if not (isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values())):
        raise ValueError(f"recipe {values['name']}: rows is {rows!r}, but must be a mapping of models to their values")
    model = model or values.get("model") or next(iter(rows), None)
    if model in rows:
        values |= {"model": model, **rows[model]}


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from its values; a key that does not exist is answered with the nearest one that does."""
    for key in values:
        if key not in _hints():
            near = _nearest(str(key), list(_hints())) or f"; the keys are {', '.join(_hints())}"
            raise ValueError(f"recipe {values.get('name', '')}: there is no key {key!r}{near}")
    return Recipe(**values)


class Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as everybody but YAML 1.1 expects, and in which no key may stand twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping, of keys that differ."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {str(key) for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"the key {', '.join(sorted(twice))} stands there twice")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _find(name: str, user: Path | None = None) -> Path:
    """The file of that name or path, beside the one that uses it or in the library."""
    if name.endswith((".yaml", ".yml")):
        path = user.parent / name if user else Path(name)
        if not path.is_file():
            raise ValueError(f"there is no recipe file {path}; give the path of a file, or a name without .yaml")
        return path
    known = sorted(FOLDER.rglob(f"{name}.yaml")) if re.fullmatch(r"\w+", name) else []
    for path in [user.parent / f"{name}.yaml", *known] if user else known:
        if path.is_file() and path != user:
            return path
    near = _nearest(name, list_recipes()) or "; `tokamix recipes` lists them, a file's name ends in .yaml"
    raise ValueError(f"there is no recipe {name!r}{near}")


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file, over those of the recipe it extends."""
    if path.resolve() in seen:
        raise ValueError(f"{path.name} extends itself, by way of {' and '.join(p.stem for p in seen)}")
    try:
        values = yaml.load(path.read_text(), Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no recipe in YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, but a recipe is lines of `key: value`")
    base = values.pop("extends", None)
    if base is None:
        return values
    inherited = _read(_find(str(base), path), (*seen, path.resolve()))
    # what extends a row of a paper is not that row any more
    if rows := inherited.get("rows"):
        inherited["rows"] = {model: {k: v for k, v in row.items() if k != "printed"} for model, row in rows.items()}
    return inherited | {"name": path.stem, "source": f"after {base}", "top1": None, "printed": {}} | values


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"{text!r} sets nothing: write key=value, such as lr=1e-3")
    try:
        return key.strip(), yaml.load(value, Loader)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} sets no value that YAML can read") from None


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


@cache
def _hints() -> dict[str, Any]:
    hints = get_type_hints(Recipe, include_extras=True)
    return {f.name: hints[f.name] for f in fields(Recipe)}


def _fit(value: Any, hint: Any) -> Any:
    """The value as the type says, or TypeError or ValueError."""
    origin, args = get_origin(hint), get_args(hint)
    if NoneType in args:
        if value is None or value == "none":
            return None
        return _fit(value, next(arg for arg in args if arg is not NoneType))
    if origin is Annotated:
        number = _fit(value, args[0])
        if number not in args[1]:
            raise ValueError
        return number
    if origin is Literal:
        value = "none" if value is None and "none" in args else value
        if value not in args:
            raise ValueError
        return value
    if origin is tuple and args[-1] is Ellipsis:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(_fit(item, args[0]) for item in value)
    if origin is tuple:
        return tuple(_fit(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_fit(key, args[0]): _fit(item, args[1]) for key, item in value.items()}
    if hint is Any:
        return value
    if hint in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError
        if value != hint(value):
            raise ValueError
        return hint(value)
    if not isinstance(value, hint):
        raise TypeError
    return value


def _words(hint: Any) -> str:
    """A type in words, for errors."""
    origin, args = get_origin(hint), get_args(hint)
    if NoneType in args:
        return f"{_words(next(arg for arg in args if arg is not NoneType))}, or none"
    if origin is Annotated:
        return f"{_words(args[0])} {args[1]}"
    if origin is Literal:
        return f"one of {', '.join(args)}" if len(args) > 1 else repr(args[0])
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}values, each {_words(args[0])}"
    if origin is dict:
        return f"a mapping of {_words(args[0])} to {_words(args[1])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return names.get(hint, "a value")
