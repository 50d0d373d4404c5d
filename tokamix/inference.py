"""Preprocessing and class names of trained models (`InferenceConfig`), and loading trained models (`load_model`).

The config is saved with every model. Evaluation and prediction read it, so that both preprocess images as training did.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import timm
import torch
from huggingface_hub import hf_hub_download
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ImageNetInfo,
    infer_imagenet_subset,
    resolve_data_config,
)
from timm.models import split_model_name_tag
from torch import nn

from tokamix._construction import TIMM_NOTE, record_creation
from tokamix._hub import hub_access
from tokamix.checkpoint import MismatchError, load_checkpoint, read_checkpoint
from tokamix.files import write_text
from tokamix.models._registry import check_tag, create_model
from tokamix.runtimes import is_exported, load_exported
from tokamix.swap.changes import CHANGES, apply_changes, read_changes
from tokamix.tasks import Task

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar")
SEGMENT_ONLY = ("window", "window_stride", "test_scales", "test_flip")
CLASSIFY_ONLY = ("image_size", "crop_pct", "crop_mode")
CROP_MODES = ("center", "squash")
UNKNOWN = "unknown"  # construction of a module that cannot be created again from config.json
# changes of an existing model that config.json can name


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Preprocessing, class names and test-time options of a trained model.

    Attributes:
        task: "classify", "segment" or "detect".
        class_names: in the order of the model's outputs.
        mean: of each input channel, for pixels from 0 to 1.
        std: likewise.
        interpolation: how images are resized.
        image_size: side of a classifier's images in pixels.
        crop_pct: fraction of the resized image that the centre crop of a classifier keeps.
        crop_mode: "center" resizes the short side before the crop, "squash" both sides, as timm does.
        scale: (long, short): a segmenter's or detector's images are resized to fit into it; None: their own size.
        window: side of a segmenter's sliding window; None: the whole image at once.
        window_stride: from one window to the next; None: two thirds of `window`.
        test_scales: factors on `scale` over which a segmenter's predictions are averaged.
        test_flip: average with the predictions for flipped images as well.
        score_threshold: detections below it are not shown.
        category_ids: COCO's ids of a detector's classes.
    """

    task: Task
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    interpolation: str = "bicubic"
    image_size: int = 224
    crop_pct: float = 0.875
    crop_mode: str = "center"
    scale: tuple[int, int] | None = None
    window: int | None = None
    window_stride: int | None = None
    test_scales: tuple[float, ...] = (1.0,)
    test_flip: bool = False
    score_threshold: float = 0.3
    category_ids: tuple[int, ...] = ()

    @property
    def in_chans(self) -> int:
        """Number of input channels."""
        return len(self.mean)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def __post_init__(self) -> None:
        if self.task not in ("classify", "segment", "detect"):
            raise ValueError(f"task is {self.task!r}, but must be classify, segment or detect")
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values, but std has {len(self.std)}; give one per channel")
        for key in ("image_size", "window", "window_stride"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{key} is {value!r}, but must be a number of pixels from 1 on")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct is {self.crop_pct}, but must be above 0 and at most 1")
        if self.crop_mode not in CROP_MODES:
            raise ValueError(f"crop_mode is {self.crop_mode!r}, but must be {' or '.join(CROP_MODES)}")
        if not 0 <= self.score_threshold <= 1:
            raise ValueError(f"score_threshold is {self.score_threshold}, but must be from 0 to 1")
        if self.scale is not None and (len(self.scale) != 2 or min(self.scale) < 1):
            raise ValueError(f"scale is {self.scale}, but must be two lengths in pixels: long side, short side")
        if not self.test_scales or min(self.test_scales) <= 0:
            raise ValueError(f"test_scales is {self.test_scales}, but must be one or more positive factors")

    @property
    def has_class_names(self) -> bool:
        """Whether the class names are known, not just numbers in their place."""
        return self.class_names != _numbers(self.num_classes)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with different values; options of a different task and unknown ones are refused."""
        names = [f.name for f in fields(self)]
        foreign = {"classify": ("scale", *SEGMENT_ONLY), "segment": CLASSIFY_ONLY}
        foreign["detect"] = (*CLASSIFY_ONLY, *SEGMENT_ONLY)
        for key in changes:
            if key not in names:
                raise ValueError(f"{key!r} is not an inference option; choose from {', '.join(names)}")
            if key in foreign[self.task]:
                possible = [name for name in names[2:] if name not in foreign[self.task]]
                raise ValueError(f"{key} has no effect for task {self.task}; choose from {', '.join(possible)}")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in changes.items()}
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain lists and numbers, for config.json."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a config from `to_dict`."""
        names = [f.name for f in fields(cls)]
        if unknown := [key for key in values if key not in names]:
            raise ValueError(f"the inference config has the unknown key {unknown[0]!r}; it may be of a newer tokamix")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**arguments)

    @classmethod
    def from_model(
        cls,
        model: Any,
        class_names: Sequence[str] | None = None,
        *,
        task: Task = "classify",
        in_chans: int | None = None,
        **options: Any,
    ) -> Self:
        """Take the preprocessing of a timm model, or of the timm body of a segmenter or detector.

        Args:
            model: a timm model; its `pretrained_cfg` is read.
            class_names: in the order of the outputs; default: the model's own, ImageNet's, or numbers.
            task: what the model is used for.
            in_chans: number of input channels; default: that of the model's `pretrained_cfg`. If it has a different
                number, the mean over its channels is used for each.
            options: further fields, which replace the model's.
        """
        cfg = dict(getattr(model, "pretrained_cfg", None) or {})
        if class_names is None:
            cfg["num_classes"] = getattr(model, "num_classes", None) or cfg.get("num_classes") or 0
            class_names = _class_names(cfg)
        return cls(task=task, class_names=tuple(class_names), **_preprocessing(cfg, in_chans) | options)

    def save(self, folder: str | Path) -> None:
        """Write the config to config.json in a folder, under the key "inference"; other keys stay."""
        values = read_config(folder) | {"inference": self.to_dict()}
        write_text(Path(folder) / "config.json", json.dumps(values, indent=2))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the config from a folder's config.json; one written by timm gives its preprocessing and label names."""
        values = read_config(folder)
        if "inference" in values:
            return cls.from_dict(values["inference"])
        if "pretrained_cfg" not in values:
            raise ValueError(f"{folder} has no config.json with the keys 'inference' or 'pretrained_cfg'")
        cfg = {**values["pretrained_cfg"], **{k: values[k] for k in ("num_classes", "label_names") if k in values}}
        return cls(task="classify", class_names=_class_names(cfg), **_preprocessing(cfg))


def read_config(source: str | Path) -> dict[str, Any]:
    """Read config.json of a folder, or of the folder that holds a file; {} if there is none.

    timm's config.json of a changed network does not know the changes: they are read from the weights.
    """
    path = Path(source)
    path = (path.parent if path.is_file() else path) / "config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        return {}
    if str(values.get("architecture")).endswith(TIMM_NOTE) and (record := read_changes(path.parent)):
        arguments = {**values.get("model_args", {}), **(record["arguments"] or {})}
        name = values["architecture"].removesuffix(TIMM_NOTE)
        values["construction"] = {**record, "name": name, "arguments": arguments}
    return values


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Context in which forward passes run in a precision, as in training."""
    if precision not in DTYPES:
        raise ValueError(f"precision is {precision!r}, but must be one of {', '.join(DTYPES)}")
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("fp16 needs a GPU; use fp32 or bf16 on a CPU")
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and back into its previous mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def read_precision(source: Any) -> str:
    """Read the precision that a run was evaluated in: "fp32", "bf16" or "fp16"; fp32 for everything but a run."""
    if not isinstance(source, str | Path):
        return "fp32"
    return read_config(str(source).removeprefix("local-dir:")).get("precision", "fp32")


def choose_device(device: str | None) -> torch.device:
    """Check that a device exists; None: a GPU if there is one, otherwise the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"there is no device {device!r}; use cpu or cuda") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device} is not supported; use cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} is not available: PyTorch finds no GPU; use cpu")
    return chosen


def load_model(
    source: str | Path, *, model: str | None = None, num_classes: int | None = None, device: str | None = None
) -> tuple[Any, InferenceConfig]:
    """Load a trained model of any task, in evaluation mode, and its inference config.

    Args:
        source: a run's folder, a weights file of a run, a checkpoint file (then `model` names its architecture), a
            folder written by timm, `local-dir:PATH`, `hf-hub:user/name`, a timm name with pretrained weights, or a
            file that `tokamix.export` wrote (.onnx, .xml, .pt2, .pte), which runs in its runtime.
        model: name of the architecture, for a checkpoint file.
        num_classes: of the architecture, for a checkpoint file; default: the architecture's own.
        device: that an exported file runs on; default: the CPU, or the device it was compiled for. Other models are
            loaded on the CPU.
    """
    if is_exported(source):
        return _load_exported(source, device, model)
    name = str(source).removeprefix("local-dir:")
    path = Path(name)
    if path.is_dir() and model is not None:
        _check_name(source, read_config(path).get("architecture", model), model)
    if path.is_dir() or (path.is_file() and model is None):
        return _load_folder(path)
    if path.is_file():
        assert model is not None
        return _load_file(path, model, num_classes)
    if str(source).startswith("hf-hub:"):
        repository, _, revision = name.removeprefix("hf-hub:").partition("@")
        files: Any = {"repo_id": repository, "revision": revision or None}
        with hub_access(name):
            folder = Path(hf_hub_download(filename="config.json", **files)).parent
        if "construction" in read_config(folder):
            with hub_access(name):
                hf_hub_download(filename="model.safetensors", **files)
            return _load_folder(folder)
        network = create_model(str(source), pretrained=True)
    else:
        network = _load_pretrained(name)
        _check_name(source, split_model_name_tag(name.split("/")[-1])[0], model)
    return network.eval(), InferenceConfig.from_model(network)


def _check_name(source: str | Path, held: str, model: str | None) -> None:
    """Refuse a name of the architecture that is not the one of the source."""
    if model not in (None, held, str(source)):
        raise ValueError(f"{source} holds {held}, not {model}; leave out --model, which is for checkpoint files")


def _load_exported(path: str | Path, device: str | None, model: str | None = None) -> tuple[Any, InferenceConfig]:
    """Open a file of `tokamix.export` in its runtime."""
    network = load_exported(path, torch.device(device or "cpu").type)
    _check_name(path, network.metadata.get("model", "an exported model"), model)
    config = InferenceConfig.from_dict(network.metadata["inference"])
    if network.metadata["features"]:
        raise ValueError(f"{path} holds a feature extractor, which predicts nothing; export without --features")
    if config.task == "detect":
        from tokamix.dense.saved import ExportedDetector

        return ExportedDetector(network).eval(), config
    return network.eval(), config


def _load_folder(path: Path) -> tuple[Any, InferenceConfig]:
    """Load a run's best weights, or the given weights file of a run."""
    folder = path.parent if path.is_file() else path
    values = read_config(folder)
    if not values and path.is_file():
        raise ValueError(f"{path} holds weights of an unknown architecture; name it with --model")
    if not values:
        raise FileNotFoundError(f"{path} is neither a run's folder nor a timm model's: it has no config.json")
    if values.get("task") == "vqa":
        raise ValueError(f"{folder} holds a ViLT that answers questions; load it with tokamix.vqa.load_vqa")
    weights = path if path.is_file() else folder / "model.safetensors"
    if path.is_dir() and not weights.is_file() and not (folder / "pytorch_model.bin").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors; has the run finished its first evaluation?")
    if not weights.is_file():
        weights = folder / "pytorch_model.bin"  # timm can write it instead
    config = InferenceConfig.load(folder)
    if "method" in values:  # a segmenter or detector
        from tokamix.dense.saved import create_dense_model, load_matching_weights

        network = create_dense_model(values)
        if missing := load_matching_weights(network, weights):
            raise ValueError(f"{weights} has no weights for {len(missing)} parameters, such as {missing[0]}")
    elif path.is_dir() and "construction" not in values:
        network = timm.create_model(f"local-dir:{folder}", pretrained=True)
        record_creation(network, values["architecture"], values.get("model_args", {}))
    else:
        if read_construction(values)["name"] is None:
            raise ValueError(
                f"{folder} holds {values['architecture']}, which config.json cannot describe; create the module"
                f" yourself and load its weights with tokamix.load_checkpoint(module, {str(folder)!r})"
            )
        network = create_saved_classifier(values)
        _load_weights(network, weights, read_checkpoint(weights))
    return network.eval(), config


def read_construction(values: Mapping[str, Any]) -> dict[str, Any]:
    """Registered name of the network of config.json, its arguments, and the changes made to it.

    The name is None for a module of unknown construction, and if config.json names none.
    """
    construction = values.get("construction")
    if construction == UNKNOWN:
        return {"name": None, "arguments": {}, "steps": []}
    if construction is None:
        return {"name": values.get("architecture"), "arguments": values.get("model_args", {}), "steps": []}
    if unknown := [step["function"] for step in construction["steps"] if step["function"] not in CHANGES]:
        raise ValueError(f"config.json names the unknown change {unknown[0]!r}; it may be of a newer tokamix")
    return dict(construction)


def create_saved_classifier(values: Mapping[str, Any]) -> Any:
    """Create the classifier that config.json describes, with initial weights."""
    construction = read_construction(values)
    cfg = {key: value for key, value in values["pretrained_cfg"].items() if key != "architecture"}
    arguments = {"num_classes": values["num_classes"], **construction["arguments"]}
    network = create_model(construction["name"], pretrained_cfg=cfg, **arguments)
    return apply_changes(network, construction["steps"])


def _load_file(path: Path, name: str, num_classes: int | None) -> tuple[Any, InferenceConfig]:
    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    network = create_model(name, **arguments)
    checkpoint = read_checkpoint(path)
    try:
        _load_weights(network, path, checkpoint)
    except MismatchError as error:
        saved = checkpoint.get("arch")  # timm's training script stores it
        trained = f"it was saved by {saved}: " if isinstance(saved, str) and saved != name else ""
        raise ValueError(f"{path}: {error.differences}; {trained}name the model of the file with --model") from None
    return network.eval(), InferenceConfig.from_model(network)


def _load_weights(network: Any, path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Load the checkpoint read from a path, which must have a classifier with the network's number of classes."""
    if load_checkpoint(network, checkpoint).fresh:
        raise ValueError(
            f"{path} was not trained for {network.num_classes} classes: its classifier has a different number"
        )


def _load_pretrained(name: str) -> Any:
    """Load timm's pretrained weights of a model."""
    architecture = split_model_name_tag(name.split("/")[-1])[0]
    if not timm.is_model(architecture) and (
        "/" in name or "\\" in name or name.startswith((".", "~")) or Path(name).suffix in WEIGHT_SUFFIXES
    ):
        raise FileNotFoundError(f"there is no run folder and no checkpoint file {name}")
    if timm.is_model(architecture):
        check_tag(name)
        cfg = timm.get_pretrained_cfg(name.split("/")[-1], allow_unregistered=True)
        if cfg is None or not cfg.has_weights:
            raise ValueError(
                f"{name} has no pretrained weights; give a run's folder, or a checkpoint file with --model {name}"
            )
    return create_model(name, pretrained=True)


def _preprocessing(cfg: Mapping[str, Any], in_chans: int | None = None) -> dict[str, Any]:
    """Fields of `InferenceConfig` from timm's pretrained_cfg."""
    data = resolve_data_config(pretrained_cfg=dict(cfg) or {"input_size": (3, 224, 224)})
    channels = in_chans or data["input_size"][0]
    mean, std = (
        tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
        for values in (data["mean"], data["std"])
    )
    size = {"image_size": data["input_size"][-1], "crop_pct": data["crop_pct"]}
    size["crop_mode"] = data["crop_mode"] if data["crop_mode"] in CROP_MODES else "center"
    return {"mean": mean, "std": std, "interpolation": data["interpolation"], **size}


def _class_names(cfg: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names from timm's pretrained_cfg: its own, ImageNet's for that number of classes, or numbers."""
    count = cfg.get("num_classes") or 0
    names = cfg.get("label_names") or ()
    if len(names) == count:
        return tuple(names)
    return tuple(name for _, name in imagenet_classes(count)) or _numbers(count)


def imagenet_classes(count: int) -> list[tuple[str, str]]:
    """Return WordNet id and unique name of each class of the ImageNet subset with that number of classes, or []."""
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return []
    info = ImageNetInfo(subset)
    labels = [info.index_to_label_name(i) for i in range(count)]
    names = [info.label_name_to_description(label) for label in labels]
    occurrences = Counter(names)  # "crane" is a bird and a machine
    unique = (
        name if occurrences[name] == 1 else f"{name} ({label})" for name, label in zip(names, labels, strict=True)
    )
    return list(zip(labels, unique, strict=True))


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
