"""Loaders shared by all tasks: decoding in worker processes, transfer to the device, normalisation.

Everything random is a function of (seed, epoch, position in the epoch); see `tokamix.data.batches`.
"""

import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from tokamix.data.batches import BatchOrder, BatchSampler, Request
from tokamix.data.decode import DataError
from tokamix.data.rng import preserve_rng_state

_log = logging.getLogger("tokamix")
Corrupt = Literal["raise", "skip"]


class Loader(ABC):
    """Batches of one split on the device; `len()` is the number of steps of an epoch on this rank.

    Args:
        order: which samples form each batch.
        device: of the batches.
        mean: of each channel, for pixels from 0 to 1.
        std: likewise.
    """

    def __init__(
        self, order: BatchOrder, device: torch.device | str, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.order, self.device, self.mean = order, torch.device(device), tuple(mean)
        self.dataset_size, self.train = order.dataset_size, order.train
        self.skipped: dict[str, str] = {}  # name -> reason, of images that could not be decoded
        divisor = torch.tensor(std, device=self.device)[:, None, None]
        self.scale = 1 / (255 * divisor)
        self.shift = -torch.tensor(self.mean, device=self.device)[:, None, None] / divisor

    def __len__(self) -> int:
        return len(self.order)

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from step `start` on."""

    def endless(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from step `start` on, and of all epochs after it."""
        while True:
            yield from self.epoch(epoch, start)
            epoch, start = epoch + 1, 0

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise pixels from 0 to 255."""
        return torch.addcmul(self.shift, images.float(), self.scale)


class BatchReader(ABC):
    """Decodes and transforms batches in a worker process; holds nothing that lives on the device.

    Args:
        dataset: where samples come from.
        order: for the replacements of samples that cannot be decoded.
    """

    def __init__(self, dataset: Any, order: BatchOrder) -> None:
        self.dataset, self.order, self.train = dataset, order, order.train

    @abstractmethod
    def decode(self, item: Any) -> Any:
        """Decode the sample of an index, or an encoded image of a stream."""

    @abstractmethod
    def collate(self, samples: list[tuple[int, int, Any]]) -> tuple[Any, ...]:
        """Transform samples, given as (epoch, position, sample), and join them; part 0 is as long as the batch."""

    def __getitem__(self, request: Request) -> tuple[Any, ...]:
        if get_worker_info() is None:
            with preserve_rng_state():
                return self._read(request)
        return self._read(request)

    def _read(self, request: Request) -> tuple[Any, ...]:
        """The parts of a batch, and the names of the images that could not be decoded with the reasons."""
        problems: dict[str, str] = {}
        samples: list[tuple[int, int, Any]] = []
        for n, (position, item) in enumerate(zip(request.positions, request.items, strict=True)):
            sample = self._try_decode(item, problems)
            if sample is None and self.train:
                others = (self._try_decode(other, problems) for other in self.order.replacements(request, n))
                sample = next((other for other in others if other is not None), None)
                if sample is None:
                    return *self.collate([]), problems
            if sample is not None:
                samples.append((request.epoch, position, sample))
        return *self.collate(samples), problems

    def _try_decode(self, item: Any, problems: dict[str, str]) -> Any:
        """The sample, or None after an entry in `problems`."""
        try:
            return self.decode(item)
        except DataError as error:
            problems[self.dataset.name_of(item)] = str(error)
            return None


class WorkerLoader(Loader):
    """Decoding and transforms in worker processes, the rest on the device, one batch ahead.

    Args:
        reader: makes the batches in the workers.
        device: of the batches.
        mean: of each channel, for pixels from 0 to 1.
        std: likewise.
        workers: number of processes; 0 decodes in this process.
        corrupt: "raise" an error for images that cannot be decoded, or "skip" them.
    """

    def __init__(
        self,
        reader: BatchReader,
        device: torch.device | str,
        mean: Sequence[float],
        std: Sequence[float],
        workers: int,
        corrupt: Corrupt,
    ) -> None:
        super().__init__(reader.order, device, mean, std)
        self.dataset, self.corrupt = reader.dataset, corrupt
        # nothing here refers back to the loader: workers end with it at once, not when garbage is collected
        self.sampler = BatchSampler(self.order)
        self.loader: DataLoader[Any] = DataLoader(
            reader,  # type: ignore[arg-type]  # anything with __getitem__ works
            batch_size=None,
            sampler=self.sampler,
            num_workers=workers,
            collate_fn=_identity,
            generator=torch.Generator(),  # otherwise it draws a number from the training loop's
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_leave_signals_to_parent,
        )

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from step `start` on."""
        return self._batches(number, start, endless=False)

    def endless(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from step `start` on, and of all epochs after it; the workers never pause."""
        return self._batches(epoch, start, endless=True)

    @abstractmethod
    def to_device(self, epoch: int, step: int, *parts: Any) -> Any:
        """Transfer and finish what the reader made."""

    def _batches(self, epoch: int, start: int, endless: bool) -> Iterator[Any]:
        self.sampler.epoch, self.sampler.start, self.sampler.endless = epoch, start, endless
        numbered = enumerate(self._check(self.loader), epoch * len(self) + start)
        decoded = ((divmod(number, len(self)), parts) for number, parts in numbered if len(parts[0]))
        if self.device.type != "cuda":
            for (epoch, step), parts in decoded:
                yield self.to_device(epoch, step, *parts)
            return
        stream = torch.cuda.Stream(self.device)
        ready: Any = None
        for (epoch, step), parts in decoded:
            with torch.cuda.stream(stream):
                following = self.to_device(epoch, step, *parts)
            if ready is not None:
                yield ready
            torch.cuda.current_stream(self.device).wait_stream(stream)
            for tensor in _tensors(following):
                tensor.record_stream(torch.cuda.current_stream(self.device))
            ready = following
        if ready is not None:
            yield ready

    def _check(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Report images that could not be decoded and workers that died."""
        try:
            for *parts, problems in _start_workers(loader):
                for name, problem in problems.items():
                    if self.corrupt == "raise":
                        raise DataError(
                            f"{problem}; remove it, or skip such images (--corrupt skip, corrupt='skip');"
                            " `tokamix info --data SOURCE` lists all of them"
                        )
                    if name not in self.skipped:
                        _log.warning("skipped: %s", problem)
                        self.skipped[name] = problem
                if self.train and not len(parts[0]):
                    reason = next(iter(problems.values()), "the data set ended before its stated length")
                    raise DataError(f"too many images cannot be decoded: {reason}")
                yield parts
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                raise ChildProcessError(
                    f"a data worker died ({str(error).splitlines()[0]}); the usual cause is too little memory:"
                    " use fewer workers or a smaller batch"
                ) from error
            raise


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def _identity(batch: Any) -> Any:
    return batch


def _start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """Start the workers with signals blocked, which they inherit: one that comes before they ignore it kills them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return iter(loader)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave_signals_to_parent(worker: int) -> None:
    """Ignore signals that the whole process group gets: the parent decides how the run ends, and needs its workers.

    The parent itself ends workers with SIGTERM. PyTorch ends those whose parent has died.
    """
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_on_signal_of, args=(os.getppid(),), daemon=True).start()


def _end_on_signal_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
