"""Loading checkpoints: nesting, prefixes, broken and unsafe files, different sizes; authors' names: tests/models."""

import argparse
import logging
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tokamix
from tokamix.checkpoint import read_checkpoint, unwrap


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
