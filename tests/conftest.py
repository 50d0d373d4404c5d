"""Shared fixtures: the authors' golden numbers, and torch.empty filled with NaN.

torch is imported where it is used: the process that distributes the tests (`pytest -n`) does not need it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

GOLDEN = Path(__file__).parent / "golden"

os.environ["COLUMNS"] = "200"  # consoles read their width when they are created; tests look for whole lines


def golden_cases(prefix: str) -> list[str]:
    """Names of the golden cases that start with `prefix`."""
    return sorted(p.stem for p in GOLDEN.glob(f"{prefix}*.json"))


def load_golden(case: str) -> SimpleNamespace:
    """One golden case: `.meta` (its json) and the tensors of each prefix, floats as float64.

    `.weights`, `.inputs`, `.outputs` (float64 outputs of the authors' code), `.loss_weights`, `.grad_inputs`,
    `.grad_weights`, `.extra`.
    """
    from safetensors.torch import load_file

    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(GOLDEN / f"{case}.safetensors").items():
        group, _, key = name.partition("/")
        groups.setdefault(group, {})[key] = tensor.double() if tensor.is_floating_point() else tensor
    known = {"w": "weights", "in": "inputs", "out64": "outputs", "loss_w": "loss_weights"} | {
        "grad_in": "grad_inputs",
        "grad_w": "grad_weights",
    }
    fields = {field: groups.pop(group, {}) for group, field in known.items()}
    return SimpleNamespace(meta=json.loads((GOLDEN / f"{case}.json").read_text()), extra=groups, **fields)


def assert_golden(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """float64 agreement with the authors' numbers at 1e-9 relative."""
    import torch

    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect tests of kernels only where kernels run: with Triton, and a GPU or TRITON_INTERPRET=1."""
    if not collection_path.name.endswith("_kernels.py"):
        return None
    import torch

    from tokamix.ops import dispatch

    can_run = dispatch.HAS_TRITON and (dispatch.INTERPRET or torch.cuda.is_available())
    return None if can_run else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `gpu` where there is no GPU; elsewhere, `pytest -m gpu` also selects the kernels' tests."""
    import torch

    from tokamix.ops import dispatch

    for item in items:
        if item.path.stem.endswith("_kernels") and not dispatch.INTERPRET:
            item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        deselected = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tests run in parallel processes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed every test, so that its numbers do not depend on other tests."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill torch.empty and friends with NaN (or True), so that outputs that are never written are found."""
    import torch

    for name in ("empty", "empty_like", "empty_strided"):
        real = getattr(torch, name)

        def poisoned(*args, real=real, **kwargs):
            out = real(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() or out.dtype == torch.bool else out

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the curves and reports of training runs."""
    from tokamix.train.output import run_folder
    from tokamix.train.tasks import classify

    def draw_curves(rows: list, path: Path, names: dict) -> None:
        path.write_bytes(b"drawn")

    def write_report(folder: Path, *args: object) -> None:
        (folder / "mistakes.png").write_bytes(b"drawn")

    monkeypatch.setattr(run_folder, "draw_curves", draw_curves)
    monkeypatch.setattr(classify, "write_report", write_report)


@pytest.fixture
def random_weights() -> Callable[[Mapping[str, Sequence[int]]], dict[str, torch.Tensor]]:
    """A function that draws float64 weights for names and shapes, scaled so that each affects the output."""
    import torch

    def draw(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        weights = {}
        for name, shape in shapes.items():
            w = torch.randn(tuple(shape), dtype=torch.float64) / max(1, math.prod(shape[1:])) ** 0.5
            if name.endswith("running_var") or (name.endswith("weight") and len(shape) == 1):
                w = 1 + 0.2 * w.tanh()
            weights[name] = torch.tensor(0) if name.endswith("num_batches_tracked") else w
        return weights

    return draw


@pytest.fixture(scope="session")
def classifier_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier that was trained on `tiny_data()`; read-only."""
    from tests.train.tiny import run

    return run(tmp_path_factory.mktemp("runs") / "classifier", epochs=6).folder


@pytest.fixture(scope="session")
def segmenter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a segmenter that learned a few images of 48 px; read-only."""
    from tests.train.tiny_dense import run, tiny_scenes

    settings = {"iterations": 24, "eval_every": 24, "lr": 2e-2, "method_kwargs": {"width": 32, "neck_width": 32}}
    data = tiny_scenes("segment", train=4, val=0, side=48)
    return run("segment", tmp_path_factory.mktemp("runs") / "segmenter", data, crop_size=48, **settings).folder


@pytest.fixture(scope="session")
def detector_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Mask R-CNN that learned a few images of 64 px; read-only."""
    from tests.train.tiny_dense import run, tiny_scenes

    settings = {"iterations": 24, "eval_every": 24, "method": "mask_rcnn", "hflip": 0.0, "lr": 1e-2}
    settings |= {"method_kwargs": {"width": 16, "rois_per_image": 16}}
    data = tiny_scenes("detect", train=4, val=0, side=64)
    return run("detect", tmp_path_factory.mktemp("runs") / "detector", data, **settings).folder
