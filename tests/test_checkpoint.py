"""Loading checkpoints: nesting, prefixes, broken and unsafe files, different sizes; authors' names: tests/models."""

import argparse
import logging
import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from timm.utils import CheckpointSaver
from torch import nn

import tokamix
from tokamix.checkpoint import read_checkpoint, unwrap
from tokamix.inference import load_model


def small(**kwargs: object) -> nn.Module:
    return tokamix.create_model("stvit_small", depths=(1, 1, 1, 1), num_classes=5, **kwargs)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return small().state_dict()


def assert_loaded(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_nested_state_dicts_and_prefixes(weights: dict, key: str | None, prefix: str) -> None:
    named = {prefix + name: value for name, value in weights.items()}
    model = small()
    report = tokamix.load_checkpoint(model, {key: named, "epoch": 3} if key else named)
    assert_loaded(model, weights)
    assert report.loaded == len(weights)
    assert not report.fresh


def test_averaged_weights_come_first(weights: dict) -> None:
    both = {"model": {n: torch.zeros_like(v) for n, v in weights.items()}, "model_ema": weights}
    model = small()
    tokamix.load_checkpoint(model, both)
    assert_loaded(model, weights)
    tokamix.load_checkpoint(model, both, use_ema=False)
    assert not any(v.any() for v in model.state_dict().values())


def lightning(prefix: str) -> Callable[[dict], dict]:
    """A Lightning checkpoint: the module's entries under the model's attribute, and those of a loss."""
    return lambda weights: {
        "state_dict": {**{prefix + n: v for n, v in weights.items()}, "criterion.weight": torch.ones(5)},
        "epoch": 3,
        "loops": {},
    }


@pytest.mark.parametrize(
    "wrap",
    [
        *map(lightning, ("model.", "backbone.", "timm_model.", "model._orig_mod.", "model.backbone.")),
        lambda weights: {"n_averaged": torch.tensor(4), **{f"module.{n}": v for n, v in weights.items()}},
        lambda weights: {"net": weights, "acc": 70.1},
        lambda weights: {"student": {n: v + 1 for n, v in weights.items()}, "teacher": weights},
        lambda weights: {"teacher": {f"module.backbone.{n}": v for n, v in weights.items()}},
        lambda weights: {n: v for n, v in weights.items() if not n.endswith("num_batches_tracked")},
    ],
)
def test_other_libraries(weights: dict, wrap: Callable[[dict], dict]) -> None:
    model = small()
    report = tokamix.load_checkpoint(model, wrap(weights))
    assert_loaded(model, weights)
    assert not report.fresh


def test_a_separate_classifier_keeps_its_name(weights: dict) -> None:
    named = {n if n.startswith("head.") else f"backbone.{n}": v for n, v in weights.items()}
    model = small()
    assert not tokamix.load_checkpoint(model, named).fresh
    assert_loaded(model, weights)


def test_prefixes_stay_if_the_names_do_not_fit(weights: dict) -> None:
    with pytest.raises(ValueError, match=r"it begins with model.conv1.weight"):
        tokamix.load_checkpoint(small(), {"model.conv1.weight": torch.zeros(1)})


def test_timms_training_checkpoints(tmp_path: Path) -> None:
    """They hold a numpy scalar, the best metric, and the command line."""
    model = timm.create_model("test_resnet", num_classes=5)
    arguments = argparse.Namespace(model="test_resnet", lr=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    folder = str(tmp_path)
    saver = CheckpointSaver(model, optimizer, arguments, checkpoint_dir=folder, recovery_dir=folder)
    saver.save_checkpoint(0, metric=np.float64(71.3))
    best = tmp_path / "model_best.pth.tar"
    assert read_checkpoint(best)["metric"] == 71.3
    copy = timm.create_model("test_resnet", num_classes=5)
    tokamix.load_checkpoint(copy, best)
    assert_loaded(copy, model.state_dict())
    loaded, _ = load_model(best, model="test_resnet", num_classes=5)
    assert_loaded(loaded, model.state_dict())
    with pytest.raises(ValueError, match=r"it was saved by test_resnet: name the model of the file with --model") as e:
        load_model(best, model="test_vit", num_classes=5)
    assert "strict=False" not in str(e.value)


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(3), np.bool_(True)])
def test_numpy_scalars(value: np.generic, tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "best": value}, tmp_path / "a.pth")
    assert read_checkpoint(tmp_path / "a.pth")["best"] == value


def test_hub_repositories(weights: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hold pytorch_model.bin only; without a network the answer comes at once."""

    def download(repository: str, file: str, revision: str | None) -> str:
        if file not in files:
            raise EntryNotFoundError(f"404 {repository} {file}")
        return str(tmp_path / file)

    torch.save(weights, tmp_path / "pytorch_model.bin")
    with monkeypatch.context() as patch:
        patch.setattr("tokamix.checkpoint.hf_hub_download", download)
        files = ["pytorch_model.bin"]
        model = small()
        tokamix.load_checkpoint(model, "hf-hub:user/name")
        assert_loaded(model, weights)
        files = []
        with pytest.raises(FileNotFoundError, match=r"hf-hub:user/name has no weights: it needs model.safetensors or"):
            read_checkpoint("hf-hub:user/name")

    def unresolved(*args: object) -> None:
        raise OSError("Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("socket.getaddrinfo", unresolved)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for load in (
        lambda: read_checkpoint("hf-hub:user/name"),
        lambda: tokamix.create_model("hf-hub:user/name", pretrained=True),
        lambda: tokamix.create_model("test_vit.r160_in1k", pretrained=True),
    ):
        start = time.monotonic()
        with pytest.raises(OSError, match=r"cannot be downloaded, there is no connection to https://huggingface.co"):
            load()
        assert time.monotonic() - start < 5
    assert constants.HF_HUB_OFFLINE is False or "HF_HUB_OFFLINE" in os.environ


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_files(weights: dict, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pth":  # as research scripts write it
        torch.save({"model": weights, "args": argparse.Namespace(lr=1e-3), "epoch": 299}, path)
    else:
        save_file(weights, path)
    model = small()
    tokamix.load_checkpoint(model, path)
    assert_loaded(model, weights)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        tokamix.load_checkpoint(model, tmp_path / "other.pth")
    whole = path.read_bytes()
    for cut in (len(whole) // 2, 10, 0):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="truncated or not a checkpoint"):
            tokamix.load_checkpoint(model, path)


def test_folders(weights: dict, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no weights: it needs model.safetensors"):
        read_checkpoint(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    model = small()
    tokamix.load_checkpoint(model, tmp_path)
    assert_loaded(model, weights)


class Evil:
    def __reduce__(self):
        return (Path("pwned").write_text, ("code ran",))


def test_code_in_a_file_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, save in (
        (tmp_path / "a.pth", torch.save),
        (tmp_path / "b.pth", lambda o, p: p.write_bytes(pickle.dumps(o))),
    ):
        save({"model": Evil()}, path)
        with pytest.raises(
            ValueError, match=r"contains getattr besides weights|not a checkpoint, or has more than weights"
        ) as error:
            read_checkpoint(path)
        assert not re.search(r"weights_only|add_safe_globals|\x1b", str(error.value)), "suggests to run the code"
    assert not (tmp_path / "pwned").exists()


def test_different_numbers_of_classes_and_channels(weights: dict, caplog: pytest.LogCaptureFixture) -> None:
    model = tokamix.create_model("stvit_small", depths=(1, 1, 1, 1), num_classes=3, in_chans=1)
    with caplog.at_level(logging.WARNING, logger="tokamix"):
        report = tokamix.load_checkpoint(model, weights)
    assert report.fresh == ["head.weight", "head.bias"]
    assert "head.weight keeps its initial values" in caplog.text
    (first_conv,) = report.adapted
    torch.testing.assert_close(model.state_dict()[first_conv], weights[first_conv].sum(1, keepdim=True))
    headless = tokamix.create_model("stvit_small", depths=(1, 1, 1, 1), num_classes=0)
    assert not tokamix.load_checkpoint(headless, weights).fresh


def test_errors_name_entries_with_both_shapes(weights: dict) -> None:
    model = small()
    name = next(n for n in weights if n.endswith("qkv.weight"))
    reshaped = {**weights, name: weights[name][:1], "extra.weight": torch.zeros(2)}
    del reshaped["norm.1.weight" if "norm.1.weight" in weights else next(n for n in weights if n.startswith("norm."))]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"does not fit STViT in 3 entries") as error:
        tokamix.load_checkpoint(model, reshaped)
    assert (
        f"{name} is {tuple(weights[name][:1].shape)} in the checkpoint, {tuple(weights[name].shape)} in the model"
        in str(error.value)
    )
    assert "is missing in the checkpoint" in str(error.value)
    assert "extra.weight (2,) is not in the model" in str(error.value)
    assert_loaded(model, before)
    report = tokamix.load_checkpoint(model, reshaped, strict=False)
    assert name in report.fresh


def test_foreign_checkpoints() -> None:
    with pytest.raises(ValueError, match=r"does not fit STViT: none of its 1 entries matches \(it begins with conv1"):
        tokamix.load_checkpoint(small(), {"conv1.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="has no tensors, only epoch, args"):
        unwrap({"epoch": 1, "args": None})


@pytest.mark.parametrize("name", ["amixer_deit_small", "columnar_tiny_weight_mixing", "localvit_tiny", "deit_tiny_cb"])
def test_the_report_names_resized_entries(name: str) -> None:
    saved = tokamix.create_model(name, img_size=64, depth=1).state_dict()
    model = tokamix.create_model(name, img_size=96, depth=1)
    report = tokamix.load_checkpoint(model, saved)
    different = {key for key, value in model.state_dict().items() if value.shape != saved[key].shape}
    assert set(report.adapted) == different
    assert different
    assert tokamix.load_checkpoint(model, model.state_dict()).adapted == []
