"""Muon with one batched matrix product per shape instead of a loop over the weights, as a CUDA graph on a GPU."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from tokamix.compile import capture_graph

# of the quintic Newton-Schulz iteration of modded-nanogpt, timm's default
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class StackedMuon(Optimizer):
    """Muon for matrices: momentum orthogonalised by Newton-Schulz. Groups with `use_fallback` are updated by AdamW.

    Muon, https://kellerjordan.github.io/posts/muon, with the learning rate of arXiv 2502.16982: an update has the RMS
    of an AdamW update, so one learning rate and weight decay fit both kinds of parameters. The update rule is that of
    timm's `muon`. timm loops over the matrices, which takes longer than the forward and backward pass of a small
    network; here matrices of equal shape are stacked. The hundreds of launches that remain take a GPU's host longer
    than the rest of a step, so `capture` records them once.

    Args:
        params: parameter groups; `muon_groups` creates them for a model.
        lr: learning rate.
        weight_decay: decoupled, multiplied by the learning rate.
        momentum: of the matrices' gradients.
        nesterov: use Nesterov momentum.
        betas: of AdamW.
        eps: of AdamW, and the lower limit of a matrix norm.
        fallback_lr_scale: factor on the learning rate for AdamW.
        fused: use PyTorch's fused AdamW.
        capture: replay the update of the matrices as a CUDA graph, one for each group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-7,
        fallback_lr_scale: float = 1.0,
        fused: bool = False,
        capture: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"betas": betas, "eps": eps, "fallback_lr_scale": fallback_lr_scale, "fused": fused}
        super().__init__(params, defaults | {"use_fallback": False})
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon needs whole matrices, but they are sharded; train without --fsdp, or with adamw")
        self.capture = capture
        self._captured: dict[tuple[int, ...], _Captured] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                (self._step_adamw if group["use_fallback"] else self._step_muon)(params, group)
        return loss

    def _step_muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        buffers = [self._get_state(p, "momentum_buffer") for p in params]
        decay = 1 - group["lr"] * group["weight_decay"]
        options = {key: group[key] for key in ("momentum", "nesterov", "eps")}
        if not self.capture:
            update_matrices(params, grads, buffers, decay, group["lr"], **options)
            return
        memory = tuple(t.data_ptr() for t in (*params, *buffers))  # a loaded state has buffers of its own
        if memory not in self._captured:
            if len(self._captured) >= len(self.param_groups):
                self._captured.clear()  # their memory is no longer in use
            self._captured[memory] = _Captured(params, grads, buffers, options)
        self._captured[memory].replay(grads, decay, group["lr"])

    def _step_adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device if group["fused"] else "cpu")
        adamw(
            params,
            [p.grad for p in params],  # type: ignore[misc]
            [self._get_state(p, "exp_avg") for p in params],
            [self._get_state(p, "exp_avg_sq") for p in params],
            [],
            [self.state[p]["step"] for p in params],
            fused=group["fused"],
            foreach=False if group["fused"] else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"] * group["fallback_lr_scale"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _get_state(self, p: Tensor, key: str) -> Tensor:
        state = self.state[p]
        if key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state[key]


class _Captured:
    """`update_matrices` as a CUDA graph; gradients and numbers are copied to where the graph reads them."""

    def __init__(
        self, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], options: dict[str, Any]
    ) -> None:
        self.grads = [grad.clone() for grad in grads]
        self.decay, self.lr = params[0].new_ones((2,), dtype=torch.float32).unbind()
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries initialise at their first call, which cannot be recorded
            copies = [[t.clone() for t in tensors] for tensors in (params, grads, buffers)]
            update_matrices(copies[0], copies[1], copies[2], self.decay, self.lr, **options)
        torch.cuda.current_stream().wait_stream(stream)
        with capture_graph(self.graph, capture_error_mode="thread_local"):  # other threads may pin memory meanwhile
            update_matrices(params, self.grads, buffers, self.decay, self.lr, **options)

    def replay(self, grads: list[Tensor], decay: float, lr: float) -> None:
        torch._foreach_copy_(self.grads, grads)
        self.decay.fill_(decay)
        self.lr.fill_(lr)
        self.graph.replay()


def update_matrices(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    decay: float | Tensor,
    lr: float | Tensor,
    *,
    momentum: float,
    nesterov: bool,
    eps: float,
) -> None:
    """Muon's update of matrices and convolutions, in place; `decay` is the factor of weight decay."""
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    directions = torch._foreach_lerp(grads, buffers, momentum) if nesterov else buffers
    torch._foreach_mul_(params, decay)
    stacks: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for p, direction in zip(params, directions, strict=True):
        # in the memory order of the weight: a permutation of the columns does not change the update
        permuted = p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        weight, matrix = (t.permute(0, 2, 3, 1) if permuted else t for t in (p, direction))
        weight = weight.view(len(p), -1)  # a view, so that the update reaches the parameter
        stacks[weight.shape].append((weight, matrix.reshape(len(p), -1)))
    for shape, pairs in stacks.items():
        weights, matrices = zip(*pairs, strict=True)
        updates = orthogonalise(torch.stack(matrices), eps).to(weights[0].dtype)
        torch._foreach_add_(weights, (updates * (-0.2 * max(shape) ** 0.5 * lr)).contiguous().unbind(0))


def orthogonalise(matrices: Tensor, eps: float = 1e-7) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices to a stack (B, m, n) by Newton-Schulz.

    In bfloat16, or in float32 on CPUs without bfloat16 products, where PyTorch's take 15 times as long or more.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(torch.float32 if matrices.is_cpu and not _has_bf16() else torch.bfloat16)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@cache
def _has_bf16() -> bool:
    """Whether oneDNN computes bfloat16 products on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def muon_groups(model: nn.Module, weight_decay: float, layer_decay: float | None = None) -> list[dict[str, Any]]:
    """timm's parameter groups, each split in two: matrices for Muon; classifier, stem, positions, vectors for AdamW."""
    excluded = _no_weight_decay(model)
    if layer_decay is None:
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=excluded)
    else:
        groups = param_groups_layer_decay(model, weight_decay, no_weight_decay_list=excluded, layer_decay=layer_decay)
    fallback_ids = _classifier_and_stem(model) | {id(p) for name, p in model.named_parameters() if name in excluded}
    split = []
    for group in groups:
        for fallback in (False, True):
            params = [p for p in group["params"] if (id(p) in fallback_ids or not _is_matrix(p)) == fallback]
            if params:
                split.append({**group, "params": params, "use_fallback": fallback})
    return split


def _is_matrix(p: Tensor) -> bool:
    """Whether a weight maps vectors to vectors: not a depthwise kernel, nor a table or gate with few rows."""
    return p.ndim >= 2 and min(p.shape[:2]) > 1 and min(len(p), p[0].numel()) >= 4


def _classifier_and_stem(model: nn.Module) -> set[int]:
    """Ids of the parameters of the classifier and of the stem, the child module that holds the first weight."""
    ids: set[int] = set()
    if hasattr(model, "get_classifier"):
        heads: Any = model.get_classifier()  # type: ignore[operator]
        for head in heads if isinstance(heads, tuple) else (heads,):
            ids |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    excluded, total = _no_weight_decay(model), sum(p.numel() for p in model.parameters())
    for name, p in model.named_parameters():
        if p.ndim >= 2 and name not in excluded:
            stem = dict(model.named_children()).get(name.partition(".")[0])
            if stem is None or sum(q.numel() for q in stem.parameters()) >= total / 2:
                return ids | {id(p)}  # the model has no separate stem
            return ids | {id(q) for q in stem.parameters()}
    return ids


def _no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that the model excludes from weight decay."""
    return set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
