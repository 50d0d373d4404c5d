"""Where a training step on a CPU spends its time, and what the augmentation of few images saves.

    python benchmarks/training_cpu.py finetune pyramid_nano_softmax.cifar100 --size 48 --batch 64 --pretrained

Trains on noise as `tokamix train` does. Rounds in which the augmentation computes all images, and those that need it
alone (`tokamix.data.images.augment._apply_to`), follow each other in one process, and rounds with PyTorch's own linear
layers instead of oneDNN's (`tokamix.ops.cpu`). Prints the median of each part of a step: the wall time, and the
process's CPU time, which other programs change less. `--bf16` measures autocast as well, `--kernels 20` prints
operators, `--evaluate` measures the evaluation of as many images as the batch has, eight times.
GOMP_SPINCOUNT and OMP_NUM_THREADS are read when the process starts: compare them from the shell.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from profile_training import StopError, create_noise

from tokamix.bench.timing import print_costs
from tokamix.data.images import augment
from tokamix.ops.dispatch import use_backend
from tokamix.recipes import Recipe, load_recipe
from tokamix.train import train
from tokamix.train.loop.engine import Engine

WARM_UP = 3  # steps
Times = dict[str, list[tuple[float, float]]]


@contextmanager
def clocked(engine: Engine, times: Times) -> Iterator[None]:
    """Measure the parts of each step, in seconds of the clock and of the CPU."""
    parts: list[tuple[Any, str, str]] = [
        (engine, "_next_batch", "data"),
        (engine.task, "mix", "mixup"),
        (engine.task, "loss", "forward, with mixup"),
        (engine.accelerator, "backward", "backward"),
        (engine, "_clip_gradients", "clip"),
        (engine.optimizer, "step", "optimizer"),
        (engine, "_train_step", "step"),
    ]
    if engine.ema is not None:
        parts.append((engine.ema, "update", "average"))
    with ExitStack() as stack:
        for owner, name, label in parts:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), times.setdefault(label, []))))
        yield


def timed(function: Callable[..., Any], times: list[tuple[float, float]]) -> Callable[..., Any]:
    """The function, with a time for each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*args, **kwargs)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
        return result

    return call


def whole_batch(x: torch.Tensor, chosen: torch.Tensor, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Augmentation as before: of all images."""
    return torch.where(chosen, function(x), x)


def measure(engine: Engine, recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Rounds of steps of each variant in turn."""
    batches = (batch for epoch in count(1) for batch in engine.train_loader.epoch(epoch))
    variants: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Any]] = {
        "before": (nullcontext, whole_batch),
        "now": (nullcontext, augment._apply_to),
        "plain layers": (lambda: use_backend("eager"), augment._apply_to),
    }
    if arguments.bf16:
        variants["bf16"] = (lambda: torch.autocast("cpu", torch.bfloat16), augment._apply_to)
    print(f"{recipe.name}, {recipe.model}, {recipe.image_size} px, batch {recipe.batch_size}")
    print(f"{torch.get_num_threads()} threads, GOMP_SPINCOUNT={os.environ.get('GOMP_SPINCOUNT')}", flush=True)
    times: dict[str, Times] = {name: {} for name in variants}
    for turn in range(arguments.rounds + 1):
        for name, (precision, apply_to) in variants.items():
            measured = times[name] if turn else {}
            with precision(), patch.object(augment, "_apply_to", apply_to), clocked(engine, measured):
                for _ in range(arguments.steps):
                    engine._train_step(batches)
                if arguments.evaluate:
                    evaluate = timed(engine._measure, measured.setdefault("evaluation", []))
                    evaluate()
    for label in times["now"]:
        print(f"{label:20}", end="")
        for name, parts in times.items():
            wall, cpu = (1e3 * statistics.median(pair[i] for pair in parts[label]) for i in range(2))
            print(f"  {name}: {wall:8.1f} ms ({cpu:8.1f} of CPU)", end="")
        before, now = (statistics.median(pair[1] for pair in times[name][label]) for name in ("before", "now"))
        print(f"  {before / now:.2f}x of CPU")
    step = statistics.median(pair[0] for pair in times["now"]["step"])
    print(f"{recipe.batch_size / step:.1f} images/s now", flush=True)
    if arguments.kernels:
        print_costs(lambda: engine._train_step(batches), "cpu", 3, rows=arguments.kernels)


def main() -> None:
    """Train until the step is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="of each variant in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", type=int, default=0)
    arguments = parser.parse_args()
    values = [f"image_size={arguments.size}", f"batch_size={arguments.batch}", "compile=false", *arguments.set]
    recipe = load_recipe(arguments.recipe, values, model=arguments.model).replace(model=arguments.model)
    train_step = Engine._train_step

    def measured(engine: Engine, batches: Any) -> None:
        if engine.update < WARM_UP:
            return train_step(engine, batches)
        with patch.object(Engine, "_train_step", train_step):
            measure(engine, recipe, arguments)
        raise StopError

    noise = create_noise(recipe.image_size, 8 * max(recipe.batch_size, 16), 10)
    with tempfile.TemporaryDirectory() as folder, patch.object(Engine, "_train_step", measured):
        try:
            options: Any = {"device": "cpu", "pretrained": arguments.pretrained, "quiet": True}
            train(None, noise, recipe, f"{folder}/run", **options)
        except StopError:
            return
    raise ValueError("the run ended before it was measured")


if __name__ == "__main__":
    main()
