"""A run's folder gives back the network that was trained, however it was made."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import tokamix
from tests.train.tiny import run, tiny_data
from tokamix.files import write_json
from tokamix.inference import load_model, read_config
from tokamix.train.loop import engine
from tokamix.train.output import reload
from tokamix.train.output.reload import ReloadError

SMALL = {"img_size": 8, "patch_size": 4, "num_classes": 4}
VIT = {**SMALL, "embed_dim": 16, "depth": 2, "num_heads": 2}


def vit() -> nn.Module:
    return tokamix.create_model("vit_tiny_patch16_224", **VIT)


def swapped(**options) -> nn.Module:
    model = vit()
    tokamix.swap_mixer(model, "sima", **options)
    return model


def broadcast(model: nn.Module, **options) -> nn.Module:
    tokamix.insert_context_broadcast(model, **options)
    return model


def removed() -> nn.Module:
    model = tokamix.create_model("deit_tiny_cb", **VIT)
    tokamix.remove_context_broadcast(model)
    return model


def without_record(model: nn.Module) -> nn.Module:
    """A module as if it were of a library that records nothing."""
    model.__dict__.pop("tokamix_construction", None)
    return model


CHANGED = {
    "swap": swapped,
    "swap_options": lambda: swapped(num_heads=1, relu=True),
    "cb": lambda: broadcast(vit()),
    "cbs": lambda: broadcast(vit(), kind="cbs", position="mid", scale_init=0.5),
    "both": lambda: broadcast(swapped()),
    "removed": removed,
}
PLAIN = {
    "by_name": vit,
    "of_timm": lambda: timm.create_model("test_resnet", num_classes=4),
    "of_timm_with_arguments": lambda: timm.create_model("deit_tiny_cb", **VIT),
    "sima": lambda: tokamix.create_model("deit_tiny_cb", **VIT),
    "depth": lambda: tokamix.create_body("columnar_tiny", "sima", **SMALL, dim=16, depth=1, num_heads=2),
    "body_cb": lambda: tokamix.create_body(
        "columnar_tiny", "softmax", **SMALL, dim=16, depth=2, num_heads=2, context_broadcast="cb"
    ),
    "mixer_kwargs": lambda: tokamix.create_body(
        "columnar_tiny", "super_token", **SMALL, dim=16, depth=1, num_heads=2, mixer_kwargs={"n_iter": 2}
    ),
    "inserted_and_removed": lambda: (m := broadcast(vit()), tokamix.remove_context_broadcast(m))[0],
    "other_classes": lambda: (m := vit(), m.reset_classifier(4))[0],
}
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def train_module(folder: Path, model: nn.Module, **settings) -> tuple[nn.Module, torch.Tensor]:
    """Train a module; returns it with the saved weights, and its outputs."""
    size = 32 if isinstance(model, timm.models.ResNet) else 8
    run(folder, network=model, model_kwargs={}, image_size=size, epochs=2, lr=1e-3, **settings)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model, model.eval()(IMAGES)


@pytest.mark.parametrize("name", CHANGED)
def test_changed_networks(tmp_path: Path, name: str) -> None:
    """`load_model` repeats the changes; timm refuses the folder, where it would create the host without them."""
    _, outputs = train_module(tmp_path, CHANGED[name]())
    for source in (tmp_path, tmp_path / "model.safetensors", f"local-dir:{tmp_path}"):
        loaded, config = load_model(source)
        assert torch.equal(loaded(IMAGES), outputs)
    assert config.class_names == tiny_data().classes
    with pytest.raises(RuntimeError, match=r"Unknown model .* which tokamix\.inference\.load_model loads"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    accuracy = tokamix.evaluate(tmp_path, tiny_data(), device="cpu").metrics["top1"]
    assert accuracy == pytest.approx(max(row["top1"] for row in epochs(tmp_path)))


@pytest.mark.parametrize("name", PLAIN)
def test_networks_that_timm_creates(tmp_path: Path, name: str) -> None:
    _, outputs = train_module(tmp_path, PLAIN[name]())
    assert torch.equal(load_model(tmp_path)[0](IMAGES), outputs)
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(IMAGES), outputs)
    assert "construction" not in read_config(tmp_path)


def test_fine_tuning_repeats_the_changes(tmp_path: Path) -> None:
    model, _ = train_module(tmp_path / "a", CHANGED["swap_options"]())
    tuning = {"epochs": 1, "warmup_epochs": 0, "model": None, "model_kwargs": {}, "drop_path": 0.2}
    result = run(tmp_path / "b", data=tiny_data(classes=3), checkpoint=tmp_path / "a", **tuning)
    loaded = result.load()
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    assert loaded.num_classes == 3


def test_resuming_needs_the_same_network(tmp_path: Path) -> None:
    train_module(tmp_path, swapped())
    with pytest.raises(ValueError, match="holds a run with different settings: construction was"):
        train_module(tmp_path, swapped(num_heads=1))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def edited() -> nn.Module:
    model = timm.create_model("test_resnet", num_classes=4)
    model.act1 = nn.Tanh()
    return model


@pytest.mark.parametrize("create", [Own, edited, lambda: without_record(swapped()), lambda: timm.create_model(
    "vit_tiny_patch16_224", **VIT)], ids=["own", "edited", "unrecorded", "timm_arguments"])  # fmt: skip
def test_modules_of_unknown_construction(tmp_path: Path, create, caplog: pytest.LogCaptureFixture) -> None:
    _, outputs = train_module(tmp_path, create())
    assert "config.json cannot describe this" in caplog.text
    assert read_config(tmp_path)["construction"] == "unknown"
    with pytest.raises(ValueError, match=r"create the module yourself and load its weights with tokamix\.load_chec"):
        load_model(tmp_path)
    with pytest.raises(RuntimeError, match="a module of unknown construction"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    again = create()
    tokamix.load_checkpoint(again, tmp_path)
    assert torch.equal(again.eval()(IMAGES), outputs)
    with pytest.raises(ValueError, match="a module of unknown construction; create the module yourself and give it"):
        run(tmp_path / "b", checkpoint=tmp_path, model=None)


def test_the_folder_is_checked_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that loads as a different network, or not at all, ends the run with an error."""
    real = engine.Engine.write_report

    def change_config(change) -> None:
        def write_report(self: engine.Engine) -> None:
            real(self)
            path = self.folder.path / "config.json"
            write_json(path, change(json.loads(path.read_text())))

        monkeypatch.setattr(engine.Engine, "write_report", write_report)

    change_config(lambda values: values | {"model_args": {**values["model_args"], "num_heads": 4}})
    with pytest.raises(ReloadError, match=r"does not load as the network that was trained \(outputs differ by"):
        run(tmp_path / "heads")
    change_config(lambda values: values | {"model_args": {**values["model_args"], "depth": 1}})
    with pytest.raises(
        ReloadError, match=r"does not load as the network that was trained \(.*its weights are complete"
    ):
        run(tmp_path / "depth")
    change_config(lambda values: values | {"model_args": {**values["model_args"], "context_broadcast": "cb"}})
    with pytest.raises(ReloadError, match="is None in one of them, ContextBroadcast in the other"):
        run(tmp_path / "cb")


def test_every_run_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the best weights, and the module keeps its last ones."""
    checked = []
    real = reload.compare_models
    monkeypatch.setattr(reload, "compare_models", lambda *args: checked.append(real(*args)) or checked[-1])
    for _ in range(2):  # the second call finds a finished run
        run(tmp_path, epochs=2, ema=0.9)
    assert checked == [""]


def epochs(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "epoch"]
