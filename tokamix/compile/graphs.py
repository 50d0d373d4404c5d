"""CUDA graphs: one call recorded with static memory, and a model that records one graph per shape of its inputs."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

WARM_UP_CALLS = 3  # before a capture, in which compilers and libraries choose their kernels
MAX_COUNTED_KEYS = 1000  # input shapes whose calls are counted before they are recorded
CONSTANTS = (type(None), bool, int, float, str)  # outputs besides tensors that a replay may repeat


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph` without garbage collection: freeing another graph meanwhile would make the capture fail."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if collecting:
            gc.enable()


class Recording:
    """One call recorded as a CUDA graph, with static memory for inputs and outputs.

    The precision at the time of recording stays. Weights may change afterwards, but only in place.

    Args:
        run: called with the static inputs; must not wait for the GPU.
        inputs: tensors on one GPU, which fix shapes and memory formats.
        pool: memory pool of another graph. Both may then overwrite each other's outputs.
    """

    @torch.no_grad()
    def __init__(self, run: Callable[..., Any], inputs: Sequence[Tensor], pool: Any = None) -> None:
        with torch.inference_mode(False):  # writable both inside and outside of inference mode
            self.inputs = [tensor.detach().clone() for tensor in inputs]
        with torch.cuda.device_of(self.inputs[0]), _without_autocast_cache():
            self.graph, self.outputs = self._capture(lambda: run(*self.inputs), pool)

    @torch.no_grad()
    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Run the graph with new values of the inputs; the next replay overwrites what this one returns."""
        with torch.cuda.device_of(self.inputs[0]):
            for static, given in zip(self.inputs, inputs, strict=True):
                static.copy_(given)
            self.graph.replay()
        return self.outputs

    def _capture(self, run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU meanwhile, for example to pin memory
        with capture_graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = run()
        return graph, outputs


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache of cast weights: they would be freed before the graph is replayed."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Snapshot:
    """What a graph depends on: the modules of a model and the addresses of its parameters and buffers.

    It keeps the memory of replaced weights, so that a graph that is replayed once too often reads old values instead of
    freed memory.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.modules = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        held = [(group, name) for m in modules for group in (m._parameters, m._buffers) for name in group]
        self.tensors = [(group, name, _address(group[name])) for group, name in held]
        self.memory = [tensor.detach() for group, name in held if (tensor := group[name]) is not None]

    def is_current(self) -> bool:
        """Whether no module was replaced or set to training mode, and no parameter or buffer replaced or moved."""
        for group, name, child in self.modules:
            if group.get(name) is not child or (child is not None and _is_training(child)):
                return False
        return all(_address(group.get(name)) == address for group, name, address in self.tensors)


def _is_training(module: nn.Module) -> bool:
    """Whether a module is in training mode and may depend on it; folded batch norms leave new layers in that mode."""
    return module.training and not isinstance(module, (nn.Identity, nn.Linear, nn.Conv2d))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Graphed(nn.Module):
    """A model that runs as CUDA graphs in inference, one for each kind of input; `graphed` creates it.

    Attributes:
        model: the model itself, with its parameters.
    """

    def __init__(self, model: nn.Module, max_graphs: int = 8, warm_up: int = 2, clone: bool = True) -> None:
        super().__init__()
        if max_graphs < 1 or warm_up < 0:
            raise ValueError(f"max_graphs must be at least 1 and warm_up at least 0, got {max_graphs} and {warm_up}")
        self.model = model
        self.training = model.training
        self.max_graphs, self.warm_up, self.clone = max_graphs, warm_up, clone
        self.reset()

    def reset(self) -> None:
        """Drop all graphs and their memory; the next calls record again."""
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._calls: dict[Hashable, int] = {}
        self._snapshot: _Snapshot | None = None

    @property
    def recorded(self) -> int:
        """The number of graphs at present."""
        return len(self._recordings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, without gradients."""
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._check(tensors)
        if torch.compiler.is_compiling() or not _can_record(tensors):
            return self._run_eagerly(args, kwargs)
        key = (str(structure), *map(_describe, leaves), _autocast_state(tensors[0].device.type))
        if key in self._recordings:
            outputs = self._recordings[key].replay(tensors)
            if self._snapshot is not None and self._snapshot.is_current():  # checked while the GPU works
                self._recordings.move_to_end(key)
                return self._give(outputs)
        elif (calls := self._calls.get(key, 0)) < self.warm_up:
            if len(self._calls) >= MAX_COUNTED_KEYS:
                self._calls.clear()
            self._calls[key] = calls + 1
            return self._run_eagerly(args, kwargs)

        def run(*static: Tensor) -> Any:
            filled = iter(static)
            given = [next(filled) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            static_args, static_kwargs = tree_unflatten(given, structure)
            return self.model(*static_args, **static_kwargs)

        return self._give(self._record(key, run, tensors).replay(tensors))

    def _check(self, tensors: list[Tensor]) -> None:
        if self.model.training:
            raise ValueError("a graphed model is for inference, but the model is in training mode; call model.eval()")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ValueError(
                "a graphed model computes no gradients, but an input requires them; call the model itself, or use"
                " torch.no_grad()"
            )

    @torch.no_grad()
    def _run_eagerly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.model(*args, **kwargs)

    def _record(self, key: Hashable, run: Callable[..., Any], tensors: list[Tensor]) -> Recording:
        """Record a graph; drop the least recently used one if there are too many, all if the model has changed."""
        if self._snapshot is not None and not self._snapshot.is_current():
            self.reset()
        if self._snapshot is None:
            for name, module in self.model.named_modules():
                if _is_training(module):
                    raise ValueError(f"a graphed model is for inference, but {name} is in training mode; call eval()")
            self._snapshot = _Snapshot(self.model)
        while len(self._recordings) >= self.max_graphs:
            oldest, _ = self._recordings.popitem(last=False)
            self._calls.pop(oldest, None)  # it warms up again, or two shapes in turn would be recorded at every call
        device = tensors[0].device
        pools = [other.graph.pool() for other in self._recordings.values() if other.inputs[0].device == device]
        try:
            recording = Recording(run, tensors, pools[0] if pools else None)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name, reason = type(self.model).__name__, str(error).partition("\n")[0]
            raise RuntimeError(f"{name} cannot be recorded as a CUDA graph; call the model itself: {reason}") from error
        for leaf in tree_leaves(recording.outputs):
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise TypeError(
                    "a graphed model must return tensors in tuples, lists and dicts, but it returns a"
                    f" {type(leaf).__name__}; call the model itself"
                )
        self._recordings[key] = recording
        return recording

    def _apply(self, *args: Any, **kwargs: Any) -> "Graphed":
        self.reset()  # frees the memory on the device that the model leaves
        return super()._apply(*args, **kwargs)

    @torch.no_grad()
    def _give(self, outputs: Any) -> Any:
        return tree_map_only(Tensor, Tensor.clone, outputs) if self.clone else outputs

    def __getstate__(self) -> dict[str, Any]:
        """The state without graphs, for copies and files: a graph belongs to this process and these weights."""
        return {**self.__dict__, "_recordings": OrderedDict(), "_calls": {}, "_snapshot": None}

    def extra_repr(self) -> str:
        """The options, and the number of graphs."""
        return f"max_graphs={self.max_graphs}, warm_up={self.warm_up}, clone={self.clone}, recorded={self.recorded}"


def graphed(model: nn.Module, max_graphs: int = 8, warm_up: int = 2, clone: bool = True) -> Graphed:
    """Wrap a model so that inference on a GPU replays CUDA graphs: one launch per call instead of hundreds.

    A graph is recorded for each kind of input: shape, memory format, dtype, device, arguments that are no tensors, and
    autocast state. Nothing is compiled, and outputs are those of the model. Elsewhere (on a CPU, with tensors on
    several devices, under `torch.compile` or in another capture) the model itself is called.

    Weights may change in place. If parameters, buffers or modules are replaced or moved, the next call records again.
    Hooks and other Python code of the model run only in calls that are not replayed. Use one thread and one stream at a
    time. Copies and pickles have no graphs.

    Args:
        model: in evaluation mode; its forward pass must not wait for the GPU.
        max_graphs: kinds of input whose graphs are kept; the least recently used one is dropped.
        warm_up: calls of each kind of input before its graph is recorded.
        clone: return a copy of the graph's output. Without it the next call overwrites what this one returned, which
            saves a copy.
    """
    return Graphed(model, max_graphs, warm_up, clone)


def _can_record(tensors: Sequence[Tensor]) -> bool:
    """Whether all inputs are on one GPU and nothing else is being captured."""
    devices = {tensor.device for tensor in tensors}
    return len(devices) == 1 and tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing()


def _describe(leaf: Any) -> Hashable:
    """What a graph fixes about one input."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        kind = type(leaf).__name__
        raise TypeError(f"a graphed model takes tensors and constants that can be hashed, got a {kind}") from None
    return type(leaf), leaf


def _autocast_state(device: str) -> Hashable:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
