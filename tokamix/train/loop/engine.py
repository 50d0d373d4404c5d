"""The one training loop.

A run is a function of its recipe: each step's batch, augmentation and dropout follow from (seed, epoch, step), and the
state on the disk holds all the rest. So one that is killed and started again ends with the weights of an unbroken run.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokamix.data import Loader
from tokamix.recipes import Recipe
from tokamix.train.loop.ema import Ema
from tokamix.train.loop.meter import Meter
from tokamix.train.loop.optim import DropPathSchedule, create_scheduler
from tokamix.train.loop.signals import Interrupts
from tokamix.train.loop.state import Tensors, load_optimizer, load_weights, optimizer_state, whole, write_state
from tokamix.train.output.progress import Display
from tokamix.train.output.run_folder import Row, RunFolder
from tokamix.train.output.trackers import Trackers
from tokamix.train.setup.parallel import Accelerator, any_process
from tokamix.train.tasks import Moment, Task

Batch = tuple[Any, Any]  # images and targets as the loader and the task understand them


class NotFiniteError(FloatingPointError):
    """Loss, gradient or weights became NaN or infinite."""


@dataclass(frozen=True)
class Options:
    """What changes nothing about the result of a run.

    Attributes:
        save_every: steps from one saved state to the next; none: a minute, or longer where that would cost over 2 %.
        log_every: steps from one reading of the numbers to the next.
        skip_nan: how many steps with a loss that is not finite are left out before the run stops.
    """

    save_every: int | None = None
    log_every: int = 50
    skip_nan: int = 0


class Engine:
    """Trains a model on a task: steps, evaluation each epoch, saving and going on."""

    def __init__(
        self,
        task: Task,
        wrapped: nn.Module,
        model: nn.Module,
        optimizer: Any,
        loaders: tuple[Loader, Loader],
        recipe: Recipe,
        folder: RunFolder,
        accelerator: Accelerator,
        options: Options,
        settings: Row,
    ) -> None:
        self.task, self.wrapped, self.model, self.optimizer = task, wrapped, model, optimizer
        self.train_loader, self.val_loader = loaders
        self.recipe, self.folder, self.accelerator, self.options = recipe, folder, accelerator, options
        self.settings = settings  # what the run was started with; kept with its state
        self.device, self.main = accelerator.device, accelerator.is_main_process
        self.steps = len(self.train_loader) // recipe.accumulate
        if not self.steps:
            raise ValueError(
                f"the {self.train_loader.dataset_size} images to train on do not fill one batch of {recipe.batch_size};"
                f" use a smaller one, such as --set batch_size={max(1, self.train_loader.dataset_size // 4)}"
            )
        self.schedule = create_scheduler(optimizer.optimizer, recipe, self.steps)
        self.drop_path = DropPathSchedule(model, recipe)
        self.ema = Ema(model, recipe.ema) if recipe.ema else None
        self.meter = Meter(self.device)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.epoch, self.step, self.skipped, self.finished = 0, 0, 0, False
        self.sums: dict[str, float] = {}  # of this epoch, over `self.counted` steps
        self.counted, self.seconds = 0, 0.0
        self.best: Row | None = None
        self.best_weights: dict[str, Tensor] | None = None  # not yet on the disk
        self.saved_at, self.save_cost = time.monotonic(), 0.0

    @property
    def update(self) -> int:
        """How many steps of the optimizer are done."""
        return self.epoch * self.steps + self.step

    def fit(self, display: Display, trackers: Trackers | None, present: Callable[[Row | None], None]) -> None:
        """Train to the end of the recipe; `present` is called with the best row where people may look."""
        self.display, self.trackers, self.present = display, trackers, present
        with Interrupts(active=self.accelerator.num_processes == 1) as self.interrupts, display:
            while self.epoch < self.recipe.evaluations:
                self._train_epoch()
                self._finish_epoch()

    def _train_epoch(self) -> None:
        self.drop_path.set_epoch(self.epoch)
        self.wrapped.train(not self.recipe.eval_mode)
        batches = self.train_loader.epoch(self.epoch, start=self.step * self.recipe.accumulate)
        self.read_at = time.monotonic()
        while self.step < self.steps:
            self._train_step(batches)
            self.step += 1
            self.display.step(self.update)
            asked = bool(self.options.save_every and self.update % self.options.save_every == 0)
            asked |= self.interrupts.asked
            if asked or self.step == self.steps or self.update % self.options.log_every == 0:
                self._report()
                if asked or self._save_is_due():
                    self.save()
                    self.read_at = time.monotonic()
            if self.interrupts.asked:
                self.display.say(f"stopped after step {self.update}; the same command goes on from there")
                raise KeyboardInterrupt

    def _train_step(self, batches: Iterator[Batch]) -> None:
        parts = self.recipe.accumulate
        seed_step(self.recipe.seed, self.update, self.accelerator.process_index, self.device)
        self.schedule.step_update(self.update)
        logs: dict[str, Tensor] = {}
        for part in range(parts):
            moment = Moment(self.recipe.seed, self.epoch, self.step * parts + part)
            images, targets = self._next(batches, moment)
            last = part == parts - 1
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                loss, numbers = self.task.loss(self.wrapped, images, targets, moment)
                self.accelerator.backward(loss / parts)
            for key, value in numbers.items():
                logs[key] = logs.get(key, 0.0) + value.detach() / parts
        healthy = torch.isfinite(logs["loss"])
        if self.recipe.clip_grad is not None or self.options.skip_nan:
            norm = self._clip(self.recipe.clip_grad or float("inf"))
            if self.accelerator.scaler is None:  # which has its own way with gradients that are not finite
                healthy = healthy & torch.isfinite(norm)
        if self.options.skip_nan and any_process(not healthy, self.device):
            self._skip()
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.update)
        self.meter.add(logs, healthy, self.update)

    def _clip(self, limit: float) -> Tensor:
        """Scale the gradients down to a norm, and say what theirs was."""
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _next(self, batches: Iterator[Batch], moment: Moment) -> Batch:
        batch = next(batches, None)
        if batch is None:
            raise RuntimeError(f"the data ended at batch {moment.batch} of an epoch of {len(self.train_loader)}")
        images, targets = batch
        if self.recipe.channels_last and isinstance(images, Tensor):  # not those of various sizes
            images = images.contiguous(memory_format=torch.channels_last)
        return images, targets

    def _skip(self) -> None:
        self.optimizer.zero_grad()
        self.skipped += 1
        if self.skipped > self.options.skip_nan:
            self._stop("loss or gradient", self.update, f", after {self.options.skip_nan} that were left out")
        self.display.say(
            f"step {self.update + 1} is left out: its loss or gradient is not finite ({self.skipped} so far)"
        )

    def _stop(self, what: str, update: int, more: str = "") -> None:
        epoch, step = divmod(update, self.steps)
        kept = (
            f"the last good state is kept in {self.folder.state}"
            if self.folder.state.exists()
            else "no state is saved yet"
        )
        raise NotFiniteError(
            f"{what} not finite at step {update + 1}, batch {step} of epoch {epoch} (both from 0){more}; {kept}."
            " Lower lr, set clip_grad, train in bf16 or fp32, or leave such steps out with --skip-nan N"
        )

    def _report(self) -> None:
        means, count, bad = self.meter.read()
        if bad is not None:
            self._stop("loss or gradient", bad)
        if not count:
            return
        seconds = time.monotonic() - self.read_at
        self.read_at = time.monotonic()
        self.seconds += seconds
        self.counted += count
        for key, value in means.items():
            self.sums[key] = self.sums.get(key, 0.0) + value * count
        row = {"event": "train", "epoch": self.epoch, "step": self.step, "update": self.update, **means}
        row |= {"lr": self._lr(), "images_per_second": round(count * self.recipe.batch_size / seconds, 1)}
        cuda = self.device.type == "cuda"
        used = torch.cuda.max_memory_allocated(self.device) if cuda else psutil.Process().memory_info().rss
        row["memory_gb"] = round(used / 2**30, 2)
        self._log(row)
        self.display.report(row)

    def _finish_epoch(self) -> None:
        fill = self.recipe.micro_batch(self.accelerator.num_processes) if self.recipe.compile else None
        self._share_buffers()
        found = {"": self.task.evaluate(self.model, self.val_loader, fill)}
        if self.ema is not None:
            with self.ema.in_place():
                found["ema_"] = self.task.evaluate(self.model, self.val_loader, fill)
        row: Row = {"event": "epoch", "epoch": self.epoch, "update": (self.epoch + 1) * self.steps, "lr": self._lr()}
        row |= {f"train_{key}": value / max(1, self.counted) for key, value in self.sums.items()}
        row.setdefault("train_loss", float("nan"))
        row |= {prefix + key: value for prefix, metrics in found.items() for key, value in metrics.items()}
        images = self.counted * self.recipe.batch_size
        row |= {"images_per_second": round(images / max(self.seconds, 1e-9), 1), "seconds": round(self.seconds, 2)}
        prefix = max(found, key=lambda kind: found[kind][self.task.metric])
        better = self.best is None or found[prefix][self.task.metric] > self.best[self.task.metric]
        if better:
            self.best = {**found[prefix], "epoch": self.epoch, "averaged": bool(prefix)}
            weights = self.ema.average if prefix and self.ema else self.model.state_dict()
            self.best_weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._log(row)
        self.display.epoch(row, better)
        with self.ema.in_place() if prefix and self.ema else nullcontext():
            picture = self.task.picture(self.model)
        if picture is not None and self.main:
            self.folder.add_picture(self.epoch, picture, self.best["epoch"] if self.best else self.epoch)
        self.epoch, self.step, self.sums, self.counted, self.seconds = self.epoch + 1, 0, {}, 0, 0.0
        self.finished = self.epoch == self.recipe.evaluations
        due = self._save_is_due() or self.finished
        if due and self.main:
            self.present(self.best)
        if due or self.options.save_every:
            self.save()  # last of all: a run that calls itself finished has everything in its folder

    def _share_buffers(self) -> None:
        """Statistics that each process gathered on its own become the first one's, which are those that are saved."""
        if self.accelerator.num_processes > 1:
            for name, buffer in self.model.named_buffers():
                dist.broadcast(buffer, 0)
                if self.ema is not None and name in self.ema.average:
                    dist.broadcast(self.ema.average[name], 0)

    def _save_is_due(self) -> bool:
        """By the clock of the process that writes, unless the steps decide."""
        if self.options.save_every:
            return False
        waited = time.monotonic() - self.saved_at
        return any_process(self.main and waited > max(60.0, 50 * self.save_cost), self.device)

    def save(self) -> None:
        """Write weights and state; best weights first, so that the state never knows of weights that are not there."""
        begun = time.monotonic()
        if self.main or self.sharded:
            self._save()
        if self.trackers is not None:
            self.trackers.flush()
        self.best_weights = None
        self.saved_at = time.monotonic()
        self.save_cost = self.saved_at - begun

    def _save(self) -> None:
        weights = self._whole(self.model.state_dict())
        if not all(weights[name].isfinite().all() for name, _ in self.model.named_parameters()):
            self._stop("weights", self.update - 1)
        if self.best_weights is not None:
            best = self._whole(self.best_weights)
            if self.main:
                self.folder.write_weights("model", best)
        tensors, optimizer = optimizer_state(self.optimizer.optimizer, self.model)
        groups: dict[str, Tensors] = {"model": weights, "optimizer": tensors}
        if self.ema is not None:
            groups["ema"] = self._whole(self.ema.average)
        scaler = self.accelerator.scaler
        rest = {
            "settings": self.settings,
            "epoch": self.epoch,
            "step": self.step,
            "steps": self.steps,
            "sums": self.sums,
            "counted": self.counted,
            "seconds": self.seconds,
            "best": self.best,
            "skipped": self.skipped,
            "finished": self.finished,
            "optimizer": optimizer,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        if self.main:
            self.folder.write_weights("last", groups["model"])
            write_state(self.folder.state, groups, rest)

    def restore(self, groups: dict[str, Tensors], rest: Row) -> None:
        """Go back to a saved state."""
        if rest["steps"] != self.steps:
            raise ValueError(
                f"{self.folder.path} was started with {rest['steps']} steps an epoch and would go on with {self.steps}:"
                " the data has changed; use another --output, or start over with --no-resume"
            )
        load_weights(self.model.state_dict(), groups["model"])
        load_optimizer(self.optimizer.optimizer, self.model, groups.get("optimizer", {}), rest["optimizer"])
        if self.ema is not None:
            load_weights(self.ema.average, groups["ema"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(rest["scaler"])
        for key in ("epoch", "step", "sums", "counted", "seconds", "best", "skipped", "finished"):
            setattr(self, key, rest[key])

    @staticmethod
    def _whole(weights: dict[str, Tensor]) -> Tensors:
        return {name: whole(tensor) for name, tensor in weights.items()}

    def _lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def _log(self, row: Row) -> None:
        if self.main:
            self.folder.add(row)
        if self.trackers is not None:
            self.trackers.add(row)


def seed_step(seed: int, update: int, process: int, device: torch.device) -> None:
    """Seed what a model may draw from in one step, apart in each process."""
    number = ((seed * 1_000_003 + update) * 65_536 + process) % 2**63
    random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed sees to every device there may be, which takes long
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).manual_seed(number)
