"""The two trainings of a conversion: attention transfer, and fine-tuning with distillation.

LoLCATs, arXiv 2410.10254, and ViT-AdaLA, arXiv 2603.16063: new mixers first learn the outputs of those they replace,
each on the original's activations, then the whole network is fine-tuned towards the original.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokamix.compile import compile_blocks
from tokamix.data import DatasetSplits
from tokamix.recipes import Recipe
from tokamix.train.setup.accelerator import Accelerator
from tokamix.train.setup.teacher import Teacher
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.distill import Distill
from tokamix.train.tasks.task import Logs, Position

Hosts = Mapping[str, nn.Module]  # the replaced mixers, by their name in the model


class Transfer(Classify):
    """Attention transfer: every new mixer learns the output of the mixer it replaces, all blocks at once.

    Each new mixer is followed by the one it replaces, whose output is passed on: so every block works on the original's
    activations, and one forward pass of the network serves all of them. Only the new mixers are trained. The loss is
    the mean over the blocks of the squared error, divided by the variance of the original's output in the batch of all
    processes.

    Args:
        recipe: how the mixers are trained; `eval_mode` keeps dropout off and statistics fixed.
        data: the images; labels are used for evaluation only.
        hosts: the replaced mixers.
    """

    def __init__(self, recipe: Recipe, data: str | DatasetSplits, hosts: Hosts) -> None:
        super().__init__(recipe, data)
        self.hosts = hosts
        self.errors: list[tuple[Tensor, Tensor, Tensor]] = []  # squared error; mean and variance of the target

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Freeze everything but the new mixers, and attach the replaced ones."""
        model.requires_grad_(False)
        for name, host in self.hosts.items():
            mixer = model.get_submodule(name).requires_grad_(True)
            if accelerator is not None:
                host.to(accelerator.device)
            host.eval().requires_grad_(False)
            mixer.register_forward_hook(self._compare_with(host), with_kwargs=True)

    def _compare_with(self, host: nn.Module) -> Callable[..., Any]:
        def hook(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not torch.is_grad_enabled():  # an evaluation of the converted network
                return None
            with torch.no_grad():
                target = host(*args, **kwargs)
            self.errors.append(compare(_tensor(output), _tensor(target)))
            return target

        return hook

    def compile(self, model: nn.Module, graphs: bool) -> None:
        """Nothing is compiled: the hooks leave nothing of a block to fuse."""

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, position: Position) -> tuple[Tensor, Logs]:
        """Mean relative error of the new mixers."""
        images, _ = self.mix(images, labels, position)
        self.errors.clear()
        model(images)
        errors, means, variances = zip(*self.errors, strict=True)
        loss = (torch.stack(errors) / pool_variances(means, variances).clamp_min(1e-12)).mean()
        return loss, {"loss": loss}


class FineTune(Distill):
    """Fine-tuning of a converted network with the original as teacher, all blocks at once or one after another.

    Args:
        recipe: with a teacher, or without distillation.
        data: images and labels.
        original: the network before the conversion; the teacher if the recipe's is "self".
        hosts: the replaced mixers, for a progressive conversion.
        progressive: fraction of the run in which the blocks are converted, from the first to the last: the output of
            each moves from the replaced mixer's to the new one's. 0: all blocks are converted from the start.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: str | DatasetSplits,
        original: nn.Module,
        hosts: Hosts,
        progressive: float = 0.0,
    ) -> None:
        super().__init__(recipe, data)
        self.original, self.hosts, self.progressive = original, hosts, progressive
        self.progress = 1.0

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Load the teacher, and attach the replaced mixers of a progressive conversion."""
        if self.recipe.distillation != "none":
            super().prepare(model, accelerator)
        for index, (name, host) in enumerate(self.hosts.items() if self.progressive else ()):
            start, end = (self.progressive * i / len(self.hosts) for i in (index, index + 1))
            hook = self._blend_with(host.eval().requires_grad_(False), start, end)
            model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
            if accelerator is not None:
                host.to(accelerator.device)

    def load_teacher(self, accelerator: Accelerator) -> Teacher:
        """The original, or the recipe's own teacher."""
        if self.recipe.teacher != "self":
            return super().load_teacher(accelerator)
        original = self.original.to(accelerator.device).eval().requires_grad_(False)
        if self.recipe.compile:
            compile_blocks(original, graphs=False)

        def logits(images: Tensor) -> Tensor:
            with accelerator.autocast():
                return original(images)

        statistics = (self.inference.mean, self.inference.std)
        return Teacher(logits, statistics, statistics, None, accelerator.device)

    def _blend_with(self, host: nn.Module, start: float, end: float) -> Callable[..., Any]:
        def hook(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            share = min(1.0, max(0.0, (self.progress - start) / (end - start)))
            if share == 1.0 or not torch.is_grad_enabled():  # converted, or an evaluation of the converted network
                return None
            blend = torch.lerp(_tensor(host(*args, **kwargs)), _tensor(output), share)
            return (blend, *output[1:]) if isinstance(output, tuple) else blend

        return hook

    def compile(self, model: nn.Module, graphs: bool) -> None:
        """Compile the blocks, except in a progressive conversion, which changes from step to step."""
        if not self.progressive:
            super().compile(model, graphs)

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, position: Position) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch, and the scalars to log."""
        self.progress = position.progress
        if self.recipe.distillation == "none":
            return Classify.loss(self, model, images, labels, position)
        return super().loss(model, images, labels, position)


def compare(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean squared error, and the mean token (C,) of the target and its variance around it."""
    output, target = output.float(), target.float()
    mean = target.mean(tuple(range(target.ndim - 1)))
    return (output - target).square().mean(), mean, (target - mean).square().mean()


def pool_variances(means: Sequence[Tensor], variances: Sequence[Tensor]) -> Tensor:
    """The variance of each block's target over the batch of all processes, so that they train like one process."""
    own = torch.stack(tuple(variances))
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return own
    squares = own + torch.stack([mean.square().mean() for mean in means])
    moments = torch.cat([*means, squares])  # one message for all blocks
    dist.all_reduce(moments)
    *pooled, squares = (moments / dist.get_world_size()).split([*map(len, means), len(own)])
    return squares - torch.stack([mean.square().mean() for mean in pooled])


def _tensor(output: Any) -> Tensor:
    """The tokens of a mixer's output; nn.MultiheadAttention returns its weights as well."""
    return output[0] if isinstance(output, tuple) else output
