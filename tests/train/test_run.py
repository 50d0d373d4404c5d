"""Runs from start to end: output, starting weights, errors."""

import csv
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from timm.layers import DropPath

import tokamix
from tests.train.tiny import TINY, run, tiny_data
from tokamix.compile import compile_blocks
from tokamix.data.images.loader import create_train_loader
from tokamix.files import write_tensors
from tokamix.train import train
from tokamix.train.loop.engine import Engine
from tokamix.train.loop.optim import create_optimizer
from tokamix.train.loop.state import whole_weights
from tokamix.train.output.curves import draw_curves
from tokamix.train.setup.accelerator import create_accelerator, release
from tokamix.train.tasks.classify import Classify


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    result = run(folder, epochs=12, ema=0.9, log_every=2)
    assert result.top1 > 90
    return folder


def test_the_folder(finished: Path) -> None:
    names = "README.md config.json curves.png environment.json last.safetensors metrics.csv metrics.jsonl"
    names += " model.safetensors recipe.yaml state tensorboard"
    names += " confusion_matrix.csv confusion_matrix.png mistakes.png per_class.csv"
    assert sorted(p.name for p in finished.iterdir()) == sorted(names.split())
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["event"] == "epoch"]
    assert [row["epoch"] for row in epochs] == list(range(1, 13))
    assert {"loss", "lr", "images_per_second", "update"} <= set(rows[0])
    table = list(csv.DictReader((finished / "metrics.csv").open()))
    assert [float(row["ema_top1"]) for row in table] == [row["ema_top1"] for row in epochs]
    assert [int(row["epoch"]) for row in table] == list(range(1, 13))
    with (finished / "per_class.csv").open() as file:
        correct = sum(int(row["correct"]) for row in csv.DictReader(file))
    best = max(max(row["top1"], row["ema_top1"]) for row in epochs)
    assert 100 * correct / 37 == pytest.approx(best)  # of the best weights, not the last
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["torch"] == torch.__version__.partition("+")[0]
    card = (finished / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "timm"
    assert "columnar_tiny_softmax" in card


def test_tensorboard_reads_it(finished: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = reader.EventAccumulator(str(finished / "tensorboard"))
    board.Reload()
    assert {"train/loss", "train/lr", "epoch/top1", "epoch/ema_loss"} <= set(board.Tags()["scalars"])
    assert len(board.Scalars("epoch/top1")) == 12


def test_curves(tmp_path: Path) -> None:
    row = {"train_loss": 2.0, "loss": 1.5, "top1": 40.0, "ema_top1": 41.0}
    draw_curves([{**row, "epoch": i} for i in range(3)], tmp_path / "c.png", {"top1": "top-1"})
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_timm_loads_it(finished: Path) -> None:
    model = timm.create_model(f"local-dir:{finished}", pretrained=True)
    saved = load_file(finished / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert list(model.pretrained_cfg["input_size"]) == [3, 8, 8]
    assert model.num_classes == 4
    features = timm.create_model(f"local-dir:{finished}", pretrained=True, num_classes=0)
    assert features(torch.zeros(1, 3, 8, 8)).shape == (1, 16)


@pytest.mark.parametrize("finetune", [{"classes": 3}, {"channels": 1}, {"image_size": 16}])
def test_fine_tuning(finished: Path, tmp_path: Path, finetune: dict) -> None:
    """From a run to different classes, channels or image sizes: the body's weights are kept."""
    data = tiny_data(classes=finetune.get("classes", 4), channels=finetune.get("channels", 3))
    settings = {"model_kwargs": {"in_chans": 1}} if "channels" in finetune else {"model_kwargs": {}}
    settings |= {"image_size": finetune.get("image_size", 8)}
    first: dict[str, torch.Tensor] = {}
    real = Engine.fit

    def fit(self: Engine, *args) -> None:
        first.update({name: t.clone() for name, t in self.model.state_dict().items()})
        real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "fit", fit)
        result = run(tmp_path / "a", data=data, model=None, checkpoint=finished, finetune=True, epochs=2, **settings)
    old = load_file(finished / "model.safetensors")
    fresh = {name for name, t in first.items() if name not in old or not torch.equal(t, old[name])}
    if "classes" in finetune:
        assert fresh == {"head.weight", "head.bias"}
    elif "channels" in finetune:
        assert fresh == {"stem.proj.weight"}
    else:
        assert all("pos" in name or "table" in name for name in fresh)
    again = result.load()
    assert again(torch.zeros(1, data.train.images.shape[1], settings["image_size"], settings["image_size"])).shape == (
        1,
        len(data.classes),
    )
    assert result.top1 > 60 or "classes" not in finetune


def test_finetune_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="starts from trained weights; give them with --checkpoint, or use --pretrained"
    ):
        run(tmp_path / "a", finetune=True)


@pytest.mark.parametrize(
    "name", ["test_vit", "test_resnet", "test_efficientnet", "amixer_tiny", "xcit_nano_12_p16_sima"]
)
def test_config_recreates_any_model(tmp_path: Path, name: str) -> None:
    """Models with and without a fixed image size: timm creates them again as they were."""
    task = Classify(TINY.replace(model_kwargs={"in_chans": 1}, image_size=64), tiny_data(classes=3, channels=1))
    model = task.create_model(name, None, pretrained=False)
    (tmp_path / "config.json").write_text(json.dumps(task.config()))
    write_tensors(tmp_path / "model.safetensors", whole_weights(model))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    image = torch.randn(1, 1, 64, 64)
    assert torch.equal(again(image), model.eval()(image))
    assert ("img_size" in task.construction["arguments"]) == (name in ("test_vit", "amixer_tiny"))


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    started = SimpleNamespace(log=lambda row: calls.append(("log", row)), finish=lambda: calls.append(("finish",)))
    client = SimpleNamespace(init=lambda **kw: calls.append(("init", kw)) or started)
    monkeypatch.setitem(sys.modules, "wandb", client)
    run(tmp_path / "a", epochs=2, wandb="project")
    assert calls[0][1]["project"] == "project"
    assert calls[0][1]["config"]["lr"] == TINY.lr
    assert [row["epoch/top1"] for kind, row in calls[1:-1] if "epoch/top1" in row]
    assert calls[-1] == ("finish",)


def test_own_module(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=4)
    result = run(tmp_path / "a", network=model, model_kwargs={}, image_size=16, epochs=2)
    loaded = result.load()
    saved = load_file(tmp_path / "a" / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())


def test_precision_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A recipe's precision is for GPUs; bf16 on a CPU must be requested, and warns once."""
    run(tmp_path / "a", precision="bf16", epochs=2)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["precision"] == "fp32"
    assert not caplog.records
    accelerator = create_accelerator(TINY, "cpu", precision="bf16")
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "bf16 on a CPU can give NaN with convolutions in PyTorch 2.15"
    ]
    assert create_accelerator(TINY, "cpu", precision="fp32").mixed_precision == "no"
    model = torch.nn.Linear(2, 2)
    accelerator = create_accelerator(TINY, "cpu", precision="bf16")
    accelerator.prepare(model)
    assert model(torch.zeros(1, 2)).dtype == torch.float32  # Accelerate converts outputs back
    assert "forward" in model.__dict__
    release(model)
    assert "forward" not in model.__dict__


def test_foreign_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"somebody's")
    for resume in (True, False):
        with pytest.raises(ValueError, match="holds a model that is not of a tokamix run; use another --output"):
            run(tmp_path, resume=resume)
    assert (tmp_path / "model.safetensors").read_bytes() == b"somebody's"


def test_weights_without_a_state_are_not_deleted(tmp_path: Path) -> None:
    """Somebody removed the state of a run to save space; the same call would train again from the start."""
    settings = {"epochs": 1, "warmup_epochs": 0}
    run(tmp_path, **settings)
    weights = (tmp_path / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(ValueError, match=r"holds the weights of a run whose state/ was removed.*--no-resume"):
        run(tmp_path, **settings)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert run(tmp_path, resume=False, **settings).best


def test_unused_images_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", data=tiny_data(train=30), epochs=2, quiet=False)
    line = "each epoch leaves out 14 of 30 images, different ones each time, which do not fill a batch of 16;"
    assert f"{line} --batch-size 15 leaves out none" in capsys.readouterr().out
    run(tmp_path / "b", epochs=2, quiet=False)
    assert "leaves out" not in capsys.readouterr().out


def test_five_lines(tmp_path: Path) -> None:
    result = train("columnar_tiny_sima", tiny_data(), "small", tmp_path / "a", quiet=True, device="cpu", overrides={
        "epochs": 2, "warmup_epochs": 0, "batch_size": 16, "image_size": 16, "precision": "fp32", "compile": False,
        "model_kwargs": {"patch_size": 4, "dim": 16, "depth": 1, "num_heads": 2},
    })  # fmt: skip
    assert len(result.epochs) == 2
    assert result.load().num_classes == 4


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="names no model; give one with --model"):
        train(None, tiny_data(), "small", tmp_path, device="cpu", overrides={"model": None})
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nowhere: no run folder and no file"):
        train(None, tiny_data(), None, tmp_path, device="cpu", checkpoint=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="80 training images do not fill one batch of 128"):
        run(tmp_path / "a", batch_size=128)
    with pytest.raises(ValueError, match="vgg11 has no argument 'drop_path_rate'; change the recipe"):
        run(tmp_path / "a", network="vgg11", model_kwargs={}, drop_path=0.1)
    with pytest.raises(ValueError, match="the model has 7 classes, but the data has 4"):
        run(tmp_path / "a", network=timm.create_model("test_resnet", num_classes=7))
    for outputs, text in ((7, r"the shape \(16, 7\)"), (1, r"the shape \(16, 1\)")):
        own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, outputs))
        with pytest.raises(ValueError, match=rf"output has {text}, but must be \(batch, 4\)"):
            run(tmp_path / "a", network=own, model_kwargs={})
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(7, 4))
    with pytest.raises(ValueError, match=r"the model cannot process images of shape \(2, 3, 8, 8\) \(.*\); train with"):
        run(tmp_path / "a", network=own, model_kwargs={})
    with pytest.raises(ValueError, match="overrides need the name of a recipe"):
        run(tmp_path / "a", overrides=["lr=1"])
    with pytest.raises(ValueError, match="device is 'tpu', but must be cpu, cuda or mps"):
        run(tmp_path / "a", device="tpu")
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        train(None, tiny_data(), "digits", tmp_path / "a", device="cpu", overrides={"precision": "fp16"})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="Weights & Biases is not installed"):
        run(tmp_path / "a", wandb="project")


def test_the_engine_is_a_plain_loop(tmp_path: Path) -> None:
    """Forward, backward, step: bitwise equal to ten lines of PyTorch."""
    recipe = TINY.replace(schedule="constant", warmup_epochs=0, epochs=2, crop_pct=1.0)
    train(None, tiny_data(), recipe, tmp_path / "a", quiet=True, device="cpu")
    torch.manual_seed(recipe.seed)
    model = timm.create_model(recipe.model, num_classes=4, img_size=8, **recipe.model_kwargs)
    optimizer = create_optimizer(model, recipe, torch.device("cpu"))
    loader = create_train_loader(tiny_data().train, recipe, batch_size=16)
    for epoch in range(2):
        for images, labels in loader.epoch(epoch):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    saved = load_file(tmp_path / "a" / "last.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_channels_last_and_checkpointing_change_only_rounding(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", epochs=2)
    for name, settings in {"order": {"channels_last": True}, "again": {"grad_checkpointing": True}}.items():
        other = run(tmp_path / name, epochs=2, **settings)
        assert [row["train_loss"] for row in other.epochs] == pytest.approx(
            [row["train_loss"] for row in plain.epochs], rel=1e-4
        )


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph of all blocks for training and one for evaluation, for all drop rates, which change during the run,
    and for a smaller last batch; the losses without drop path are those without compilation."""
    deep = {"ema": 0.9, "epochs": 3, "model_kwargs": {**TINY.model_kwargs, "depth": 3}}
    plain = run(tmp_path / "plain", **deep)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: real(self, backend=count, **kw))
    torch._dynamo.reset()
    compiled = run(tmp_path / "compiled", **deep, compile=True)
    assert [row["train_loss"] for row in compiled.epochs] == pytest.approx(
        [row["train_loss"] for row in plain.epochs], rel=1e-4
    )
    assert len(graphs) == 2
    run(tmp_path / "dropped", **deep, compile=True, drop_path=0.1, drop_path_later={1: 0.3, 2: 0.2})
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16", "clip_grad": 1.0}], ids=str)
def test_cuda_graphs_change_only_rounding(tmp_path: Path, settings: dict) -> None:
    runs = [run(tmp_path / str(on), epochs=6, ema=0.9, device="cuda", compile=on, **settings) for on in (False, True)]
    plain, compiled = ([row["train_loss"] for row in result.epochs] for result in runs)
    assert compiled == pytest.approx(plain, rel=2e-2 if "precision" in settings else 1e-3)
    assert compiled[-1] < 0.7 * compiled[0]


@pytest.mark.parametrize(
    ("name", "kinds", "options"),
    [
        ("atmnet_xtiny", 4, {"depths": (2, 1, 3, 1), "dims": (16, 32, 48, 64)}),
        ("stvit_small", 2, {"depths": (2, 1, 3, 1), "dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}),
        ("xcit_nano_12_p16_sima", 3, {"depth": 3, "embed_dim": 32, "num_heads": 2}),
        ("deit_tiny_cb", 1, {"depth": 3, "embed_dim": 48, "num_heads": 3, "img_size": 64}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiled_blocks(name: str, kinds: int, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whole graph per kind of block, in training and in evaluation, with the same outputs and gradients."""
    model = tokamix.create_model(name, num_classes=5, **options)
    images, graphs = torch.randn(2, 3, 64, 64), []

    def outcome() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        model.eval()(images).square().sum().backward()
        with torch.no_grad():
            return model(images), [p.grad for p in model.parameters() if p.grad is not None]

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    expected = outcome()
    real = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, dynamic, mode: real(self, backend=count, dynamic=dynamic, fullgraph=True),
    )
    torch._dynamo.reset()
    compile_blocks(model, graphs=False)
    torch.testing.assert_close(outcome(), expected, rtol=1e-3, atol=1e-5)
    assert len(graphs) == 2 * kinds
    torch._dynamo.reset()


def test_stochastic_depth_of_compiled_blocks() -> None:
    """It drops the given fraction of images and keeps the mean."""
    model = tokamix.create_model("columnar_tiny_softmax", img_size=32, depth=3, drop_path_rate=0.5)
    names = list(model.state_dict())
    compile_blocks(model, graphs=False)
    assert list(model.state_dict()) == names
    (layer,) = {module for module in model.modules() if isinstance(module, DropPath) and module.drop_prob == 0.5}
    x = torch.ones(20_000, 2, 3)
    kept = layer(x)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert kept[:, 0, 0].mean() == pytest.approx(1, abs=0.03)
    layer.drop_prob = 0.25
    assert (layer(x)[:, 0, 0] == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(layer.eval()(x), x)
