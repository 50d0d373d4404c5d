"""Training images that grow during the run, mixing that ends before it does, schedules by iterations."""

from pathlib import Path

import pytest
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from tests.train.loop.test_resume import Stop, stop_at
from tests.train.tiny import TINY, assert_same_bits, run
from tokamix.recipes import load_recipe
from tokamix.train.tasks.classify import Classify

PYRAMID = {"model": "pyramid_tiny_sima", "model_kwargs": {"dims": [8, 16], "depths": [1, 1], "num_heads": [1, 2]}}
GROWING = {"image_size": 16, "start_size": 8, "size_step": 4, "full_size_from": 0.6, "epochs": 4, **PYRAMID}


def test_sizes_grow_in_equal_steps_to_the_full_one() -> None:
    recipe = TINY.replace(image_size=96, start_size=48, size_step=16, full_size_from=0.6)
    assert [recipe.size_at(x) for x in (0, 0.19, 0.21, 0.39, 0.41, 0.599, 0.6, 1)] == [48, 48, 64, 64, 80, 80, 96, 96]
    assert TINY.replace(image_size=96).size_at(0.0) == 96


def test_the_model_sees_growing_images_and_is_evaluated_at_full_size(tmp_path: Path) -> None:
    seen: dict[bool, list[int]] = {True: [], False: []}
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen[module.training].append(args[0].shape[-1]) if hasattr(module, "num_classes") else None
    )
    try:
        result = run(tmp_path / "run", **GROWING)
    finally:
        handle.remove()
    assert sorted(set(seen[True])) == [8, 12, 16]
    assert seen[True] == sorted(seen[True])
    assert 16 in seen[False]
    assert list(result.load().pretrained_cfg["input_size"]) == [3, 16, 16]


def test_a_stopped_run_continues_with_the_same_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", **GROWING)
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            run(tmp_path / "stopped", save_every=5, **GROWING)
    run(tmp_path / "stopped", save_every=5, **GROWING)
    assert_same_bits(whole.folder, tmp_path / "stopped")


def test_timm_vits_take_the_smaller_images(tmp_path: Path) -> None:
    kwargs = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    result = run(tmp_path, **{**GROWING, "model": "vit_tiny_patch16_224", "model_kwargs": kwargs})
    assert result.load()(torch.zeros(1, 3, 8, 8)).shape == (1, 4)


def test_a_model_of_one_size_is_refused(tmp_path: Path) -> None:
    model = MlpMixer(num_classes=4, img_size=16, patch_size=4, num_blocks=1, embed_dim=8)
    with pytest.raises(ValueError, match=r"cannot process images of shape \(2, 3, 8, 8\).*another start_size"):
        run(tmp_path, network=model, **{k: v for k, v in GROWING.items() if k not in PYRAMID})


def test_a_start_above_the_full_size_is_refused() -> None:
    with pytest.raises(ValueError, match="start_size 96 must be below image_size 96; set it lower, or to none"):
        load_recipe("imagenette", {"start_size": 96})


@pytest.mark.parametrize(("off", "mixed_steps"), [(0.5, 10), (0.0, 20)])
def test_mixing_ends_before_the_run(off: float, mixed_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of one class has 0.9 of the weight and its part of the smoothed 0.1."""
    mixed: list[bool] = []
    loss = Classify.cross_entropy

    def watch(self: Classify, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = target.amax(1) if target.is_floating_point() else torch.full_like(target, 0.925, dtype=torch.float)
        mixed.append(not torch.allclose(weights, torch.full_like(weights, 0.925)))
        return loss(self, logits, target)

    monkeypatch.setattr(Classify, "cross_entropy", watch)
    run(None, epochs=4, mixup=0.8, mixup_mode="elem", mixup_off=off)
    assert mixed == [True] * mixed_steps + [False] * (20 - mixed_steps)


def test_a_schedule_by_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs last until the next evaluation, whatever the number of images: 5 batches here."""
    steps: list[float] = []
    step = torch.optim.AdamW.step

    def watch(self: torch.optim.AdamW, *args: object) -> object:
        steps.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    result = run(None, iterations=14, eval_every=7, warmup_iterations=4, schedule="linear", min_lr=0.0, select="last")
    assert len(steps) == 14
    assert steps[0] < steps[1] < steps[2] < steps[3]
    assert steps[4:] == pytest.approx([TINY.lr * (1 - step / 14) for step in range(4, 14)])
    assert ["top1" in row for row in result.epochs] == [True, True]
    assert result.best["epoch"] == 2
