"""The schemas of recipes: how a model is trained, as validated data, one class per task.

Written as dataclasses: pydantic accepts `true` for 1 and reports over several lines, so every type and every message
would need its own validator there.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_type_hints

import yaml
from timm.optim import list_optimizers

from tokamix.recipes.values import (
    Count,
    CountOrZero,
    Fraction,
    HalfTurn,
    NotNegative,
    Percent,
    Positive,
    Probability,
    Rate,
    convert,
    describe,
)
from tokamix.tasks import Task

AUGMENTS = ("3-augment", "3a", "augmix", "original", "rand", "v0")  # prefixes of timm's auto augmentation strings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides how a model is trained: the keys that all tasks share, validated on creation.

    Create one with `load_recipe` or as `ClassifyRecipe`, `SegmentRecipe`, `DetectRecipe` or `DinoRecipe`.

    Attributes:
        name: name of the recipe.
        source: the paper, its section and table row; or "ours".
        data: the data set of that row; a hint only, since the command names the data.
        task: classify, segment, detect, dino or vqa.
        model: name of the model, or of the backbone in segment and detect; the command may name another.
        model_kwargs: arguments of that model; `{}` for a model that does not accept them.
        finetune: training starts from trained weights.
        interpolation: how images are resized.
        epochs: passes over the training set.
        iterations: number of optimizer steps, instead of `epochs`; an epoch then lasts until the next evaluation.
        eval_every: epochs between evaluations (none: 1), or iterations with `iterations` (none: at the end only).
        select: the weights kept as the model: of the "best" evaluation, or the "last" ones, averaged if EMA is on.
        batch_size: images per optimizer step, over all processes and accumulation steps.
        accumulate: forward passes per optimizer step.
        optimizer: a name of timm's optimizers; `muon` and `nmuon` (Nesterov) run in a faster implementation.
        optimizer_kwargs: further arguments of the optimizer, such as {fallback_lr_scale: 0.4} of `nmuon`.
        lr: the learning rate after warm-up.
        lr_per: the batch size that `lr` is given for, scaled linearly to `batch_size`; none: `lr` is used as it is.
        min_lr: final learning rate of the cosine, linear and poly schedules; never scaled.
        warmup_epochs: epochs of linear warm-up, part of `epochs`.
        warmup_lr: learning rate at the start of warm-up; never scaled.
        warmup_iterations: iterations of linear warm-up; none: `warmup_epochs`, or no warm-up with `iterations`.
        warmup_ratio: learning rate at the start of that warm-up, as a fraction of the peak.
        schedule: after warm-up; "linear" and "poly" decay to `min_lr`, "step" divides by ten at each of `milestones`.
        power: exponent of the poly schedule.
        milestones: epochs at which the step schedule decays; iterations where `iterations` is set.
        betas: of Adam-like optimizers; none: the optimizer's default.
        eps: of Adam-like optimizers; none: the optimizer's default.
        momentum: of SGD-like optimizers and Muon.
        weight_decay: not applied to norms, biases and parameters that the model excludes.
        weight_decay_end: weight decay at the end of the run, reached along a cosine; none: it does not change.
        clip_grad: maximum norm of all gradients together; none: no clipping.
        clip_per_parameter: `clip_grad` applies to the gradient of each parameter alone, as DINO does.
        drop_path: stochastic depth; none: the model's default.
        drop_path_later: epoch -> stochastic depth from that epoch on.
        eval_mode: train in evaluation mode: BatchNorm statistics are frozen and dropout is off.
        hflip: probability of a horizontal flip.
        ema: decay of the exponential moving average of the weights; none: off.
        ema_half_life: the same decay as a number of steps, after which a weight counts half; none: `ema`.
        precision: of the forward and backward pass; the weights are float32. A CPU trains in fp32 by default.
        sync_bn: in several processes on GPUs, BatchNorm uses the images of all of them.
        compile: use torch.compile.
        channels_last: store images and weights in channels_last memory format.
        grad_checkpointing: recompute activations in the backward pass to save memory.
        seed: of everything random.
    """

    _required: ClassVar[Mapping[str, str]] = MappingProxyType({})  # required key -> explanation

    name: str
    source: str = "ours"
    data: str | None = None
    task: Task

    model: str | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    finetune: bool = False
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic"

    epochs: Count = 50
    iterations: Count | None = None
    eval_every: Count | None = None
    select: Literal["best", "last"] = "best"
    batch_size: Count = 128
    accumulate: Count = 1

    optimizer: str = "adamw"
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    lr: NotNegative = 1e-3
    lr_per: Count | None = None
    min_lr: NotNegative = 1e-5
    warmup_epochs: NotNegative = 5.0
    warmup_lr: NotNegative = 1e-6
    warmup_iterations: CountOrZero | None = None
    warmup_ratio: Probability = 0.001
    schedule: Literal["cosine", "constant", "linear", "poly", "step"] = "cosine"
    power: Positive = 1.0
    milestones: tuple[Positive, ...] = ()
    betas: tuple[Rate, Rate] | None = None
    eps: NotNegative | None = None
    momentum: Rate = 0.9
    weight_decay: NotNegative = 0.05
    weight_decay_end: NotNegative | None = None
    clip_grad: Positive | None = None
    clip_per_parameter: bool = False

    drop_path: Rate | None = None
    drop_path_later: dict[int, Rate] = field(default_factory=dict)
    eval_mode: bool = False
    hflip: Probability = 0.5
    ema: Rate | None = None
    ema_half_life: Positive | None = None

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    sync_bn: bool = True
    compile: bool = False
    channels_last: bool = False
    grad_checkpointing: bool = False
    seed: CountOrZero = 0

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Keys of the task's own schema: `load_recipe` returns a class that type checkers cannot know."""

    def __post_init__(self) -> None:
        for key, hint in type_hints(type(self)).items():
            value = getattr(self, key)
            try:
                object.__setattr__(self, key, convert(value, hint))
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"recipe {self.name}: {key} is {value!r}, but must be {describe(hint)}") from None
        if problem := self._conflict():
            raise ValueError(f"recipe {self.name}: {problem}")

    def _conflict(self) -> str | None:
        """Describe the first pair of values that contradict each other, if there is one."""
        if self.batch_size % self.accumulate:
            return f"batch_size {self.batch_size} cannot be divided by accumulate {self.accumulate}"
        if self.optimizer not in list_optimizers():
            hint = nearest(self.optimizer, list_optimizers()) or "; timm.optim.list_optimizers() lists them"
            return f"timm has no optimizer {self.optimizer!r}{hint}"
        if self.ema and self.ema_half_life:
            return (
                f"ema {self.ema:g} and ema_half_life {self.ema_half_life:g} exclude each other; set one of them to none"
            )
        if self.weight_decay_end is not None and not self.weight_decay:
            return f"weight_decay_end is {self.weight_decay_end:g}, but weight_decay is 0; set it above 0"
        if self.clip_per_parameter and self.clip_grad is None:
            return "clip_per_parameter needs clip_grad, the largest norm; set clip_grad, or clip_per_parameter to false"
        if wrong := [epoch for epoch in self.drop_path_later if not 0 < epoch < self.epochs]:
            return f"drop_path_later names epoch {wrong[0]} of {self.epochs}; set it to {{}} for no change"
        return self._schedule_conflict()

    def _schedule_conflict(self) -> str | None:
        total, unit = (self.iterations, "iterations") if self.iterations else (self.epochs, "epochs")
        if self.iterations is None and self.warmup_iterations is None and self.warmup_epochs >= self.epochs:
            return f"warmup_epochs {self.warmup_epochs:g} must be below epochs {self.epochs}; set it lower"
        if self.iterations and (self.warmup_iterations or 0) >= self.iterations:
            problem = f"warmup_iterations {self.warmup_iterations} must be below iterations {self.iterations}"
            return f"{problem}; set it lower, for example with --set warmup_iterations=0"
        if self.schedule in ("cosine", "linear", "poly") and self.min_lr > self.peak_lr:
            return f"min_lr {self.min_lr:g} is above the learning rate {self.peak_lr:g} at batch {self.batch_size}"
        if self.eval_every and self.iterations and self.iterations % self.eval_every:
            return f"iterations {self.iterations} cannot be divided by eval_every {self.eval_every}"
        milestones = [round(m) if m == round(m) else m for m in self.milestones]
        if (self.schedule == "step") != bool(self.milestones):
            return f"milestones {milestones} do not fit schedule {self.schedule}: only step uses them, and needs them"
        if milestones != sorted({m for m in milestones if m < total}):
            return f"milestones are {milestones}, but must rise and stay below the {total} {unit}"
        return None

    @property
    def num_epochs(self) -> int:
        """Number of epochs that the training loop counts: `epochs`, or intervals of `eval_every` iterations."""
        return self.iterations // (self.eval_every or self.iterations) if self.iterations else self.epochs

    def evaluates_after(self, epoch: int) -> bool:
        """Whether the model is evaluated after this epoch of `num_epochs`, counted from 1."""
        interval = 1 if self.iterations else self.eval_every or 1
        return epoch % interval == 0 or epoch == self.num_epochs

    @property
    def ema_decay(self) -> float | None:
        """Decay of the moving average per step; None: no average."""
        return 0.5 ** (1 / self.ema_half_life) if self.ema_half_life else self.ema

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up, at this batch size."""
        return self.lr * self.batch_size / self.lr_per if self.lr_per else self.lr

    def micro_batch(self, world_size: int = 1) -> int:
        """Images per forward pass in each of `world_size` processes."""
        size, rest = divmod(self.batch_size, world_size * self.accumulate)
        if rest or not size:
            raise ValueError(
                f"recipe {self.name}: batch_size {self.batch_size} cannot be divided by {world_size} processes times"
                f" accumulate {self.accumulate}; set batch_size to a multiple of {world_size * self.accumulate}"
            )
        return size

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with different values."""
        _check_keys(type(self), self.name, changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All values, as plain lists and dicts."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def to_yaml(self) -> str:
        """All values, as a file that `load_recipe` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=1000)


@dataclass(frozen=True, kw_only=True)
class ClassifyRecipe(Recipe):
    """How a classifier is trained.

    Attributes:
        top1: the accuracy in percent that the paper prints for this row.
        image_size: side of the images in pixels.
        start_size: side of the images at the start of the run, below `image_size`; none: the same all the time.
        size_step: pixels by which the side grows from there on.
        full_size_from: fraction of the run from which on the images have their full size.
        crop_pct: fraction of the resized image's side kept by the centre crop in evaluation; none: the model's own.
        layer_decay: factor of the learning rate from each layer to the one below; none: the same for all.
        drop_rate: dropout before the classifier.
        mixup: alpha of mixup; 0: off.
        cutmix: alpha of CutMix; 0: off.
        mixup_prob: probability that a batch is mixed at all.
        mixup_switch_prob: probability of CutMix where both are on.
        mixup_mode: draw once per "batch" or for each image ("elem").
        mixup_off: fraction of the run, at its end, without mixup and CutMix.
        label_smoothing: fraction of the label that is spread over all classes.
        augment: timm's auto augmentation, such as "rand-m9-mstd0.5-inc1"; "3-augment"; none: crops and flips only.
        color_jitter: strength of colour jitter; timm omits it where `augment` changes colours itself.
        crop_scale: area of a random crop, resized to `image_size`; none: no such crop.
        crop_padding: pixels of padding before a random crop of `image_size`, as for CIFAR; 0: no such crop.
        random_erasing: probability that a rectangle is replaced by noise.
        repeated_augmentation: copies of an image in a batch, each augmented separately; 1: off.
        teacher: a model with weights (a timm name, a checkpoint or an ONNX file) to distil from.
        teacher_size: side of the teacher's images in pixels; none: the student's, or the teacher's only one.
        distillation: "hard" trains on the teacher's predicted class, "soft" on its distribution.
        distill_alpha: weight of the teacher's loss.
        distill_tau: temperature of soft distillation.
    """

    task: Literal["classify"] = "classify"
    top1: Percent | None = None

    image_size: Count = 224
    start_size: Count | None = None
    size_step: Count = 32
    full_size_from: Fraction = 0.7
    crop_pct: Fraction | None = None
    layer_decay: Fraction | None = None
    drop_rate: Rate = 0.0

    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    mixup_prob: Probability = 1.0
    mixup_switch_prob: Probability = 0.5
    mixup_mode: Literal["batch", "elem"] = "batch"
    mixup_off: Probability = 0.0
    label_smoothing: Probability = 0.1
    augment: str | None = None
    color_jitter: NotNegative | None = None
    crop_scale: tuple[Probability, Probability] | None = (0.08, 1.0)
    crop_padding: CountOrZero = 0
    random_erasing: Probability = 0.0
    repeated_augmentation: Count = 1

    teacher: str | None = None
    teacher_size: Count | None = None
    distillation: Literal["none", "hard", "soft"] = "none"
    distill_alpha: Probability = 0.5
    distill_tau: Positive = 1.0

    def size_at(self, progress: float) -> int:
        """Side of the training images in pixels after this fraction of the run."""
        if self.start_size is None or progress >= self.full_size_from:
            return self.image_size
        sizes = range(self.start_size, self.image_size, self.size_step)
        return sizes[int(progress / self.full_size_from * len(sizes))]

    def _conflict(self) -> str | None:
        if self.start_size is not None and self.start_size >= self.image_size:
            return f"start_size {self.start_size} must be below image_size {self.image_size}; set it lower, or to none"
        if self.crop_scale and not 0 < self.crop_scale[0] <= self.crop_scale[1]:
            return f"crop_scale is {list(self.crop_scale)}, but must be two rising numbers above 0"
        if self.crop_scale and self.crop_padding:
            return "crop_scale and crop_padding are two kinds of crop; set crop_scale to none or crop_padding to 0"
        if self.augment is not None and not self.augment.startswith(AUGMENTS):
            return f"augment is {self.augment!r}, but must be none or start with one of {', '.join(AUGMENTS)}"
        if self.repeated_augmentation > self.batch_size:
            return f"{self.repeated_augmentation} copies of an image do not fit into a batch of {self.batch_size}"
        if self.distillation != "none" and self.teacher is None:
            return f"{self.distillation} distillation needs a teacher: a timm model, a checkpoint or an ONNX file"
        if self.teacher is None and self.teacher_size is not None:
            return f"teacher_size is {self.teacher_size}, but there is no teacher; set teacher, or teacher_size to none"
        if self.teacher is not None and self.distillation == "none":
            return f"the teacher {self.teacher} is not used; set distillation to hard or soft, or teacher to none"
        return super()._conflict()


@dataclass(frozen=True, kw_only=True)
class DenseRecipe(Recipe):
    """The keys that segmentation and detection share.

    Attributes:
        printed: the numbers in percent that the paper prints for this row, such as {miou: 46.5}.
        method_kwargs: arguments of the method.
        neck: the pyramid between backbone and head, where the method has a choice.
        scale: [long, short]: images are resized to fit into it, aspect ratio preserved; none: their own size.
        photometric: random changes of brightness, contrast, saturation and hue.
    """

    printed: dict[str, Percent] = field(default_factory=dict)
    method_kwargs: dict[str, Any] = field(default_factory=dict)
    neck: Literal["fpn", "atm_fpn"] = "fpn"
    scale: tuple[Count, Count] | None = None
    photometric: bool = False

    def _conflict(self) -> str | None:
        if self.scale and self.scale[0] < self.scale[1]:
            return f"scale is {list(self.scale)}, but must be the long side, then the short one"
        return super()._conflict()


@dataclass(frozen=True, kw_only=True)
class SegmentRecipe(DenseRecipe):
    """How a semantic segmenter is trained.

    Attributes:
        method: semantic_fpn or upernet.
        scale_range: factor on `scale`, drawn for each image; none: 1.
        crop_size: side of the random crop for training.
        cat_max: maximum fraction of a crop that one class may fill; a crop above it is drawn again, up to ten times.
        test_scales: factors on `scale` over which predictions are averaged in evaluation.
        test_flip: average with the predictions for flipped images as well.
        window: side of a sliding window in evaluation; none: the whole image at once.
        window_stride: stride of the sliding window; none: two thirds of `window`.
    """

    _required: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"method": "semantic_fpn or upernet", "crop_size": "the side of its training images, such as 512"}
    )

    task: Literal["segment"] = "segment"
    method: Literal["semantic_fpn", "upernet"]
    scale_range: tuple[Positive, Positive] | None = None
    crop_size: Count
    cat_max: Fraction = 1.0
    test_scales: tuple[Positive, ...] = (1.0,)
    test_flip: bool = False
    window: Count | None = None
    window_stride: Count | None = None

    def _conflict(self) -> str | None:
        if self.scale_range and self.scale_range[0] > self.scale_range[1]:
            return f"scale_range is {list(self.scale_range)}, but must be two rising numbers"
        if self.window_stride and self.window_stride > (self.window or 0):
            return f"window_stride {self.window_stride} leaves gaps between windows of {self.window or 0} px"
        return super()._conflict()


@dataclass(frozen=True, kw_only=True)
class DetectRecipe(DenseRecipe):
    """How a detector is trained.

    Attributes:
        method: retinanet, mask_rcnn or cascade_mask_rcnn.
        scales: short sides, one of which is drawn for each image instead of that of `scale`; []: always that one.
        crop_then_scale: crop a random part of the image before `scales` with probability 0.5, as DETR does.
    """

    _required: ClassVar[Mapping[str, str]] = MappingProxyType({"method": "retinanet, mask_rcnn or cascade_mask_rcnn"})

    task: Literal["detect"] = "detect"
    method: Literal["retinanet", "mask_rcnn", "cascade_mask_rcnn"]
    scales: tuple[Count, ...] = ()
    crop_then_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class DinoRecipe(Recipe):
    """How a backbone is trained without labels: DINO, arXiv 2104.14294.

    Attributes:
        printed: the numbers in percent that the paper prints for this row, such as {linear: 75.5, knn: 71.2}.
        image_size: side of the global crops in pixels, and of the images in evaluation.
        crop_pct: fraction of the resized image's side kept by the centre crop in evaluation; none: the model's own.
        crop_scale: area of a global crop; there are two of each image.
        local_crops: local crops of each image, which the student alone sees.
        local_size: side of the local crops in pixels.
        local_scale: area of a local crop.
        color_jitter: strength of brightness, contrast, saturation and hue changes, made with probability 0.8.
        blur_sigma: range of the Gaussian blur's standard deviation in pixels.
        out_dim: outputs of the head, the dimensions of the distributions that are compared.
        head_dim: hidden width of the head.
        bottleneck_dim: width of the head before its last layer.
        head_batch_norm: BatchNorm in the head; outputs of different images differ sooner, which short runs need.
        norm_last_layer: the rows of the last layer have norm 1; false: the norms are learned.
        freeze_last_layer: epochs at the start in which the last layer does not change.
        centering: against collapse: "center" subtracts the teacher's running mean, "sinkhorn" balances each batch.
        center_momentum: of the running mean.
        student_temp: temperature of the student's softmax.
        teacher_temp: temperature of the teacher's softmax, or of Sinkhorn.
        teacher_temp_start: the same at the start; it rises linearly over `teacher_temp_warmup` epochs.
        teacher_temp_warmup: epochs of that warm-up.
        teacher_momentum: momentum of the teacher's weights at the start; it rises to 1 along a cosine.
        knn_k: neighbours of the k-NN accuracy that is measured during training.
        knn_images: training images with which validation images are compared then.
        stop_on_collapse: end the run if all images get the same output, from a tenth of the run on.
    """

    task: Literal["dino"] = "dino"
    printed: dict[str, Percent] = field(default_factory=dict)
    select: Literal["best", "last"] = "last"

    image_size: Count = 224
    crop_pct: Fraction | None = None
    crop_scale: tuple[Fraction, Fraction] = (0.4, 1.0)
    local_crops: CountOrZero = 8
    local_size: Count = 96
    local_scale: tuple[Fraction, Fraction] = (0.05, 0.4)
    color_jitter: tuple[Probability, Probability, Probability, HalfTurn] = (0.4, 0.4, 0.2, 0.1)
    blur_sigma: tuple[Positive, Positive] = (0.1, 2.0)

    out_dim: Count = 65536
    head_dim: Count = 2048
    bottleneck_dim: Count = 256
    head_batch_norm: bool = False
    norm_last_layer: bool = True
    freeze_last_layer: NotNegative = 1.0
    centering: Literal["center", "sinkhorn"] = "center"
    center_momentum: Rate = 0.9
    student_temp: Positive = 0.1
    teacher_temp: Positive = 0.04
    teacher_temp_start: Positive = 0.04
    teacher_temp_warmup: NotNegative = 0.0
    teacher_momentum: Probability = 0.996

    knn_k: Count = 20
    knn_images: Count = 20_000
    stop_on_collapse: bool = False

    def _conflict(self) -> str | None:
        for key in ("crop_scale", "local_scale", "blur_sigma"):
            low, high = getattr(self, key)
            if low > high:
                return f"{key} is [{low:g}, {high:g}], but must be two rising numbers"
        if self.ema_decay:
            return "the teacher is the moving average of the weights; set ema and ema_half_life to none"
        if self.out_dim < 2:
            return f"out_dim is {self.out_dim}, but must be at least 2"
        return super()._conflict()


@dataclass(frozen=True, kw_only=True)
class VqaRecipe(Recipe):
    """How a ViLT is fine-tuned to answer questions about images.

    Attributes:
        printed: the numbers in percent that the paper prints for this row.
        context_broadcast: kind of context broadcasting inserted into each block; none: the model as it is.
        min_answer_count: questions that an answer must have to become a class; 9 gives VQAv2's 3,129 answers.
        head_lr_scale: factor on the learning rate of the new head.
    """

    task: Literal["vqa"] = "vqa"
    printed: dict[str, Percent] = field(default_factory=dict)
    context_broadcast: Literal["cb", "cbs", "gate", "hybrid"] | None = None
    min_answer_count: Count = 9
    head_lr_scale: Positive = 1.0

    def _conflict(self) -> str | None:
        if self.compile:
            return "compile is not supported for task vqa; set it to false"
        if self.head_lr_scale != 1 and self.optimizer in ("muon", "nmuon"):
            return f"head_lr_scale is not supported by {self.optimizer}; set it to 1"
        return super()._conflict()


RECIPES: dict[str, type[Recipe]] = {
    "classify": ClassifyRecipe,
    "segment": SegmentRecipe,
    "detect": DetectRecipe,
    "dino": DinoRecipe,
    "vqa": VqaRecipe,
}


def create_recipe(values: Mapping[str, Any]) -> Recipe:
    """Create a recipe of the class of `values["task"]`; default: classify."""
    name, task = values.get("name", ""), values.get("task", "classify")
    if task not in RECIPES:
        raise ValueError(f"recipe {name}: task is {task!r}, but must be one of {', '.join(RECIPES)}")
    schema = RECIPES[task]
    _check_keys(schema, name, values)
    for key, explanation in schema._required.items():
        if values.get(key) is None:
            raise ValueError(f"recipe {name}: task {task} needs {key}: {explanation}")
    return schema(**values)


def default_of(schema: type[Recipe], key: str) -> Any:
    """The default value of a key; `dataclasses.MISSING` for a required one."""
    one = next(f for f in fields(schema) if f.name == key)
    return one.default if one.default_factory is MISSING else one.default_factory()


def nearest(word: str, candidates: Sequence[str]) -> str:
    """A hint for a mistyped word: the candidate nearest to it, or nothing."""
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def type_hints(schema: type[Recipe]) -> dict[str, Any]:
    """The type of each key of a schema."""
    hints = get_type_hints(schema, include_extras=True)
    return {f.name: hints[f.name] for f in fields(schema)}


def _check_keys(schema: type[Recipe], name: str, values: Mapping[str, Any]) -> None:
    """Refuse the first key that the schema does not have."""
    keys = type_hints(schema)
    for key in values:
        if key in keys:
            continue
        if tasks := [task for task, other in RECIPES.items() if key in type_hints(other)]:
            task = next(task for task, own in RECIPES.items() if own is schema)
            raise ValueError(f"recipe {name}: {key} belongs to task {' and '.join(tasks)}, not {task}; leave it out")
        hint = nearest(str(key), list(keys)) or f"; the keys are {', '.join(keys)}"
        raise ValueError(f"recipe {name}: there is no key {key!r}{hint}")
