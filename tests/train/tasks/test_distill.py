"""Distillation: teachers and losses."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.train.tiny import TINY, run, tiny_data
from tokamix.train.setup.teacher import Teacher, load_teacher
from tokamix.train.tasks.distill import Distill
from tokamix.train.tasks.task import Position

pytestmark = pytest.mark.xdist_group("distill")

CPU = torch.device("cpu")
STUDENT = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class TwoTokens(nn.Module):
    """Returns the outputs of a class and a distillation token if enabled, as timm's distilled models do."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.teacher, self.both = nn.Linear(12, 4), nn.Linear(12, 4), False

    def set_distilled_training(self, enable: bool = True) -> None:
        self.both = enable

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        one, other = self.labels(x.flatten(1)), self.teacher(x.flatten(1))
        return (one, other) if self.both and self.training else (one + other) / 2


def fixed_teacher(logits: Tensor) -> Teacher:
    return Teacher(lambda images: logits, STUDENT, STUDENT, None, CPU)


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_losses_are_the_papers(kind: str, token: bool) -> None:
    torch.manual_seed(0)
    images, labels, taught = torch.randn(6, 3, 2, 2), torch.arange(6) % 4, torch.randn(6, 4) * 3
    recipe = TINY.replace(distillation=kind, teacher="t", distill_alpha=0.3, distill_tau=2.0, label_smoothing=0.1)
    model: nn.Module = TwoTokens() if token else nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    task = Distill(recipe, tiny_data(), fixed_teacher(taught))
    task.prepare(model, None)
    loss, logs = task.loss(model, images, labels, Position(0, 0, 0))
    answers = model(images)
    one, other = answers if token else (answers, answers)
    assert torch.equal(one, other) != token
    smoothed = F.one_hot(labels, 4) * 0.9 + 0.1 / 4
    label_loss = -(smoothed * one.log_softmax(1)).sum(1).mean()
    if kind == "hard":
        teacher_loss = -other.log_softmax(1)[torch.arange(6), taught.argmax(1)].mean()
    else:
        p, q = (taught / 2).softmax(1), (other / 2).softmax(1)
        teacher_loss = 4 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(loss, 0.7 * label_loss + 0.3 * teacher_loss)
    torch.testing.assert_close(logs["teacher_loss"], teacher_loss)


def test_a_distilled_model_of_timm() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, embed_dim=48, num_classes=4)
    recipe = TINY.replace(distillation="hard", teacher="t")
    task = Distill(recipe, tiny_data(), fixed_teacher(torch.randn(2, 4)))
    task.prepare(model, None)
    loss, _ = task.loss(model.train(), torch.randn(2, 3, 32, 32), torch.tensor([0, 1]), Position(0, 0, 0))
    loss.backward()
    assert model.head_dist.weight.grad.abs().sum() > 0
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 4)


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    assert run(folder, epochs=12).top1 > 90
    return folder


def as_teacher(source: str, classes: int = 4) -> Teacher:
    return load_teacher(source, classes, STUDENT, CPU, nullcontext)


@pytest.fixture(scope="module")
def onnx_file(teacher_run: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    file = teacher_run / "teacher.onnx"
    model = timm.create_model(f"local-dir:{teacher_run}", pretrained=True).eval()
    torch.onnx.export(model, (torch.zeros(4, 3, 8, 8),), file, dynamo=True, external_data=False)
    proto = onnx.load(file)
    for key in ("mean", "std"):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, str(list(model.pretrained_cfg[key]))
    onnx.save(proto, file)
    return file


def test_all_kinds_of_teachers_agree(teacher_run: Path, onnx_file: Path) -> None:
    """A run, a checkpoint by name, an ONNX file; each with its own normalisation and size."""
    model = timm.create_model(f"local-dir:{teacher_run}", pretrained=True).eval()
    pixels = torch.rand(6, 3, 8, 8)
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = model((pixels - mean) / std)
    seen = (pixels - 0.5) / 0.5  # as the student sees them
    torch.testing.assert_close(as_teacher(str(teacher_run))(seen), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        as_teacher(str(onnx_file))(seen), expected, rtol=1e-3, atol=1e-3
    )  # 6 images in parts of 4


def test_checkpoint_with_model_name(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=7).eval()  # made for 160 px
    torch.save({"model": model.state_dict()}, tmp_path / "w.pth")
    teacher = as_teacher(f"test_vit@{tmp_path / 'w.pth'}", classes=7)
    assert teacher.size == (160, 160)
    assert teacher(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_size_of_the_teachers_images(tmp_path: Path) -> None:
    """A convolutional network takes any size, a ViT only its own."""
    seen: list[torch.Size] = []
    for name in ("test_resnet", "test_vit"):
        model = timm.create_model(name, num_classes=4).eval()
        torch.save(model.state_dict(), tmp_path / f"{name}.pth")
    source = f"test_resnet@{tmp_path / 'test_resnet.pth'}"
    teacher = load_teacher(source, 4, STUDENT, CPU, nullcontext, image_size=64)
    logits = teacher.logits
    teacher.logits = lambda images: (seen.append(images.shape), logits(images))[1]
    teacher(torch.randn(2, 3, 32, 32))
    assert seen == [(2, 3, 64, 64)]
    with pytest.raises(ValueError, match=r"takes images of 160x160 only, but teacher_size is 64; leave it out"):
        load_teacher(f"test_vit@{tmp_path / 'test_vit.pth'}", 4, STUDENT, CPU, nullcontext, image_size=64)
    with pytest.raises(ValueError, match="teacher_size is 64, but there is no teacher"):
        TINY.replace(teacher_size=64)


def test_teacher_errors(teacher_run: Path, onnx_file: Path, tmp_path: Path) -> None:
    for source in (teacher_run, onnx_file):
        with pytest.raises(ValueError, match="has 4 classes, but the data has 5"):
            as_teacher(str(source), classes=5)
    with pytest.raises(ValueError, match=r"has weights but no model name; write NAME@w.pth"):
        as_teacher("w.pth")
    with pytest.raises(FileNotFoundError, match=r"there is no teacher .*none.onnx"):
        as_teacher(str(tmp_path / "none.onnx"))
    with pytest.raises(ValueError, match="there is no model 'resnet1888'"):
        as_teacher("resnet1888")


def test_runs_with_teachers(teacher_run: Path, onnx_file: Path, tmp_path: Path) -> None:
    for i, (source, kind) in enumerate([(teacher_run, "hard"), (onnx_file, "soft")]):
        result = run(tmp_path / str(i), distillation=kind, teacher=str(source), mixup=0.5, epochs=2)
        assert "train_teacher_loss" in result.epochs[-1]
        again = run(tmp_path / str(i), distillation=kind, teacher=str(source), mixup=0.5, epochs=2, resume=False)
        assert again.best == result.best


def test_a_student_learns_from_its_teacher_alone(teacher_run: Path, tmp_path: Path) -> None:
    """With wrong labels and all weight on the teacher, the student learns the teacher's predictions."""
    data = tiny_data(train=160)
    data.train.labels = (data.train.labels + 1) % 4
    result = run(tmp_path / "a", data=data, distillation="hard", teacher=str(teacher_run), distill_alpha=1.0, epochs=8)
    assert result.top1 > 80


def test_classes_of_a_teacher_in_another_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The outputs of a run are permuted to the data's order; other names are told."""
    data = tiny_data()
    folder = run(tmp_path, data, epochs=1, warmup_epochs=0).folder
    images = torch.randn(3, 3, 8, 8)

    def logits(names: list[str]) -> Tensor:
        return load_teacher(str(folder), 4, STUDENT, CPU, nullcontext, class_names=names)(images)

    own, order = logits(list(data.classes)), [2, 0, 3, 1]
    torch.testing.assert_close(logits([data.classes[i] for i in order]), own[:, order])
    assert not caplog.messages
    torch.testing.assert_close(logits(["cat", *data.classes[1:]]), own)
    assert "has classes such as 'class 0', but the data has 'cat'" in caplog.text
