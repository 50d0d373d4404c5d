"""Changed networks through the loaders of timm, Hugging Face and PyTorch: they come back changed, or are refused."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import tokamix
from tests.swap.hosts import VIT, create, images
from tokamix.inference import load_model
from tokamix.swap import insert_context_broadcast, load_hf, remove_context_broadcast, swap_mixer

NAME = "vit_tiny_patch16_224"


def swap(model: nn.Module) -> None:
    swap_mixer(model, "linformer", mixer_kwargs={"projected": 4})


def broadcast(model: nn.Module) -> None:
    insert_context_broadcast(model, "cb")


@pytest.mark.parametrize("change", [swap_mixer, swap, broadcast])
@pytest.mark.parametrize("safe", [True, False])
def test_folders_of_timm(tmp_path: Path, change, safe: bool) -> None:
    model = tokamix.create_model(NAME, num_classes=5, **VIT).eval()
    change(model)
    expected = model(images())
    save_for_hf(model, tmp_path, model_args=VIT, safe_serialization=safe)
    for options in ({}, {"num_classes": 3}, {"num_classes": 0}):  # timm is not strict with other classes
        with pytest.raises(RuntimeError, match=r"changed by tokamix: load it with tokamix\.create_model"):
            timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **options)
    for loaded in (
        tokamix.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(),
        load_model(tmp_path)[0],
        load_model(f"local-dir:{tmp_path}")[0],
    ):
        assert torch.equal(loaded(images() * 0 + 1), model(images() * 0 + 1))
    assert expected.shape == (2, 5)


def test_folders_of_timm_with_another_head(tmp_path: Path) -> None:
    """As in timm: a classifier of other classes is new, the first convolution fits other channels."""
    model = timm.create_model(NAME, num_classes=5, **VIT).eval()
    swap_mixer(model)
    x = images()
    save_for_hf(model, tmp_path, model_args=VIT)
    source = f"local-dir:{tmp_path}"
    for classes in (0, 3):
        loaded = tokamix.create_model(source, pretrained=True, num_classes=classes).eval()
        assert torch.equal(loaded.forward_features(x), model.forward_features(x))
        assert loaded.num_classes == classes
    assert tokamix.create_model(source, pretrained=True, in_chans=1)(x[:, :1]).shape == (2, 5)
    again, config = tmp_path / "again", load_model(tmp_path)[1]
    save_for_hf(loaded, again)
    assert torch.equal(tokamix.create_model(f"local-dir:{again}", pretrained=True).eval()(x), loaded(x))
    assert config.num_classes == 5
    with pytest.raises(ValueError, match="call its forward_intermediates"):
        tokamix.create_model(source, pretrained=True, features_only=True)


def test_folders_of_timm_on_the_hub_and_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = timm.create_model(NAME, num_classes=5, **VIT).eval(), images()
    swap_mixer(model)
    save_for_hf(model, tmp_path, model_args=VIT)
    asked = []

    def download(repo_id: str, filename: str, revision: str | None) -> str:
        asked.append((repo_id, filename, revision))
        return str(tmp_path / filename)

    monkeypatch.setattr("tokamix.models._registry.hf_hub_download", download)
    loaded = tokamix.create_model("hf-hub:user/name@v1", pretrained=True).eval()
    assert asked == [("user/name", name, "v1") for name in ("config.json", "model.safetensors")]
    assert torch.equal(loaded(x), model(x))
    fresh = tokamix.create_model(f"local-dir:{tmp_path}")
    assert type(fresh.blocks[0].attn).__name__ == "SwappedAttention"
    assert not torch.equal(fresh.patch_embed.proj.weight, model.patch_embed.proj.weight)


def test_state_dicts() -> None:
    """The unchanged host refuses them, the same change takes them, and so does a changed network the host's."""
    host, model, other = create(NAME), create(NAME), create(NAME)
    swap_mixer(model)
    swap_mixer(other, num_heads=1)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"tokamix_changes\""):
        host.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"changed by swap_mixer\(to='sima'\), this one was changed by swap_mixer"):
        other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"changed by swap_mixer\(to='sima'\), the model was changed by nothing"):
        tokamix.load_checkpoint(host, model.state_dict())
    with pytest.raises(ValueError, match="the model was changed by swap_mixer"):
        tokamix.load_checkpoint(other, model.state_dict())
    for load in (lambda m, s: m.load_state_dict(s), tokamix.load_checkpoint):
        again = create(NAME)
        swap_mixer(again)
        load(again, model.state_dict())
        assert torch.equal(again.eval()(images(1) * 0 + 1), model.eval()(images(1) * 0 + 1))
        load(again, host.state_dict())
        assert torch.equal(again.blocks[0].attn.qkv.weight, host.blocks[0].attn.qkv.weight)
    insert_context_broadcast(host)
    assert "tokamix_changes" in host.state_dict()
    remove_context_broadcast(host)
    assert "tokamix_changes" not in host.state_dict(), "nothing is changed any more"


@pytest.mark.parametrize(("family", "options"), [("ViT", {}), ("Dinov2", {"use_swiglu_ffn": True})])
def test_hugging_face(tmp_path: Path, family: str, options: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    kind = getattr(transformers, f"{family}ForImageClassification")
    model = kind(config).eval()
    swap(model)
    insert_context_broadcast(model, "cbs")
    x = torch.randn(2, 3, 32, 32)
    model.save_pretrained(tmp_path)
    with pytest.raises(KeyError, match=r"changed by tokamix: load it with tokamix\.swap\.load_hf"):
        kind.from_pretrained(tmp_path)
    loaded = load_hf(kind, tmp_path)
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_export_keeps_the_change() -> None:
    model = create("swin_tiny_patch4_window7_224", depths=(2,), num_heads=(2,)).eval()
    swap_mixer(model)
    exported = torch.export.export(model, (images(),)).module()
    torch.testing.assert_close(exported(images() * 0 + 1), model(images() * 0 + 1))
