"""Latency of models in several runtimes, all in turn in one run: PyTorch, ONNX Runtime, OpenVINO; `tokamix bench`."""

import copy
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tokamix.bench.timing import peak_gb
from tokamix.compile import graphed
from tokamix.cost import count_exp, count_macs
from tokamix.export import export
from tokamix.export.check import compare_outputs, largest_difference
from tokamix.export.graph import create_graph
from tokamix.inference import InferenceConfig
from tokamix.models._registry import create_model
from tokamix.runtimes import first_reason, load_exported

# runtime -> package that it needs, target of `tokamix export`, precision
EXPORTED = {
    "onnx": ("onnxruntime", "onnx", "fp32"),
    "onnx-int8": ("onnxruntime", "onnx", "int8"),
    "openvino": ("openvino", "openvino", "fp32"),
    "openvino-bf16": ("openvino", "openvino", "bf16"),
    "openvino-int8": ("nncf", "openvino", "int8"),
    "aoti": ("torch", "aoti", "fp32"),
}
ON_A_GPU = ("graphed", "compile", "graphs")  # without compilation, without CUDA graphs, with both
RUNTIMES = ("eager", *ON_A_GPU, *EXPORTED)
ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"img_size": None},
    {"dynamic_img_size": True},
    {},
)  # arguments with which a model takes another size
DENSE_CLASSES = {"segment": 150, "detect": 80}  # of ADE20K and COCO
WARM_UP, MIN_ROUNDS = 3, 7


@dataclass
class RuntimeRow:
    """One model in one runtime."""

    model: str
    runtime: str
    device: str
    size: int
    batch: int
    milliseconds: float  # median of one batch
    spread: float  # half the range between the quartiles, as a fraction of the median
    images_per_second: float
    speedup: float  # over eager in the same run; NaN without eager
    memory_gb: float  # that loading and one call added: the peak on a GPU (not known of aoti), resident on a CPU
    joules_per_image: float  # NaN where the device does not tell its power
    parameters: int
    macs: int
    exps: int
    error: float  # relative RMSE of the logits against float32 in eager mode

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


def installed_runtimes(device: str) -> list[str]:
    """The runtimes that can be measured here, without those that are slow to prepare."""
    names = ["eager", *(ON_A_GPU if device == "cuda" else ())]
    if device == "cpu":
        names += [name for name, (package, _, _) in EXPORTED.items() if find_spec(package) and name != "aoti"]
    return names


def check_runtimes(runtimes: Sequence[str], device: str) -> None:
    """Refuse runtimes that do not exist or do not run on this device."""
    if unknown := [name for name in runtimes if name not in RUNTIMES]:
        raise ValueError(f"there is no runtime {unknown[0]!r}; choose from {', '.join(RUNTIMES)}")
    if device == "cpu" and (wrong := [name for name in runtimes if name in ("graphed", "graphs")]):
        raise ValueError(f"CUDA graphs need a GPU; leave out the runtime {wrong[0]}")
    if device == "cuda" and (wrong := [name for name in runtimes if name.startswith("openvino")]):
        raise ValueError(f"{wrong[0]} runs on a CPU; use --device cpu")


def measure_runtimes(
    models: Sequence[str],
    sizes: Sequence[int] = (224,),
    batches: Sequence[int] = (1,),
    runtimes: Sequence[str] = ("eager",),
    device: str = "cpu",
    seconds: float = 5.0,
    log: Callable[[str], None] = print,
    folder: Path | None = None,
) -> Iterator[RuntimeRow]:
    """Check and time models; the models and runtimes of one size and batch run in turn, so that load hits all alike.

    On a GPU everything runs in bf16, on a CPU in fp32 unless the runtime says otherwise. int8 is calibrated on random
    images here: its speed is right, its accuracy is not judged. A model that fails in a runtime is logged and left out.

    Args:
        models: names, ours or timm's; a segmenter or detector is RECIPE:BACKBONE, as in atmnet_upernet:atmnet_tiny.
        sizes: sides of the images.
        batches: images of one call.
        runtimes: of `RUNTIMES`.
        device: "cpu" or "cuda".
        seconds: time for each size and batch, divided among all.
        log: called with a line for each preparation and failure.
        folder: where exported files are kept; files that it holds already are not written again. Default: not kept.
    """
    check_runtimes(runtimes, device)
    for size in sizes:
        for batch in batches:
            with tempfile.TemporaryDirectory() as temporary, _compilation(len(models), runtimes):
                cases = list(prepare_calls(models, size, batch, runtimes, device, folder or Path(temporary), log))
                yield from _time_in_turn(cases, seconds)


@contextmanager
def _compilation(models: int, runtimes: Sequence[str]) -> Iterator[None]:
    """Let torch.compile make a graph for each model.

    Models may share a `forward`. After 8 graphs of one function, Dynamo runs it without compilation: its result would
    be right, and its time that of eager mode.
    """
    kinds = sum(name in ("compile", "graphs") for name in runtimes)
    if not kinds:
        yield
        return
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8 + kinds * models):
        yield


def create_for_size(name: str, size: int) -> nn.Module:
    """Create a model, with random weights, that takes images of this size."""
    if ":" in name:
        return _create_dense(*name.split(":", 1))
    for arguments in ANY_SIZE:
        filled: dict[str, Any] = {key: size if value is None else value for key, value in arguments.items()}
        try:
            return create_model(name, **filled).eval()
        except (TypeError, ValueError):  # an argument that the model does not have
            continue
    return create_model(name).eval()


def _create_dense(name: str, backbone: str) -> nn.Module:
    from tokamix.dense import create_detector, create_segmenter
    from tokamix.recipes import load_recipe

    recipe: Any = load_recipe(name, model=backbone)
    create: Any = {"segment": create_segmenter, "detect": create_detector}.get(recipe.task)
    if create is None:
        raise ValueError(f"recipe {name} is for task {recipe.task}, but must be for segment or detect")
    options = {"neck": recipe.neck, **recipe.method_kwargs, **recipe.model_kwargs}
    return create(recipe.method, backbone, DENSE_CLASSES[recipe.task], **options).eval()


def _config(model: nn.Module) -> InferenceConfig:
    from tokamix.dense import Detector, Segmenter

    if isinstance(model, Detector | Segmenter):
        task: Any = "detect" if isinstance(model, Detector) else "segment"
        return InferenceConfig(task=task, class_names=tuple(map(str, range(DENSE_CLASSES[task]))))
    return InferenceConfig.from_model(model).replace(crop_pct=1.0)


def prepare_calls(
    names: Sequence[str],
    size: int,
    batch: int,
    runtimes: Sequence[str],
    device: str,
    folder: Path,
    log: Callable[[str], None],
) -> Iterator[tuple[RuntimeRow, Callable[[], object]]]:
    """Create, export or compile models, check their outputs, and yield rows without times with the calls to time."""
    for name in names:
        torch.manual_seed(0)
        model = create_for_size(name, size)
        config = _config(model)
        images = torch.randn(batch, 3, size, size)
        parameters = sum(p.numel() for p in model.parameters())
        if config.task == "classify":
            network, folded = model, reparameterize_model(model)
        else:  # from images to tensors, as the exported files
            network = folded = create_graph(model, config, preprocessing=False, features=False, precision="fp32")
        try:
            with torch.no_grad():
                exact = _outputs(network(images[:1]))
        except (AssertionError, RuntimeError, ValueError) as problem:
            log(f"{name} {size} px: FAILED, the model does not take this size: {first_reason(problem)[:200]}")
            continue
        counts = (parameters, count_macs(network, size), count_exp(network, size).total())
        for runtime in runtimes:
            label = f"{name} {runtime} {size} px, batch {batch}"
            start, before = time.perf_counter(), _used_gb(device)
            try:
                path = folder / f"{name.replace(':', '_')}_{runtime}_{size}_{batch}"
                call = _create_call(runtime, folded, model, config, images, device, path)
                error = compare_outputs(exact, [out[:1] for out in _outputs(call())], config.task)
                if not error <= largest_difference(config.task, _precision(runtime, device)):
                    raise RuntimeError(f"not timed, because the result is wrong: relative error {error:.1e}")
            except Exception as problem:  # the others must still be measured
                log(f"{label}: FAILED, {type(problem).__name__}: {first_reason(problem)[:200]}")
                continue
            memory = _used_gb(device) if device == "cpu" else math.nan if runtime == "aoti" else peak_gb(call)
            log(f"{label}: ready after {time.perf_counter() - start:.0f} s, relative error {error:.0e}")
            head = (name, runtime, device, size, batch)
            nan = math.nan
            yield RuntimeRow(*head, nan, nan, nan, nan, memory - before, nan, *counts, error), call


def _create_call(
    runtime: str,
    folded: nn.Module,
    model: nn.Module,
    config: InferenceConfig,
    images: Tensor,
    device: str,
    path: Path,
) -> Callable[[], Any]:
    if runtime in EXPORTED:
        from tokamix.export.write import SUFFIX

        target, precision = EXPORTED[runtime][1], _precision(runtime, device)
        size = (images.shape[-2], images.shape[-1])
        options: dict[str, Any] = (
            {"data": _random_data(size[0], config.num_classes, config.class_names)} if precision == "int8" else {}
        )
        file = path.with_name(path.name + SUFFIX[target])
        if not file.is_file():
            export(
                model,
                file,
                to=target,  # type: ignore[arg-type]
                size=size,
                batch=len(images),
                precision=precision,  # type: ignore[arg-type]
                config=config,
                device=device if target == "aoti" else "cpu",  # type: ignore[arg-type]
                **options | ({"max_drop": 101, "keep_layers": 0} if options else {}),
            )
        network: Any = load_exported(file, "cpu" if target in ("openvino", "executorch") else device).run
        images = images.to(device if target == "aoti" else "cpu")
    else:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        network, images = copy.deepcopy(folded).to(device, dtype), images.to(device, dtype)
        if runtime == "graphed":
            network = graphed(network)
        elif runtime != "eager":
            network = torch.compile(network, dynamic=False, mode="reduce-overhead" if runtime == "graphs" else None)

    def run() -> Any:
        with torch.inference_mode():
            out = network(images)
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


def _precision(runtime: str, device: str) -> str:
    """What is measured on a GPU in PyTorch or AOTInductor is in bf16."""
    if device == "cuda" and (runtime == "aoti" or runtime not in EXPORTED):
        return "bf16"
    return EXPORTED[runtime][2] if runtime in EXPORTED else "fp32"


def _random_data(size: int, classes: int, names: Sequence[str] = ()) -> Any:
    """A few random images: enough to calibrate int8 where only its speed counts."""
    from tokamix.data import ArrayDataset, DatasetSplits

    images = torch.randint(256, (8, 3, size, size), dtype=torch.uint8)
    names = tuple(names) or tuple(map(str, range(classes)))
    part = ArrayDataset(images, torch.zeros(8, dtype=torch.int64), names)
    return DatasetSplits("random images", part, part, names)


def _time_in_turn(cases: list[tuple[RuntimeRow, Callable[[], object]]], seconds: float) -> Iterator[RuntimeRow]:
    """Call all cases in turn until the time is over; the medians of what each took."""
    times: list[list[float]] = [[] for _ in cases]
    start, rounds = time.perf_counter(), 0
    while cases and (rounds < WARM_UP + MIN_ROUNDS or time.perf_counter() - start < seconds):
        for (_, call), values in zip(cases, times, strict=True):
            begin = time.perf_counter()
            call()
            values.append(1e3 * (time.perf_counter() - begin))
        rounds += 1
    kept = [values[WARM_UP:] for values in times]
    eager = {row.model: statistics.median(v) for (row, _), v in zip(cases, kept, strict=True) if row.runtime == "eager"}
    for (row, call), values in zip(cases, kept, strict=True):
        row.milliseconds = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4)
        row.spread = (high - low) / 2 / row.milliseconds
        row.images_per_second = 1e3 * row.batch / row.milliseconds
        row.speedup = eager.get(row.model, math.nan) / row.milliseconds
        row.joules_per_image = _joules(call, row) if row.device == "cuda" else math.nan
        yield row


def _joules(call: Callable[[], object], row: RuntimeRow) -> float:
    """Energy of one image: the power that the GPU reports while the model runs for a second, times its time."""
    try:
        watts, end = [], time.perf_counter() + 1
        while time.perf_counter() < end:
            call()
            watts.append(torch.cuda.power_draw() / 1e3)
        return statistics.mean(watts) / row.images_per_second
    except Exception:  # without nvidia-ml-py, or a GPU that does not tell
        return math.nan


def _outputs(outputs: Any) -> list[Tensor]:
    values = [outputs] if isinstance(outputs, Tensor) else map(torch.as_tensor, outputs)
    return [value.float().cpu() if value.is_floating_point() else value.cpu() for value in values]


def _used_gb(device: str) -> float:
    if device == "cuda":  # by PyTorch; AOTInductor allocates weights itself
        return torch.cuda.memory_allocated() / 1e9
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (OSError, ValueError):  # not Linux
        return math.nan


def write_rows(rows: Iterator[RuntimeRow], path: Path) -> list[RuntimeRow]:
    """Write each row to a CSV file as soon as it is measured."""
    import csv

    written: list[RuntimeRow] = []
    with ExitStack() as stack:
        writer: Any = None
        for row in rows:
            if writer is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w", newline=""))
                writer = csv.DictWriter(file, list(row.as_dict()))
                writer.writeheader()
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.as_dict().items()})
            file.flush()
            written.append(row)
    if not written:
        raise ValueError("all measurements failed; nothing is written")
    return written


def draw_rows(rows: Sequence[RuntimeRow], path: Path) -> None:
    """Draw latencies as bars, one group for each model and size, one colour for each runtime."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'tokamix[bench]'") from None
    groups = list(dict.fromkeys((row.model, row.size, row.batch) for row in rows))
    runtimes = list(dict.fromkeys(row.runtime for row in rows))
    longest = max(len(model) for model, _, _ in groups)
    inches = max(0.26 * (len(runtimes) + 1), 0.085 * max(longest, 16) + 0.1)  # of a group: its bars, or its label
    figure = Figure(figsize=(max(6.0, 1.1 + inches * len(groups)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 1 / (len(runtimes) + 1)
    for i, runtime in enumerate(runtimes):
        found = {(row.model, row.size, row.batch): row.milliseconds for row in rows if row.runtime == runtime}
        places = [j for j, group in enumerate(groups) if group in found]
        axes.bar([j + i * width for j in places], [found[groups[j]] for j in places], 0.9 * width, label=runtime)
    labels = [f"{model}\n{size} px, batch {batch}" for model, size, batch in groups]
    axes.set_xticks([j + width * (len(runtimes) - 1) / 2 for j in range(len(groups))], labels, fontsize=8)
    axes.set_ylabel("milliseconds, median")
    axes.set_title(f"Latency on {rows[0].device}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
