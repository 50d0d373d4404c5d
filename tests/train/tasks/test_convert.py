"""Conversion of trained classifiers: phases, report, resuming, bad input."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import tokamix
from tests.command import call
from tests.train.launch import CONVERSION as OPTIONS
from tests.train.loop.test_resume import Stop, stop_at
from tests.train.setup.test_parallel import assert_same_run
from tests.train.tiny import TINY, assert_same_bits, tiny_data
from tokamix.convert import Conversion, Speed
from tokamix.convert.measure import _process_growth_gb
from tokamix.convert.report import find_break_even
from tokamix.convert.run import _load_original
from tokamix.inference import load_model
from tokamix.train.tasks.convert import FineTune
from tokamix.train.tasks.task import Position

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def converted(classifier_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return tokamix.convert(classifier_run, tiny_data(), "sima", tmp_path_factory.mktemp("converted"), **OPTIONS)


def test_a_conversion(classifier_run: Path, converted: Conversion) -> None:
    accuracy = converted.accuracy
    assert list(accuracy) == ["original", "swapped", "calibrated", "transferred", "converted"]
    assert accuracy["original"] == tokamix.evaluate(classifier_run, tiny_data(), device="cpu")["top1"]
    assert accuracy["converted"] == tokamix.evaluate(converted.folder, tiny_data(), device="cpu")["top1"]
    assert converted.epochs == {"transfer": 1, "fine-tuning": 3}
    model, _ = load_model(converted.folder)
    assert not tokamix.count_exp(model, 8)["softmax"]
    assert Conversion.read(converted.folder) == converted
    page = (converted.folder / "conversion.md").read_text()
    assert f"| 3. fine-tuned with distillation | {accuracy['converted']:.2f} % |" in page
    assert [row.size for row in converted.after] == [8, 16]
    assert all(row.milliseconds > 0 for row in converted.before + converted.after)


def test_transfer_trains_the_new_mixers_alone(classifier_run: Path, converted: Conversion) -> None:
    before = load_file(classifier_run / "model.safetensors")
    after = load_file(converted.folder / "transfer" / "last.safetensors")
    assert before.keys() <= after.keys()  # and the marker of a swapped network
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".mixer." in name}
    rows = [json.loads(line) for line in (converted.folder / "transfer" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train_loss"] < 0.3  # it starts from the calibration; uncalibrated mixers start at 1


def test_a_stopped_conversion_resumes(
    classifier_run: Path, converted: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 12)  # in the third epoch of the fine-tuning: the transfer has 5 steps
        with pytest.raises(Stop):
            tokamix.convert(classifier_run, tiny_data(), "sima", tmp_path, **OPTIONS)
    assert not (tmp_path / "conversion.json").exists()
    tokamix.convert(classifier_run, tiny_data(), "sima", tmp_path, **OPTIONS)
    assert_same_bits(tmp_path, converted.folder)


def test_two_processes_are_like_one(converted: Conversion, two_processes: tuple[Path, str]) -> None:
    """In attention transfer, the variance that the errors are divided by is that of the whole batch."""
    folder = two_processes[0] / "conversion"
    for part in (Path("transfer"), Path()):
        assert_same_run(converted.folder / part, folder / part)
    assert Conversion.read(folder).accuracy == converted.accuracy


def test_progressive_conversion_starts_as_the_original(classifier_run: Path) -> None:
    original, _ = load_model(classifier_run)
    student = copy.deepcopy(original)
    names = tokamix.swap_mixer(student, "sima").replaced
    hosts = {name: original.get_submodule(name) for name in names}
    recipe = TINY.replace(teacher="self", distillation="soft", label_smoothing=0.0)
    task = FineTune(recipe, tiny_data(), original, hosts, progressive=0.5)
    task.prepare(student, None)
    images = torch.randn(4, 3, 8, 8)
    task.progress = 0.0
    torch.testing.assert_close(student(images), original(images))
    with torch.no_grad():
        plain = student(images)  # evaluations see the converted network
    for progress, same in ((0.3, False), (0.5, True)):
        task.progress = progress
        assert torch.allclose(student(images), plain, atol=1e-6) == same
        assert not torch.allclose(student(images), original(images), atol=1e-4)
    task.teacher = lambda batch: original(batch)
    task.loss(student, images, torch.arange(4), Position(0, 0, 0, 0.0))[0].backward()
    assert task.progress == 0.0


def test_a_hybrid_keeps_the_worst_block(classifier_run: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"epochs": 1, "sizes": (), "progressive": True}
    hybrid = tokamix.convert(classifier_run, tiny_data(), "sima", tmp_path, keep=1, **options)
    kinds = {name: type(module).__name__ for name, module in load_model(tmp_path)[0].named_modules()}
    assert len(hybrid.kept) == len(hybrid.errors) == 1
    assert kinds[hybrid.kept[0]] == "SoftmaxAttention"
    assert kinds[next(iter(hybrid.errors))] == "SimASelfAttention"
    assert "transferred" not in hybrid.accuracy


def test_bad_input(classifier_run: Path, tmp_path: Path) -> None:
    def error(*args: object) -> str:
        return call("convert", *args, "--output", tmp_path / "out", "--device", "cpu", code=1)

    assert "there is no mixer 'simma'; did you mean sima" in error(classifier_run, "--data", "digits", "--to", "simma")
    assert "the classes of digits are not those of the model" in error(classifier_run, "--data", "digits")
    assert "--sizes is '8,x'" in error(classifier_run, "--data", "digits", "--sizes", "8,x")
    arguments: dict[str, Any] = {**OPTIONS, "output": tmp_path / "out"}
    with pytest.raises(ValueError, match="80 training images do not fill one batch of 81; use a smaller one"):
        tokamix.convert(classifier_run, tiny_data(), overrides={"batch_size": 81}, **arguments)
    with pytest.raises(ValueError, match="keep is 2, but must be from 0 to 1: there are 2 attentions"):
        tokamix.convert(classifier_run, tiny_data(), keep=2, **arguments)
    with pytest.raises(ValueError, match="transfer_epochs is 4, but must be from 0 to 3"):
        tokamix.convert(classifier_run, tiny_data(), transfer_epochs=4, **arguments)
    with pytest.raises(ValueError, match=r"sizes is \('8',\), but must be image sizes in pixels"):
        tokamix.convert(classifier_run, tiny_data(), **{**arguments, "sizes": ("8",)})
    with pytest.raises(ValueError, match="there is no model 'nobody'"):
        tokamix.convert(classifier_run, tiny_data(), teacher="nobody", **arguments)
    with pytest.raises(ValueError, match="keep names 'blocks', but the attentions are"):
        tokamix.convert(classifier_run, tiny_data(), keep="blocks", **arguments)
    tiny = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=2, depth=1, num_classes=4)
    assert _load_original(tiny)[1].image_size == 8, "not that of pretrained_cfg"
    with pytest.raises(ValueError, match=r"does not take images of 8x8; give the image_size.*--image-size 224"):
        tokamix.convert(timm.create_model("pvt_v2_b0", num_classes=4), tiny_data(), recipe=TINY, **arguments)
    model = tokamix.create_model("columnar_tiny_pooling", num_classes=4, **TINY.model_kwargs, img_size=8)
    with pytest.raises(ValueError, match="no attention that swap_mixer can replace"):
        tokamix.convert(model, tiny_data(), recipe=TINY, **arguments)
    with pytest.raises(ValueError, match="tiny does not have the classes of the model in the same order"):
        tokamix.convert(classifier_run, tiny_data(classes=3), **arguments)
    assert not (tmp_path / "out").exists()


def test_image_size_of_another_host(tmp_path: Path) -> None:
    """A ViT of 16 px, converted with images of 8 px: its positions are resized, and Linformer has the grid of 8 px."""
    sizes = {"img_size": 16, "patch_size": 2, "depth": 1, "embed_dim": 24, "num_heads": 3}
    model = tokamix.create_model("vit_tiny_patch16_224", num_classes=4, **sizes)
    options = OPTIONS | {"epochs": 1, "sizes": ()}
    result = tokamix.convert(model, tiny_data(), "linformer", tmp_path, recipe=TINY, **options)
    network, config = load_model(tmp_path)
    assert config.image_size == 8
    assert network.pos_embed.shape[1] == 17
    assert network.blocks[0].attn.mixer.mixer.projection.shape[2:] == (4, 4)
    assert model.pos_embed.shape[1] == 65, "the given model is not changed"
    assert result.accuracy["converted"] == tokamix.evaluate(tmp_path, tiny_data(), device="cpu")["top1"]


def test_break_even() -> None:
    def speeds(*times: float | None) -> list[Speed]:
        return [Speed(224 * 2**i, ms, problem="" if ms else "does not fit") for i, ms in enumerate(times)]

    assert find_break_even(speeds(1, 4, 16), speeds(2, 4.5, 9)) == pytest.approx(448 * 2**0.17, abs=2)
    assert find_break_even(speeds(1, 4, 16), speeds(0.5, 3, 9)) == 224
    assert find_break_even(speeds(1, 4, 16), speeds(2, 5, 17)) is None
    assert find_break_even(speeds(1, 4, None), speeds(2, 5, 17)) == 896  # the original does not fit
    assert find_break_even(speeds(1, None), speeds(2, None)) is None


def test_memory_on_a_cpu() -> None:
    """The C library keeps freed memory: earlier calls must not hide what a call needs."""

    def run() -> float:
        return sum(float(part.sum()) for part in [torch.ones(250_000 * 10) for _ in range(4)])

    for _ in range(5):
        run()
        assert 0.03 < _process_growth_gb(run) < 0.06, "four tensors of 10 MB"
