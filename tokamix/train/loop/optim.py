"""Optimizer, learning rate schedule and stochastic depth of a recipe."""

import inspect
import logging
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath
from timm.optim import create_optimizer_v2, get_optimizer_class, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from tokamix.recipes import Recipe
from tokamix.train.loop.muon import StackedMuon, muon_groups

_log = logging.getLogger("tokamix")


def create_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Create the optimizer; norms, biases and parameters that the model excludes have no weight decay."""
    muon = recipe.optimizer in ("muon", "nmuon")
    optimizer_class = StackedMuon if muon else get_optimizer_class(recipe.optimizer, bind_defaults=False)
    parameters = inspect.signature(optimizer_class).parameters
    if unknown := [key for key in recipe.optimizer_kwargs if key not in parameters]:
        raise ValueError(
            f"recipe {recipe.name}: optimizer {recipe.optimizer} has no argument {unknown[0]!r} of optimizer_kwargs;"
            f" its arguments are {', '.join(parameters)}"
        )
    kwargs: dict[str, Any] = dict(recipe.optimizer_kwargs)
    if recipe.betas is not None:
        kwargs["betas"] = tuple(recipe.betas)
    if recipe.eps is not None:
        kwargs["eps"] = recipe.eps
    if device.type == "cuda" and recipe.precision != "fp16" and "fused" in parameters:
        kwargs["fused"] = True
    layer_decay = getattr(recipe, "layer_decay", None)
    if muon:
        kwargs |= {"nesterov": recipe.optimizer == "nmuon", "momentum": recipe.momentum}
        kwargs.setdefault("capture", device.type == "cuda" and torch.version.hip is None)
        groups = muon_groups(model, recipe.weight_decay, layer_decay)
        return StackedMuon(groups, lr=recipe.peak_lr, weight_decay=recipe.weight_decay, **kwargs)
    if (scale := getattr(recipe, "head_lr_scale", 1.0)) != 1:
        kwargs["param_group_fn"] = partial(_scale_head, weight_decay=recipe.weight_decay, scale=scale)
    return create_optimizer_v2(
        model,
        opt=recipe.optimizer,
        lr=recipe.peak_lr,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        layer_decay=layer_decay,
        **kwargs,
    )


def _scale_head(model: Any, weight_decay: float, scale: float) -> list[dict[str, Any]]:
    """Parameter groups with a factor on the learning rate of the classifier."""
    head = {id(parameter) for parameter in model.classifier.parameters()}
    groups = []
    for group in param_groups_weight_decay(model, weight_decay):
        for in_head, factor in ((False, 1.0), (True, scale)):
            parameters = [p for p in group["params"] if (id(p) in head) is in_head]
            groups.append({"params": parameters, "weight_decay": group["weight_decay"], "lr_scale": factor})
    return [group for group in groups if group["params"]]


def create_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int) -> Scheduler:
    """Create the schedule: warm-up, then the recipe's schedule, as a function of the optimizer step alone."""
    total = recipe.iterations or recipe.epochs * steps
    unit = 1 if recipe.iterations else steps
    if recipe.warmup_iterations is not None:
        warmup, start = float(recipe.warmup_iterations), recipe.warmup_ratio * recipe.peak_lr
    else:
        warmup, start = 0.0 if recipe.iterations else recipe.warmup_epochs * steps, recipe.warmup_lr
    if warmup >= total:  # more iterations of warm-up than a small data set gives steps
        _log.warning("warm-up of %d iterations is shortened to %d: the run has %d", warmup, total // 10, total)
        warmup = float(total // 10)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched={"step": "multistep", "constant": "multistep", "linear": "poly"}.get(recipe.schedule, recipe.schedule),
        num_epochs=total,
        decay_milestones=[round(m * unit) + 1 for m in recipe.milestones],  # timm decays one step early
        decay_rate={"poly": recipe.power, "linear": 1.0}.get(recipe.schedule, 0.1),  # timm has one argument for both
        min_lr=recipe.min_lr,
        warmup_lr=start,
        warmup_epochs=warmup,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule


class WeightDecaySchedule:
    """Weight decay that follows a cosine from the recipe's `weight_decay` to `weight_decay_end`, if that is set."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
        self.optimizer = optimizer  # not its groups: loading a state replaces them
        self.start, self.end = recipe.weight_decay, recipe.weight_decay_end

    def set_progress(self, progress: float) -> None:
        """Set the optimizer's weight decay for this fraction of the run."""
        if self.end is None:
            return
        for group in self.optimizer.param_groups:
            if group["weight_decay"]:  # others have none at any time
                group["weight_decay"] = cosine(self.start, self.end, progress)


def cosine(start: float, end: float, progress: float) -> float:
    """The value of a cosine schedule from `start` to `end` at a fraction of the run."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def clip_each_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradient of each parameter to a norm of its own; returns the norm of all before, without waiting."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients)
    scales = (max_norm / (torch.stack(norms) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(scales.unbind()))
    return torch.linalg.vector_norm(torch.stack(norms))


class DropPathSchedule:
    """Stochastic depth that may change during the run; the rates of the layers keep their ratios."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.rates = {0: recipe.drop_path, **recipe.drop_path_later} if recipe.drop_path_later else {}
        layers = [module for module in model.modules() if isinstance(module, DropPath)]
        top = max((layer.drop_prob for layer in layers), default=0.0)
        if self.rates and not top:
            raise ValueError(
                f"{type(model).__name__} has no stochastic depth, but drop_path_later is {recipe.drop_path_later};"
                " leave it out"
            )
        self.rates[0] = top if self.rates.get(0) is None else self.rates[0]
        self.ratios = [(layer, layer.drop_prob / top) for layer in layers] if top else []

    def rate(self, epoch: int) -> float:
        """The largest rate in this epoch."""
        return self.rates[max(start for start in self.rates if start <= epoch)] or 0.0

    def set_epoch(self, epoch: int) -> None:
        """Set the layers to this epoch's rates."""
        if len(self.rates) > 1:
            for layer, ratio in self.ratios:
                layer.drop_prob = self.rate(epoch) * ratio

    @staticmethod
    def initial_rate(recipe: Recipe) -> float | None:
        """The rate to create the model with: not 0 if it grows later, because the layers would be missing."""
        if recipe.drop_path is None:
            return None
        return max(recipe.drop_path, *recipe.drop_path_later.values(), 0.0)
