"""`tokamix bench MODELS` and `tokamix pick`: rows, the correctness gate, failures, recommendations."""

import csv
import importlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import tokamix
from tests.command import call
from tokamix.bench import pick, runtimes, softmax, suites, timing
from tokamix.bench.runtimes import RuntimeRow


class Small(nn.Module):
    num_classes = 3

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).sigmoid().mean((2, 3)))


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "create_for_size", lambda name, size: Small().eval())


def test_command(tmp_path: Path) -> None:
    """Both runtimes and sizes are measured; cost, error and speed-up stand in the file."""
    out = call(
        "bench", "stvit_small", "--sizes", "8,12", "--runtime", "eager,onnx", "--seconds", "0", "--device", "cpu",
        "-o", tmp_path,
    )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "runtimes.csv").open()))
    assert [(row["runtime"], row["size"]) for row in rows] == [
        ("eager", "8"),
        ("onnx", "8"),
        ("eager", "12"),
        ("onnx", "12"),
    ]
    assert rows[0]["speedup"] == "1"
    assert all(float(row["milliseconds"]) > 0 and float(row["error"]) < 1e-5 for row in rows)
    assert rows[0]["parameters"] == str(sum(p.numel() for p in Small().parameters()))
    assert rows[0]["exps"] == str(4 * 6 * 6)
    assert (tmp_path / "runtimes.png").read_bytes().startswith(b"\x89PNG")
    assert "stvit_small" in out


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(runtimes, "_create_call", lambda *args: lambda: torch.zeros(1, 3))
    assert not list(runtimes.measure_runtimes(["stvit_small"], [8], seconds=0, log=lines.append))
    assert "not timed, because the result is wrong" in lines[0]


def test_every_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one class are compiled each, beyond Dynamo's limit of 8 graphs for a function."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    monkeypatch.setattr(runtimes, "create_for_size", lambda name, size: Small(int(name)).eval())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    rows = list(runtimes.measure_runtimes([*"123456789"], [8], [1], ["compile"], seconds=0, log=lambda _: None))
    assert len(rows) == graphs == 9


def test_int8_of_models_with_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random images that int8 is calibrated on have the classes of the model."""
    model = Small().eval()
    model.pretrained_cfg = {"label_names": ["cat", "dog", "owl"], "input_size": (3, 8, 8)}
    monkeypatch.setattr(runtimes, "create_for_size", lambda name, size: model)
    logged: list[str] = []
    rows = list(runtimes.measure_runtimes(["a"], [8], [1], ["onnx-int8"], "cpu", 0.0, logged.append))
    assert runtimes._config(model).class_names == ("cat", "dog", "owl")
    assert [row.runtime for row in rows] == ["onnx-int8"], logged


def test_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = partial(runtimes.measure_runtimes, ["a"], [8], [1], ["onnx"], seconds=0, folder=tmp_path)
    assert len(list(measure())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a_onnx_8_1.onnx"]
    monkeypatch.setattr(runtimes, "export", None)
    assert len(list(measure())) == 1


def test_aoti_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/aoti.py: a model is prepared, timed in turns, and its row stands on the page."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    script: Any = importlib.import_module("aoti")
    timed = script.TimedRuntime("a", "eager", 2, "cpu")
    timed.first_call()
    assert timed.check() < 1e-5
    for _ in range(2):
        timed.time(0.0)
    assert len(timed.times) == 2 * script.MIN_CALLS
    row = timed.row.as_dict()
    assert row["milliseconds"] == statistics.median(timed.times)
    assert row["images_per_second"] == pytest.approx(2e3 / row["milliseconds"])
    with pytest.raises(RuntimeError, match="a aoti 224 px, batch 1: FAILED"):
        script.TimedRuntime("a", "aoti", 1, "nowhere").first_call()
    lines = importlib.import_module("deploy").aoti_lines(
        [
            dict.fromkeys(script.COLUMNS, "1") | {"hardware": "GPU", "torch": "2", "runtime": name, "milliseconds": ms}
            for name, ms in (("eager", "6"), ("compile", "3"), ("aoti", "2"))
        ]
    )
    assert lines[-1] == "| 1 | 1 | aoti | 2 | 100% | 1 | 3.00 | 1.50 |"


def test_bad_input() -> None:
    def error(*args: str) -> str:
        return call("bench", "stvit_small", "--device", "cpu", *args, code=1)

    assert "--sizes is '8,x', but must be numbers" in error("--sizes", "8,x")
    assert "there is no runtime 'tensorrt'; choose from eager" in error("--runtime", "tensorrt")
    for runtime in ("graphs", "graphed"):
        assert f"CUDA graphs need a GPU; leave out the runtime {runtime}" in error("--runtime", f"eager,{runtime}")
    assert "--only is for suites" in error("--only", "infer")
    for option in ("--sizes", "--batch", "--runtime", "--seconds"):
        text = call("bench", "--suite", "ops", "--device", "cpu", option, "1", code=1)
        assert f"{option} is for models, which are named without --suite; leave it out" in text
    assert "cannot write into /dev/null/x" in error("-o", "/dev/null/x")
    assert "there is no model 'stvit'" in call(
        "pick", "--budget-ms", "5", "--models", "stvit", "--device", "cpu", code=1
    )
    assert "accuracy of resnet18 is not known" in call("pick", "--budget-ms", "5", "--models", "resnet18", code=1)
    text = call("pick", "--budget-ms", "5", "--models", "convnext_tiny", code=1)
    assert "did you mean convnext_tiny.fb_in1k?" in text
    text = call("pick", "--budget-ms", "5", "--task", "segment", "--models", "stvit_small", code=1)
    assert "the mIoU of 'stvit_small' is not known; choose from " in text
    assert "there is no runtime 'onxx'" in call("pick", "--budget-ms", "5", "--runtime", "onxx", code=1)
    assert "the budget is -1.0 ms" in call("pick", "--budget-ms", "-1", "--device", "cpu", code=1)


def rows_of(name: str, milliseconds: dict[str, float]) -> list[RuntimeRow]:
    return [
        RuntimeRow(name, runtime, "cpu", 224, 1, ms, 0.1, 1e3 / ms, 1.0, 0.1, math.nan, 1, 1, 1, 0.0)
        for runtime, ms in milliseconds.items()
    ]


def test_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most accurate model within the budget; slow ones are not exported; nothing fits: said so, exit code 1."""
    speeds = {
        "stvit_small": {"eager": 900.0},  # 83.6 %, hopeless
        "xcit_small_12_p16_sima": {"eager": 100.0, "onnx": 60.0},  # 82.1 %
        "atmnet_tiny": {"eager": 90.0, "onnx": 45.0, "openvino": 30.0},  # 82.0 %
        "deit_small_sima": {"eager": 20.0},
    }
    measured: list[tuple[str, tuple[str, ...]]] = []

    def measure(models, sizes, batches, wanted, device, seconds, log):
        measured.append((models[0], tuple(wanted)))
        return iter(rows_of(models[0], {r: ms for r, ms in speeds[models[0]].items() if r in wanted}))

    monkeypatch.setattr(pick, "measure_runtimes", measure)
    options = ("--models", ",".join(speeds), "--runtime", "eager,onnx,openvino", "--device", "cpu")
    out = call("pick", "--budget-ms", "50", *options)
    assert "atmnet_tiny in openvino: 30.0 ms of 50, top-1 82.0 % (the paper; no weights of ours)" in out
    assert "too slow in eager mode: stvit_small" in out
    assert ("stvit_small", ("eager", "onnx", "openvino")) not in measured
    assert "deit_small_sima" not in [name for name, _ in measured]
    out = call("pick", "--budget-ms", "5", *options, code=1)
    assert "nothing keeps 5 ms: the fastest is deit_small_sima in eager with 20.0 ms" in out


def test_pick_prefers_an_accuracy_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's accuracy is not that of int8, which is recommended only if nothing else fits, and with a note."""
    speeds = {"eager": 50.0, "openvino": 30.0, "openvino-int8": 10.0}
    monkeypatch.setattr(pick, "measure_runtimes", lambda models, *_: iter(rows_of(models[0], speeds)))
    options = ("--models", "stvit_small", "--runtime", ",".join(speeds), "--device", "cpu")
    out = call("pick", "--budget-ms", "40", *options)
    assert "stvit_small in openvino: 30.0 ms" in out
    assert "what int8 costs" not in out
    out = call("pick", "--budget-ms", "20", *options)
    assert "stvit_small in openvino-int8: 10.0 ms" in out
    assert "what int8 costs of it is not known" in out


def test_pick_keeps_to_the_runtimes_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager mode is measured first in any case, but not recommended unless it is named."""
    monkeypatch.setattr(
        pick, "measure_runtimes", lambda models, *_: iter(rows_of(models[0], {"eager": 5.0, "onnx": 40.0}))
    )
    options = ("--models", "stvit_small", "--runtime", "onnx", "--device", "cpu")
    assert "stvit_small in onnx: 40.0 ms of 50" in call("pick", "--budget-ms", "50", *options)
    out = call("pick", "--budget-ms", "10", *options, code=1)
    assert "nothing keeps 10 ms: the fastest is stvit_small in onnx with 40.0 ms" in out
    assert "the budget is nan ms" in call("pick", "--budget-ms", "nan", *options, code=1)


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ("1", "nothing is likely to keep 1 ms in onnx, so nothing was exported: without it, every model takes more"),
        ("20", "nothing could be measured in onnx: see the failures above"),
    ],
)
def test_pick_does_not_name_a_runtime_that_was_not_asked_for(
    budget: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ran in the only runtime of --runtime: too slow to be exported, or the export failed."""
    monkeypatch.setattr(pick, "measure_runtimes", lambda models, *_: iter(rows_of(models[0], {"eager": 30.0})))
    options = ("--models", "stvit_small", "--runtime", "onnx", "--device", "cpu")
    out = call("pick", "--budget-ms", budget, *options, code=1)
    assert reason in out
    assert "in eager with" not in out
    assert "the fastest is" not in out


def test_sizes_that_a_model_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other models are measured; if there are none, one sentence."""
    monkeypatch.setattr(runtimes, "create_for_size", lambda name, size: timm.create_model(name).eval())
    logged: list[str] = []
    models = ["test_vit", "test_resnet"]
    rows = list(runtimes.measure_runtimes(models, [50], [1], ["eager"], "cpu", 0.0, logged.append))
    assert [row.model for row in rows] == ["test_resnet"]
    assert logged[0].startswith("test_vit 50 px: FAILED, the model does not take this size: Input height (50)")
    text = call("bench", "test_vit", "--sizes", "50", "--runtime", "eager", "--device", "cpu", "-o", tmp_path, code=1)
    assert "error: all measurements failed; nothing is written" in text


def test_candidates() -> None:
    found = pick.list_candidates()
    assert [c.accuracy for c in found] == sorted((c.accuracy for c in found), reverse=True)
    assert {"stvit_small", "atmnet_tiny", "convnext_tiny"} <= {c.name for c in found}
    segment = {c.name: c for c in pick.list_candidates(task="segment")}
    assert (segment["atmnet_upernet:atmnet_tiny"].accuracy, segment["atmnet_upernet:atmnet_tiny"].metric) == (
        46.5,
        "mIoU",
    )
    detect = pick.list_candidates(task="detect")
    assert detect[0].accuracy > 48
    assert {c.metric for c in detect} == {"box AP"}


@pytest.mark.parametrize(("task", "method"), [("segment", "semantic_fpn"), ("detect", "retinanet")])
def test_pick_dense(task: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segmenters and detectors are measured from images to tensors; int8 is not tried."""
    create = tokamix.create_segmenter if task == "segment" else tokamix.create_detector

    def create_small(name: str, size: int) -> nn.Module:
        arguments = {"dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "width": 8}
        return create(method, "atmnet_xtiny", runtimes.DENSE_CLASSES[task], **arguments).eval()

    monkeypatch.setattr(runtimes, "create_for_size", create_small)
    monkeypatch.setattr(pick, "installed_runtimes", lambda device: ["eager", "onnx-int8"])
    name = {"segment": "atmnet_semantic_fpn:atmnet_xtiny", "detect": "atmnet_retinanet_1x:atmnet_xtiny"}[task]
    result = pick.pick(1e6, 64, models=[name], seconds=0, log=lambda _: None, task=task)
    (row,) = result.rows
    assert row.runtime == "eager"
    assert row.error < 1e-5
    assert min(row.macs, row.parameters) > 0
    assert name in result.summary()
    assert "the paper; no weights of ours" in result.summary()


def test_recipes_name_dense_models() -> None:
    model = runtimes._create_dense("atmnet_retinanet_1x", "atmnet_xtiny")
    assert type(model).__name__ == "RetinaNet"
    with pytest.raises(ValueError, match="must be for segment or detect"):
        runtimes._create_dense("imagenette_nano", "pyramid_nano_sima")


def test_labels_of_the_plot_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **options: (figures.append(self), save(self, path, **options))
    )
    names = [f"a_model_with_a_long_name_{i}" for i in range(8)]
    runtimes.draw_rows([row for name in names for row in rows_of(name, {"eager": 5.0})], tmp_path / "plot.png")
    boxes = [label.get_window_extent() for label in figures[0].axes[0].get_xticklabels()]
    assert len(boxes) == 8
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("attention", ["self", "cross-covariance"])
def test_softmax_row(attention: Literal["self", "cross-covariance"]) -> None:
    row = softmax.measure_softmax(64, 64, seconds=0.0, attention=attention)
    assert row.tokens == 16
    assert row.error < 1e-5
    assert min(row.softmax_ms, row.products_ms, row.norms_ms, row.other_order_ms) > 0
    assert row.slowdown > -1
    assert row.slowdown_spread >= 0


@pytest.mark.parametrize("attention", ["self", "cross-covariance"])
@pytest.mark.parametrize("wrong", ["softmax", "products", "norms", "other_order"])
def test_a_wrong_softmax_variant_is_not_timed(
    attention: Literal["self", "cross-covariance"], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the variant; the suite logs it and reports no row."""
    variants = softmax.list_variants(attention)
    exact = variants[wrong]
    monkeypatch.setattr(
        softmax, "list_variants", lambda kind: {**variants, wrong: lambda q, k, v: 1.001 * exact(q, k, v)}
    )
    monkeypatch.setattr(softmax, "in_turn_ms", lambda *_: pytest.fail("timed"))
    reason = f"not timed, because the result of {wrong} is wrong: relative error 1.0e-03"
    with pytest.raises(RuntimeError, match=reason):
        softmax.measure_softmax(64, 64, attention=attention)
    logged: list[str] = []
    only = f"{attention}.*224 px, width 384"
    with pytest.raises(RuntimeError, match="all 1 measurements of suite 'softmax' failed"):
        suites.run("softmax", tmp_path, "cpu", only, logged.append)
    assert reason in logged[0]
    assert not list(tmp_path.iterdir())


def test_softmax_command_draws_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bar for each measured size, softmax, and SimA's norms; refused before the measurement without matplotlib."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **options: (figures.append(self), save(self, path, **options))
    )
    measure = softmax.measure_softmax
    monkeypatch.setattr(softmax, "measure_softmax", partial(measure, seconds=0.0))
    out = call(
        "bench",
        "--suite",
        "softmax",
        "--only",
        "self.* (224|384) px|covariance.* (384|1024)$",
        "--device",
        "cpu",
        "-o",
        tmp_path,
    )
    assert f"wrote {tmp_path / 'softmax.png'}" in out
    with Image.open(tmp_path / "softmax.png") as image:
        assert image.width > image.height > 400
    assert [len(axes.patches) for axes in figures[0].axes] == [4, 4]
    monkeypatch.setattr("tokamix.cli.bench.find_spec", lambda name: None)
    assert "plots need matplotlib" in call(
        "bench", "--suite", "softmax", "--device", "cpu", "-o", tmp_path / "new", code=1
    )
    assert not (tmp_path / "new").exists()


def test_calls_are_timed_in_turn() -> None:
    calls: list[str] = []
    runs = [lambda name=name: (calls.append(name), time.sleep(1e-3)) for name in "ab"]
    times = timing.in_turn_ms(runs, "cpu", seconds=0.0)
    assert [len(values) for values in times] == [timing.MIN_ROUNDS] * 2
    assert all(value >= 1 for values in times for value in values)
    assert "".join(calls) == "ab" * (timing.WARM_UP + 1 + timing.MIN_ROUNDS)
