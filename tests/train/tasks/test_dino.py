"""DINO: its loss, its network, whole runs, and collapse."""

import json
import math
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import tokamix
from tests.conftest import assert_golden, load_golden
from tests.train.loop.test_resume import Stop, stop_at
from tests.train.tiny import TINY, assert_same_bits, tiny_data
from tests.train.tiny import run as run_classifier
from tests.train.tiny_dino import TINY_DINO, run
from tokamix.inference import load_model
from tokamix.train.loop import engine
from tokamix.train.loop.optim import WeightDecaySchedule, clip_each_gradient
from tokamix.train.tasks.dino.loss import centered_softmax, multicrop_loss, sinkhorn, update_center
from tokamix.train.tasks.dino.network import DinoHead, DinoNetwork
from tokamix.train.tasks.dino.task import CollapseError, Dino, describe_collapse, entropies
from tokamix.train.tasks.task import Position

pytestmark = pytest.mark.xdist_group("processes")


def formula(student: Tensor, teacher: Tensor, center: Tensor) -> Tensor:
    """The paper's algorithm 1, term by term: teacher (2, B, K) and student (crops, B, K) logits."""
    terms = []
    for t, target in enumerate(teacher):
        p = ((target - center) / 0.04).softmax(-1)
        terms += [-(p * (s / 0.1).log_softmax(-1)).sum(-1).mean() for i, s in enumerate(student) if i != t]
    return torch.stack(terms).mean()


def test_loss_center_and_sinkhorn_are_the_published_ones() -> None:
    """Against lightly's values on the same tensors, over two steps, and against the formula; gradients too."""
    golden = load_golden("dino_loss")
    center = torch.zeros(12, dtype=torch.float64)
    for step in ("0", "1"):
        teacher = golden.inputs["teacher" + step]
        student = golden.inputs["student" + step].requires_grad_()
        log_p = F.log_softmax(student / 0.1, -1)
        loss = multicrop_loss(log_p, centered_softmax(teacher, center, 0.04))
        assert_golden(loss.detach(), golden.outputs["loss" + step])
        assert_golden(formula(student, teacher, center).detach(), golden.outputs["loss" + step])
        assert_golden(torch.autograd.grad(loss, student)[0], golden.grad_inputs["student" + step])
        update_center(center, teacher.flatten(0, 1), 0.9)
        assert_golden(center, golden.outputs["center" + step])
    balanced = sinkhorn(golden.inputs["teacher0"].flatten(0, 1), 0.04)
    assert_golden(balanced, golden.outputs["sinkhorn"])
    many = sinkhorn(torch.randn(32, 6, dtype=torch.float64), 0.5, iterations=100)
    torch.testing.assert_close(many.sum(0), torch.full((6,), 32 / 6, dtype=torch.float64))
    torch.testing.assert_close(many.sum(1), torch.ones(32, dtype=torch.float64))
    assert sinkhorn(torch.randn(4, 5) * 100, 0.04).isfinite().all()


def test_balance_and_center_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for two processes with half of the images each."""
    logits = torch.randn(12, 6, dtype=torch.float64)
    whole, center = sinkhorn(logits, 0.1), torch.ones(6, dtype=torch.float64)
    update_center(center, logits, 0.75)
    barrier, parts = threading.Barrier(2, timeout=20), {}

    def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        parts[threading.get_ident()] = tensor.clone()
        barrier.wait()
        both = torch.stack(list(parts.values()))
        barrier.wait()
        tensor.copy_(both.amax(0) if operation == dist.ReduceOp.MAX else both.sum(0))

    def process(part: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.ones(6, dtype=torch.float64)
        update_center(own, part, 0.75)
        return sinkhorn(part, 0.1), own

    for name, value in {"is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(process, logits.split(6)))
    torch.testing.assert_close(torch.cat([balanced for balanced, _ in results]), whole)
    for _, own in results:
        torch.testing.assert_close(own, center)


def small_network(**kwargs) -> DinoNetwork:
    torch.manual_seed(0)
    backbone = tokamix.create_model(TINY.model, num_classes=0, img_size=8, **TINY.model_kwargs, **kwargs)
    return DinoNetwork(backbone, DinoHead(16, 24, 16, 8, norm_last_layer=True))


def test_network() -> None:
    network = small_network(drop_path_rate=0.5).train()
    crops = [torch.randn(6, 3, 8, 8), torch.randn(12, 3, 4, 4)]
    student, teacher, _ = network(crops)
    assert student.shape == (18, 24)
    assert teacher.shape == (6, 24)
    assert student.abs().max() <= 1 + 1e-6  # products of vectors of norm 1
    student.sum().backward()
    trained = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert trained
    assert all(name.startswith("student.") for name in trained)
    assert not network.student.head.norms.requires_grad
    torch.testing.assert_close(teacher, network.eval()(crops)[1])  # no stochastic depth in the teacher
    before = [parameter.clone() for parameter in network.teacher.parameters()]
    with torch.no_grad():
        for parameter in network.student.parameters():
            parameter.add_(1.0)
    network.update_teacher(0.75)
    for old, new, target in zip(before, network.teacher.parameters(), network.student.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), 0.75 * old + 0.25 * target.detach())
    assert "student.backbone.pos_embed.table" in network.no_weight_decay()


def test_each_gradient_is_clipped_alone() -> None:
    small, large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    small.grad, large.grad = torch.tensor([0.3, 0.4]), torch.tensor([0.0, 30.0, 40.0])
    norm = clip_each_gradient([small, large, nn.Parameter(torch.zeros(1))], 5.0)
    torch.testing.assert_close(small.grad, torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(large.grad, torch.tensor([0.0, 3.0, 4.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(norm, torch.tensor(math.hypot(0.5, 50.0)))


@pytest.fixture(scope="module")
def dino_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dino")
    run(folder, save_every=3, log_every=1)
    return folder


def test_a_run(dino_run: Path) -> None:
    """The folder holds the teacher's backbone, the log the signs of a collapse."""
    model, config = load_model(dino_run)
    assert model.num_classes == config.num_classes == 0
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 16)
    state = load_file(dino_run / "state" / "state.safetensors")
    for name, tensor in load_file(dino_run / "model.safetensors").items():
        assert torch.equal(tensor, state[f"model:teacher.backbone.{name}"])
    rows = [json.loads(line) for line in (dino_run / "metrics.jsonl").read_text().splitlines()]
    steps, epochs = ([row for row in rows if row["event"] == kind] for kind in ("train", "epoch"))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {"teacher_entropy", "teacher_information", "feature_std"} <= steps[0].keys()
    assert {"knn", "effective_rank", "feature_std", "teacher_information"} <= epochs[-1].keys()
    assert "image-feature-extraction" in (dino_run / "README.md").read_text()


def test_schedules_and_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight decay and momentum follow half a cosine, and each step clips every gradient alone."""
    decays, momenta, clipped = [], [], []
    set_progress, update_teacher = WeightDecaySchedule.set_progress, DinoNetwork.update_teacher

    def watch_decay(self: WeightDecaySchedule, progress: float) -> None:
        set_progress(self, progress)
        decays.append({group["weight_decay"] for group in self.optimizer.param_groups})

    def watch_momentum(self: DinoNetwork, momentum: float) -> None:
        update_teacher(self, momentum)
        momenta.append(momentum)

    def watch_clipping(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        kept = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in kept]
        before = torch.stack([gradient.norm() for gradient in gradients])
        norm = clip_each_gradient(kept, max_norm)
        after = torch.stack([gradient.norm() for gradient in gradients])
        torch.testing.assert_close(after, before.clamp(max=max_norm), rtol=1e-3, atol=1e-5)
        clipped.append(int((before > max_norm).sum()))
        return norm

    monkeypatch.setattr(WeightDecaySchedule, "set_progress", watch_decay)
    monkeypatch.setattr(DinoNetwork, "update_teacher", watch_momentum)
    monkeypatch.setattr(engine, "clip_each_gradient", watch_clipping)
    run(tmp_path, epochs=2, clip_grad=0.05)
    assert len(momenta) == len(decays) == len(clipped) == 10
    assert sum(clipped) > 0
    for i, (momentum, decay) in enumerate(zip(momenta, decays, strict=True)):
        rest = (1 + math.cos(math.pi * i / 10)) / 2  # 1 at the start of the run, 0 at its end
        assert momentum == pytest.approx(1 - 0.1 * rest)
        assert max(decay) == pytest.approx(0.2 + (TINY_DINO.weight_decay - 0.2) * rest)
        assert min(decay) == 0  # of biases and norms, at any time


def test_teacher_temperature_rises_at_the_start() -> None:
    task = Dino(TINY_DINO, tiny_data())  # 0.03 to 0.04 in two of three epochs
    temperatures = [task.teacher_temperature(Position(0, 0, 0, epoch / 3)) for epoch in (0, 1, 2, 3)]
    assert temperatures == pytest.approx([0.03, 0.035, 0.04, 0.04])


def test_last_layer_is_frozen_in_the_first_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    real = Dino.after_step

    def after_step(self: Dino, position: Position) -> None:
        real(self, position)
        weights.append(self.network.student.head.directions.detach().clone())

    monkeypatch.setattr(Dino, "after_step", after_step)
    run(tmp_path, epochs=2, freeze_last_layer=1.0)
    steps = len(weights) // 2
    assert all(torch.equal(weights[0], one) for one in weights[:steps])
    assert not torch.equal(weights[0], weights[steps])


OTHER = {"centering": "sinkhorn", "head_batch_norm": True, "drop_path": 0.2, "norm_last_layer": False}


@pytest.mark.parametrize("settings", [{}, OTHER])
def test_resuming_is_exact(tmp_path: Path, dino_run: Path, monkeypatch: pytest.MonkeyPatch, settings: dict) -> None:
    whole = dino_run
    if settings:
        whole = run(tmp_path / "whole", save_every=3, log_every=1, **settings).folder
    stop_at(monkeypatch, 7)
    with pytest.raises(Stop):
        run(tmp_path / "resumed", save_every=3, log_every=1, **settings)
    monkeypatch.undo()
    run(tmp_path / "resumed", save_every=3, log_every=1, **settings)
    assert_same_bits(whole, tmp_path / "resumed")


def test_two_processes_are_like_one(dino_run: Path, two_processes: tuple[Path, str]) -> None:
    folder = two_processes[0] / "dino"
    rows = [
        [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()] for one in (dino_run, folder)
    ]
    losses = [torch.tensor([row["loss"] for row in part if row["event"] == "train"]) for part in rows]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
    weights = [load_file(one / "last.safetensors") for one in (dino_run, folder)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert rows[1][-1]["knn"] == pytest.approx(rows[0][-1]["knn"], abs=3)  # a tie or two


def test_a_classifier_starts_from_the_run(dino_run: Path, tmp_path: Path) -> None:
    result = run_classifier(tmp_path, checkpoint=dino_run, epochs=1, warmup_epochs=0)
    assert load_model(result.folder)[0].num_classes == 4
    with pytest.raises(ValueError, match="the model has no classes, it returns features"):
        tokamix.evaluate(dino_run, tiny_data(), device="cpu")
    with pytest.raises(ValueError, match="the model has no classes, it returns features"):
        tokamix.predict(dino_run, [torch.zeros(3, 8, 8, dtype=torch.uint8)], device="cpu")


def test_a_folder_without_classes(tmp_path: Path) -> None:
    """Files are decoded and cropped on the CPU; without labels the effective rank stands for the accuracy."""
    for i in range(24):
        pixels = torch.randint(256, (12, 14, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    result = run(tmp_path / "run", data=str(tmp_path), epochs=1, warmup_epochs=0, batch_size=8)
    assert result.metric == "effective_rank"
    assert result.score > 0
    assert "knn" not in result.epochs[-1]


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "xcit_nano_12_p16_sima"])
def test_backbones_that_take_several_sizes(name: str) -> None:
    recipe = TINY_DINO.replace(model=name, model_kwargs={}, image_size=64, local_size=32)
    network = Dino(recipe, tiny_data()).create_model(None, None, False)
    assert network([torch.randn(2, 3, 64, 64), torch.randn(2, 3, 32, 32)])[0].shape == (4, 24)


def test_bad_input() -> None:
    mlp = TINY_DINO.replace(model="mixer_s32_224", model_kwargs={}, image_size=64, local_size=32)
    with pytest.raises(ValueError, match=r"mixer_s32_224 does not take crops of both 64 px and 32 px .*choose another"):
        Dino(mlp, tiny_data()).create_model(None, None, False)
    with pytest.raises(ValueError, match="99 neighbours cannot be found among 80 training images; lower knn_k"):
        Dino(TINY_DINO.replace(knn_k=99), tiny_data())
    with pytest.raises(ValueError, match="the teacher is the moving average of the weights"):
        TINY_DINO.replace(ema=0.9)
    with pytest.raises(ValueError, match=r"local_scale is \[0.5, 0.1\], but must be two rising numbers"):
        TINY_DINO.replace(local_scale=(0.5, 0.1))
    with pytest.raises(ValueError, match="clip_per_parameter needs clip_grad"):
        TINY_DINO.replace(clip_grad=None)
    with pytest.raises(ValueError, match=r"weight_decay_end is 0.2, but weight_decay is 0"):
        TINY_DINO.replace(weight_decay=0.0)


def test_entropies() -> None:
    uniform, same = torch.full((5, 8), 1 / 8), torch.eye(8)[[3] * 5]
    for collapsed, entropy in ((uniform, math.log(8)), (same, 0.0)):
        each, information = entropies(collapsed)
        assert each == pytest.approx(entropy)
        assert information == pytest.approx(0.0, abs=1e-6)
    assert entropies(torch.eye(8))[1] == pytest.approx(math.log(8))


def test_a_collapse_is_reported_and_ends_the_run_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without centering (a momentum near 1 keeps the center at 0) and with a hot teacher, outputs become uniform."""
    settings = {"center_momentum": 0.999, "teacher_temp": 100.0, "teacher_temp_start": 100.0, "epochs": 2}
    run(tmp_path / "a", **settings)
    assert "the run seems to have collapsed: the teacher gives all validation images nearly the same" in caplog.text
    with pytest.raises(CollapseError, match=r"the run has collapsed: .*; lower lr or teacher_temp.*sinkhorn"):
        run(tmp_path / "b", **settings, stop_on_collapse=True)
    healthy = {"feature_std": 0.5, "teacher_information": 1.0, "teacher_entropy": 2.0}
    assert describe_collapse(healthy) is None
    assert "nearly the same features" in str(describe_collapse(healthy | {"feature_std": 0.001}))


def test_module_of_ones_own(tmp_path: Path) -> None:
    """A classifier given as a module loses its classifier."""
    model = timm.create_model("test_vit", num_classes=4, img_size=32, dynamic_img_size=True)
    result = run(tmp_path, network=model, image_size=32, local_size=16, epochs=1, warmup_epochs=0)
    assert result.load().num_classes == 0


@pytest.mark.gpu
def test_cuda_graphs_train_alike(tmp_path: Path) -> None:
    """The student runs twice in a step and the teacher once: their graphs must not overwrite each other's outputs."""
    plain, graphs = (run(tmp_path / str(flag), compile=flag, device="cuda", epochs=4) for flag in (False, True))
    losses = [[epoch["train_loss"] for epoch in result.epochs] for result in (plain, graphs)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
