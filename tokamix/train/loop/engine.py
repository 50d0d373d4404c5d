"""The training loop of all tasks.

A run is a function of its recipe: each step's batch, augmentation and dropout follow from (seed, epoch, step), and the
saved state holds everything else. So a run that is killed and resumed ends with the weights of an uninterrupted one.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokamix.data import Loader
from tokamix.recipes import Recipe
from tokamix.train.loop.ema import Ema
from tokamix.train.loop.epochs import evaluation_intervals
from tokamix.train.loop.meter import Meter
from tokamix.train.loop.optim import DropPathSchedule, WeightDecaySchedule, clip_each_gradient, create_scheduler
from tokamix.train.loop.signals import Agreement, Interrupts, StoppableLoader
from tokamix.train.loop.state import Tensors, load_optimizer, load_weights, optimizer_state, whole, write_state
from tokamix.train.output.duration import Duration
from tokamix.train.output.progress import Display
from tokamix.train.output.run_folder import Row, RunFolder
from tokamix.train.output.trackers import Trackers
from tokamix.train.setup.accelerator import Accelerator, any_process
from tokamix.train.tasks.task import Position, Task

_log = logging.getLogger("tokamix")
Batch = tuple[Any, Any]  # images and targets, in the form of the task
COUNTERS = ("epoch", "step", "sums", "counted", "seconds", "best", "skipped", "finished")  # of the saved state


class NotFiniteError(FloatingPointError):
    """Loss, gradient or weights became NaN or infinite."""


@dataclass(frozen=True)
class Options:
    """Options that do not affect the result.

    Attributes:
        save_every: steps between saved states; none: every minute, or less often if that would cost over 2 %. Also
            after each epoch, unless epochs are so short that this would cost over 10 %.
        log_every: steps between readings of the metrics.
        skip_nan: number of steps with a non-finite loss that are skipped before the run stops.
    """

    save_every: int | None = None
    log_every: int = 50
    skip_nan: int = 0


class Engine:
    """Trains a model on a task: optimizer steps, evaluation, saving and resuming.

    Args:
        task: computes losses and metrics.
        wrapped: the model as distributed, for forward passes in training.
        model: the module itself.
        optimizer: prepared by Accelerate.
        loaders: training and validation data.
        recipe: how it is trained.
        folder: receives everything that is written.
        accelerator: device, processes and precision.
        options: do not affect the result.
        settings: recipe, model and data of the run, saved with its state.
    """

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
        self.train_loader, self.val_loader = evaluation_intervals(loaders[0], recipe), loaders[1]
        self.recipe, self.folder, self.accelerator, self.options = recipe, folder, accelerator, options
        self.settings = settings
        self.device, self.main = accelerator.device, accelerator.is_main_process
        self.steps = len(self.train_loader) // recipe.accumulate  # per epoch
        if not self.steps:
            size = self.train_loader.dataset_size
            raise ValueError(
                f"{size} training images do not fill one batch of {recipe.batch_size}; use a smaller one, such as"
                f" --batch-size {max(1, size // 4)}"
            )
        self.schedule = create_scheduler(optimizer.optimizer, recipe, self.steps)
        self.weight_decay = WeightDecaySchedule(optimizer.optimizer, recipe)
        self.drop_path = DropPathSchedule(model, recipe)
        self.ema = Ema(model, recipe.ema_decay) if recipe.ema_decay else None
        self.meter = Meter(self.device)
        self.saved: Any = getattr(task, "saved_module", lambda module: module)(model)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.epoch, self.step, self.skipped, self.finished = 0, 0, 0, False  # finished epochs, steps of this one
        self.sums: dict[str, float] = {}  # of this epoch, over `self.counted` steps
        self.counted, self.seconds = 0, 0.0
        self.best: Row | None = None
        self.best_weights: dict[str, Tensor] | None = None  # not on the disk yet
        self.saved_at, self.save_cost, self.evaluation_seconds = time.monotonic(), 0.0, float("inf")
        self.duration = Duration(recipe, self.steps, self.val_loader.dataset_size)
        self.told, self.advised = False, False  # how long the run takes, and what makes it shorter
        self.agreement = Agreement(accelerator.num_processes)

    @property
    def update(self) -> int:
        """Number of finished optimizer steps."""
        return self.epoch * self.steps + self.step

    def fit(self, display: Display, trackers: Trackers | None, publish: Callable[[Row | None], None]) -> None:
        """Train to the end of the recipe; `publish` writes curves and model card, given the best metrics."""
        self.display, self.trackers, self.publish = display, trackers, publish
        with Interrupts(self.accelerator.num_processes) as self.interrupts, display:
            self._advise()
            while self.epoch < self.recipe.num_epochs:
                self._train_epoch()
                self._finish_epoch()

    def _train_epoch(self) -> None:
        self.drop_path.set_epoch(self.epoch)
        self.wrapped.train(not self.recipe.eval_mode)
        batches = self.train_loader.epoch(self.epoch, start=self.step * self.recipe.accumulate)
        self.read_at = time.monotonic()
        self.duration.begin()
        while self.step < self.steps:
            self._train_step(batches)
            self.step += 1
            self.duration.step(self.update)
            self.display.step(self.update, self.duration.left(self.update))
            if self.duration.is_settled and not self.told:
                self.told = True
                self.display.say(self.duration.describe(self.update))
                self._advise()
            stop, save = self.agreement.exchange(self.interrupts.received, self._save_is_due())
            save |= stop or bool(self.options.save_every and self.update % self.options.save_every == 0)
            if save or self.step == self.steps or self.update % self.options.log_every == 0:
                self._report()
            if save:
                self.save()
                self.read_at = time.monotonic()
            if stop:
                self._stop()

    def _advise(self) -> None:
        """Say once what makes a long run on a CPU shorter, also where nothing else is printed."""
        if self.device.type == "cpu" and self.main and not self.advised and (text := self.duration.advice(self.update)):
            _log.warning("%s", text)
            self.advised = True

    def _stop(self) -> None:
        """End the run after its state was saved."""
        self.display.say(f"stopped after step {self.update}; run the same command again to resume")
        self.agreement.settle()  # torchrun ends all processes when the first one ends: rank 0 must have saved
        raise KeyboardInterrupt

    def _train_step(self, batches: Iterator[Batch]) -> None:
        parts = self.recipe.accumulate
        seed_step(self.recipe.seed, self.update, self.accelerator.process_index, self.device)
        self.schedule.step_update(self.update)
        progress = self.update / (self.steps * self.recipe.num_epochs)
        self.weight_decay.set_progress(progress)
        logs: dict[str, Tensor] = {}
        for part in range(parts):
            position = Position(self.recipe.seed, self.epoch, self.step * parts + part, progress)
            images, targets = self._next_batch(batches, position)
            last = part == parts - 1
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                loss, scalars = self.task.loss(self.wrapped, images, targets, position)
                self.accelerator.backward(loss / parts)
            for key, value in scalars.items():
                logs[key] = logs.get(key, 0.0) + value.detach() / parts
        if hasattr(self.task, "before_step"):
            self.task.before_step(position)
        finite = torch.isfinite(logs["loss"])
        if self.recipe.clip_grad is not None or self.options.skip_nan:
            norm = self._clip_gradients(self.recipe.clip_grad or float("inf"))
            if self.accelerator.scaler is None:  # a scaler handles non-finite gradients itself
                finite = finite & torch.isfinite(norm)
        if self.options.skip_nan and any_process(not finite, self.device):
            self._skip_step()
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        if hasattr(self.task, "after_step"):
            self.task.after_step(position)
        if self.ema is not None:
            self.ema.update(self.update)
        self.meter.add(logs, finite, self.update)

    def _clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients and return their norm before."""
        if self.recipe.clip_per_parameter:
            self.accelerator.unscale_gradients()
            return clip_each_gradient(self.model.parameters(), max_norm)
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _next_batch(self, batches: Iterator[Batch], position: Position) -> Batch:
        batch = next(batches, None)
        if batch is None:
            raise RuntimeError(f"the data ended after batch {position.batch} of an epoch of {len(self.train_loader)}")
        images, targets = batch
        if self.recipe.channels_last and isinstance(images, Tensor):  # a detector has a list of images
            images = images.contiguous(memory_format=torch.channels_last)
        return images, targets

    def _skip_step(self) -> None:
        self.optimizer.zero_grad()
        if self.accelerator.scaler is not None:  # it has unscaled this step's gradients, and expects its end
            self.accelerator.scaler.update()
        self.skipped += 1
        if self.skipped > self.options.skip_nan:
            self._raise_not_finite("loss or gradient", self.update, f", after {self.options.skip_nan} skipped steps")
        self.display.say(f"step {self.update + 1} is skipped: loss or gradient not finite ({self.skipped} so far)")

    def _raise_not_finite(self, what: str, update: int, detail: str = "") -> None:
        epoch, step = divmod(update, self.steps)
        saved = f"the last good state is in {self.folder.state}" if self.folder.state.exists() else "no state was saved"
        raise NotFiniteError(
            f"{what} not finite at step {update + 1} (batch {step + 1} of epoch {epoch + 1}){detail}; {saved}."
            " Lower lr, set clip_grad, train in bf16 or fp32, or skip such steps with --skip-nan N"
        )

    def _report(self) -> None:
        means, count, first_bad = self.meter.read()
        if first_bad is not None:
            self._raise_not_finite("loss or gradient", first_bad)
        if not count:
            return
        seconds = time.monotonic() - self.read_at
        self.read_at = time.monotonic()
        self.seconds += seconds
        self.counted += count
        for key, value in means.items():
            self.sums[key] = self.sums.get(key, 0.0) + value * count
        row = {"event": "train", "epoch": self.epoch + 1, "step": self.step, "update": self.update, **means}
        row |= {"lr": self._lr(), "images_per_second": round(count * self.recipe.batch_size / seconds, 1)}
        cuda = self.device.type == "cuda"
        used = torch.cuda.max_memory_allocated(self.device) if cuda else psutil.Process().memory_info().rss
        row["memory_gb"] = round(used / 2**30, 2)
        self._log(row)
        self.display.report(row)

    def _finish_epoch(self) -> None:
        number = self.epoch + 1  # people count from 1
        row: Row = {"event": "epoch", "epoch": number, "update": number * self.steps, "lr": self._lr()}
        row |= {f"train_{key}": value / max(1, self.counted) for key, value in self.sums.items()}
        row.setdefault("train_loss", float("nan"))
        images = self.counted * self.recipe.batch_size
        row |= {"images_per_second": round(images / max(self.seconds, 1e-9), 1), "seconds": round(self.seconds, 2)}
        if self.recipe.evaluates_after(number):
            self._evaluate(row)
        else:
            self._log(row)
            self.display.epoch(row, is_best=False)
        self.epoch, self.step, self.sums, self.counted, self.seconds = number, 0, {}, 0, 0.0
        self.finished = self.epoch == self.recipe.num_epochs
        if self.main and (self.finished or self._save_is_due()):
            self.publish(self.best)
        cheap = time.monotonic() - self.saved_at > 10 * self.save_cost
        stop, save = self.agreement.settle(self.interrupts.received, self.main and cheap)
        if stop or save or self.finished or self.options.save_every:
            self.save()  # last: a finished run has everything in its folder
        if stop and not self.finished:
            self._stop()

    def _evaluate(self, row: Row) -> None:
        """Evaluate the weights and their average, complete and log the epoch's row, and select the weights to keep."""
        self._broadcast_buffers()
        stop, save = self.agreement.settle(self.interrupts.received, self._save_before_evaluation())
        if stop or save:
            self.save()
        if stop:
            self._stop()
        results = self._measure()
        row |= {prefix + key: value for prefix, metrics in results.items() for key, value in metrics.items()}
        if self.recipe.select == "last":
            prefix, is_best = list(results)[-1], True
        else:
            prefix = max(results, key=lambda kind: self._score(results[kind]))
            is_best = self.best is None or self._score(results[prefix]) > self._score(self.best)
        if is_best:
            self.best = {**results[prefix], "epoch": row["epoch"], "averaged": bool(prefix)}
            weights = self.ema.average if prefix and self.ema else self.saved.state_dict()
            self.best_weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._log(row)
        for kind, metrics in results.items():
            if not math.isfinite(metrics.get("loss", 0.0)):
                self.display.say(f"epoch {row['epoch']}: {kind}loss not finite: some outputs are NaN or infinite")
        self.display.epoch(row, is_best and self.recipe.select == "best")
        with self.ema.swapped() if prefix and self.ema else nullcontext():
            drawing = self.task.draw_predictions(self.saved)
        if drawing is not None and self.main:
            self.folder.add_drawing(row["epoch"], drawing, self.best["epoch"] if self.best else row["epoch"])

    def _score(self, metrics: Row) -> float:
        """The metric that selects the best weights; outputs that are NaN or infinite are below all others."""
        score = metrics[self.task.metric]
        return score if math.isfinite(score) and math.isfinite(metrics.get("loss", 0.0)) else -math.inf

    def _measure(self) -> dict[str, dict[str, float]]:
        """Metrics of the weights, under "", and of their average, under "ema_"."""
        pad_to = self.recipe.micro_batch(self.accelerator.num_processes) if self.recipe.compile else None
        loader: Any = StoppableLoader(self.val_loader, self.interrupts)
        begun = time.monotonic()
        try:
            results = {"": self.task.evaluate(self.model, loader, pad_to)}
            if self.ema is not None:
                with self.ema.swapped():
                    results["ema_"] = self.task.evaluate(self.model, loader, pad_to)
        except KeyboardInterrupt:
            self.save()  # before the evaluation, which is repeated when the run is resumed
            self._stop()
        self.evaluation_seconds = self.duration.evaluation = time.monotonic() - begun
        return results

    def _broadcast_buffers(self) -> None:
        """Replace statistics that each process collected by those of rank 0, which are saved."""
        if self.accelerator.num_processes > 1:
            for name, buffer in self.model.named_buffers():
                dist.broadcast(buffer, 0)
                if self.ema is not None and name in self.ema.average:
                    dist.broadcast(self.ema.average[name], 0)

    def _save_is_due(self) -> bool:
        """Whether rank 0 saves by its clock, where `save_every` does not decide."""
        if self.options.save_every or not self.main:
            return False
        return time.monotonic() - self.saved_at > max(60.0, 50 * self.save_cost)

    def _save_before_evaluation(self) -> bool:
        """Whether rank 0 saves now, because several processes cannot stop within an evaluation that takes long."""
        if not self.main or self.accelerator.num_processes == 1:
            return False
        least = max(10.0, 10 * self.save_cost)
        return min(self.evaluation_seconds, time.monotonic() - self.saved_at) > least

    def save(self) -> None:
        """Write weights and state; the best weights first, so that the state never refers to weights not written."""
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
            self._raise_not_finite("weights", self.update - 1)
        if self.best_weights is not None:
            best = self._whole(self.best_weights)
            if self.main:
                self.folder.write_weights("model", best)
        tensors, optimizer = optimizer_state(self.optimizer.optimizer, self.model)
        groups: dict[str, Tensors] = {"model": weights, "optimizer": tensors}
        if self.ema is not None:
            groups["ema"] = self._whole(self.ema.average)
        scaler = self.accelerator.scaler
        rest = {key: getattr(self, key) for key in COUNTERS}
        rest |= {"settings": self.settings, "steps": self.steps, "optimizer": optimizer}
        rest["threads"] = torch.get_num_threads()
        rest["scaler"] = scaler.state_dict() if scaler is not None else None
        if self.main:
            last = weights if self.saved is self.model else self._whole(self.saved.state_dict())
            self.folder.write_weights("last", last)
            write_state(self.folder.state, groups, rest)

    def write_report(self) -> None:
        """Write the task's report on the best weights; not for sharded models, which one process cannot run alone."""
        if self.main and self.finished and not self.sharded:
            # eager: a graph for other batch sizes would be compiled for one use
            with self._best_weights(), torch.compiler.set_stance("force_eager"):
                self.task.write_report(self.folder.path, self.saved)

    def check_saved(self) -> None:
        """Check that the folder loads as the trained network, if the task can; not for sharded models."""
        check = getattr(self.task, "check_saved", None)
        if check is None or not (self.main and self.finished):
            return
        if self.sharded:
            self.display.say("the saved model was not checked: one process cannot run a sharded model")
            return
        with self._best_weights():
            check(self.folder.path, self.saved)

    @contextmanager
    def _best_weights(self) -> Iterator[None]:
        """The model has the best weights inside this context."""
        current = self._whole(self.saved.state_dict())
        load_weights(self.saved.state_dict(), load_file(self.folder.path / "model.safetensors"))
        try:
            yield
        finally:
            load_weights(self.saved.state_dict(), current)

    def restore(self, groups: dict[str, Tensors], rest: Row) -> None:
        """Restore a saved state."""
        if rest["steps"] != self.steps:
            raise ValueError(
                f"{self.folder.path} was started with {rest['steps']} steps per epoch, but now there are {self.steps}:"
                " the data has changed; use another --output, or start over with --no-resume"
            )
        load_weights(self.model.state_dict(), groups["model"])
        load_optimizer(self.optimizer.optimizer, self.model, groups.get("optimizer", {}), rest["optimizer"])
        if self.ema is not None:
            load_weights(self.ema.average, groups["ema"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(rest["scaler"])
        for key in COUNTERS:
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


def seed_step(seed: int, update: int, rank: int, device: torch.device) -> None:
    """Seed the generators that a model may use in one step, differently in each process."""
    number = ((seed * 1_000_003 + update) * 65_536 + rank) % 2**63
    random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would visit every kind of device, which is slow
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).manual_seed(number)
