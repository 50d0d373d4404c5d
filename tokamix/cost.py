"""The cost of one forward pass, counted by tracing it: multiply-accumulates and evaluations of exp."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tokamix.ops.dispatch import use_backend

# operators that evaluate exp once per element of their output (of their input, if they reduce it)
EXP_OPERATORS = {
    "softmax": ("_softmax", "_safe_softmax", "_log_softmax", "logsumexp"),
    "gelu": ("gelu", "erf", "erfc"),
    "sigmoid": ("sigmoid", "silu", "glu", "log_sigmoid_forward"),
    "tanh": ("tanh", "mish"),
    "exp": ("exp", "exp2", "expm1", "elu", "softplus"),
}
KIND_OF = {operator: kind for kind, operators in EXP_OPERATORS.items() for operator in operators}
FUSED_ATTENTION = "_scaled_dot_product_"
# the same in ONNX files, with ONNX Runtime's fused operators
ONNX_EXP_OPERATORS = {
    "softmax": ("Softmax", "LogSoftmax", "ReduceLogSumExp", "Attention", "MultiHeadAttention"),
    "gelu": ("Gelu", "Erf", "FastGelu", "BiasGelu", "QuickGelu"),
    "sigmoid": ("Sigmoid", "Swish", "Silu"),
    "tanh": ("Tanh", "Mish"),
    "exp": ("Exp", "Elu", "Selu", "Celu", "Softplus"),
}
ONNX_KIND_OF = {operator: kind for kind, operators in ONNX_EXP_OPERATORS.items() for operator in operators}
ONNX_ROOTS = (
    *("LayerNormalization", "SimplifiedLayerNormalization", "InstanceNormalization", "GroupNormalization"),
    *("BatchNormalization", "RMSNormalization", "LpNormalization", "Sqrt", "ReduceL2"),
)


def count_exp(model: nn.Module | str | Path, img_size: int | tuple[int, int] = 224) -> Counter[str]:
    """Count the evaluations of exp in one forward pass of one image, by kind; `.total()` is their sum.

    Kinds are "softmax", "gelu" (an erf or tanh each, counted as one), "sigmoid" (SiLU too), "tanh" and "exp". The model
    is traced, so any model works; fused attention counts like its softmax, one per pair of tokens and head. A path is
    an ONNX file, whose graph is searched and run; `img_size` is for files of dynamic size.
    """
    if isinstance(model, str | Path):
        return _count_exp_in_onnx(Path(model), img_size)
    return trace_image(model, img_size, _ExpCounter).counts


def exp_nodes(path: str | Path) -> tuple[Counter[str], Counter[str]]:
    """Operators of an ONNX file that evaluate exp (softmax, erf, GELU, sigmoid, tanh), and those with square roots."""
    nodes = Counter(node.op_type for node in _all_nodes(_read_onnx(Path(path)).graph))
    roots = Counter({name: n for name, n in nodes.items() if name in ONNX_ROOTS})
    return Counter({name: n for name, n in nodes.items() if name in ONNX_KIND_OF}), roots


def count_macs(model: nn.Module, img_size: int | tuple[int, int] = 224) -> int:
    """Count the multiply-accumulates of one forward pass of one image: matrix products, convolutions and attention."""
    return trace_image(model, img_size, _FlopCounter).flops // 2


def _read_onnx(path: Path) -> Any:
    if path.suffix != ".onnx":
        raise ValueError(f"exp is counted in modules and .onnx files, got {path}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no ONNX file {path}")
    try:
        import onnx.inliner
        import onnxruntime  # noqa: F401
    except ImportError:
        raise ImportError(
            "counting exp in ONNX files needs onnx and onnxruntime: pip install 'tokamix[export]'"
        ) from None
    try:
        proto = onnx.load(str(path))
    except Exception as error:  # protobuf's own classes
        raise ValueError(f"{path} cannot be read as an ONNX file: {error}") from error
    return onnx.inliner.inline_local_functions(proto) if proto.functions else proto


def _all_nodes(graph: Any) -> Iterator[Any]:
    """The nodes of an ONNX graph, those in branches and loops included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _all_nodes(inner)


def _count_exp_in_onnx(path: Path, img_size: int | tuple[int, int]) -> Counter[str]:
    """Run the graph with its nodes of exp as outputs, whose sizes are counted."""
    proto = _read_onnx(path)
    found = [(ONNX_KIND_OF[node.op_type], node.output[0]) for node in proto.graph.node if node.op_type in ONNX_KIND_OF]
    inside = sum(node.op_type in ONNX_KIND_OF for node in _all_nodes(proto.graph)) - len(found)
    if inside:
        raise ValueError(
            f"{path} evaluates exp in branches or loops ({inside} nodes), whose evaluations cannot be counted;"
            " `tokamix.cost.exp_nodes` names the nodes"
        )
    if not found:
        return Counter()
    import numpy as np
    import onnx
    import onnxruntime

    own = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for _, name in found if name not in own)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    if len(session.get_inputs()) != 1:
        raise ValueError(
            f"{path} has {len(session.get_inputs())} inputs; exp is counted for files with one, the images"
        )
    (image,) = session.get_inputs()
    height, width = to_2tuple(img_size)
    free = iter([height, width] if isinstance(image.shape[0], int) else [1, height, width])
    shape = [size if isinstance(size, int) else next(free) for size in image.shape]
    pixels = np.zeros(shape, np.uint8 if "uint8" in image.type else np.float32)
    values = session.run([name for _, name in found], {image.name: pixels})
    counts: Counter[str] = Counter()
    for (kind, _), value in zip(found, values, strict=True):
        counts[kind] += value.size // shape[0]
    return counts


class _FlopCounter(TorchDispatchMode):
    """torch's formulas, without the per-module statistics of FlopCounterMode, which are slow and sometimes fail."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.formulas = 0, {**flop_registry, **_formulas()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.formulas:
            self.flops += self.formulas[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


class _ExpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")  # in place or not
        if name.startswith(FUSED_ATTENTION):
            query, key = args[:2]
            self.counts["softmax"] += math.prod(query.shape[:-1]) * key.shape[-2]
        elif name in KIND_OF:
            counted = args[0] if name == "logsumexp" else out[0] if isinstance(out, tuple) else out
            self.counts[KIND_OF[name]] += counted.numel()
        return out


def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs of operators that torch's counter lacks, in all versions or in older ones."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
        return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])

    def deformable(x: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
        return 2 * out_val.numel() * math.prod(weight.shape[1:])

    # torch 2.11 counts 0 for attention on the CPU
    formulas: dict[Any, Callable[..., int]] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    if hasattr(torch.ops.torchvision, "deform_conv2d"):
        formulas[torch.ops.torchvision.deform_conv2d] = deformable
    return formulas


def trace_image(model: nn.Module, img_size: int | tuple[int, int], make_mode: Callable[[], Any]) -> Any:
    """Run `model` on one image under a dispatch mode: on the meta device or, if that fails, on its own device."""
    own = first_float(model)
    image = torch.zeros(1, image_channels(model), *to_2tuple(img_size), dtype=own.dtype)
    with plain_inference(model):
        try:
            with make_mode() as mode:
                run_on_meta(model, image)
        except (
            RuntimeError,
            NotImplementedError,
        ):  # a tensor outside the state dict, or an operator without meta kernel
            if own.is_meta:
                raise
            with make_mode() as mode:
                model(image.to(own.device))
    return mode


def first_float(model: nn.Module) -> Tensor:
    """A parameter or buffer of a model, for its device and dtype."""
    tensors = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    return next(tensors, torch.empty(0))


def run_on_meta(model: nn.Module, image: Tensor) -> None:
    """Run a model without computing: its parameters, its buffers and the image are on the meta device meanwhile."""
    # named_modules has a shared module once: functional_call does not restore one that is replaced under two names
    state = {
        f"{path}.{name}".lstrip("."): tensor.to("meta")
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    functional_call(model, state, (image.to("meta"),), tie_weights=False)


def image_channels(model: nn.Module) -> int:
    """The channels of a model's images: those of its first convolution, unless a fixed transform precedes it."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return first if first <= 16 else cfg.get("input_size", (first,))[0]


@contextmanager
def plain_inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and with plain operators instead of fused ones."""
    training = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), use_backend("eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, flag in training.items():
            module.training = flag
