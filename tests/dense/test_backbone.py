"""Backbones for dense prediction: the authors' maps, every family, any size, checkpoints, and other libraries."""

import math
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import Tensor, nn
from transformers import TimmBackbone, TimmBackboneConfig

import tokamix
from tests.conftest import assert_golden, load_golden
from tests.models.test_atmnet import TINY, build, translate
from tokamix.dense import DenseBackbone, VitPyramid, create_backbone, create_segmenter
from tokamix.dense.backbone import LevelNorms
from tokamix.dense.vit_pyramid import select_blocks
from tokamix.models.atmnet import ATMNet

# one per family and kind: pyramids with and without norms, columns of patch 8 and 16, with and without class token
OURS = {
    "atmnet_xtiny": LevelNorms,
    "stvit_small": LevelNorms,
    "amixer_tiny": LevelNorms,
    "pyramid_tiny_pooling": LevelNorms,
    "swin_tiny_cb": LevelNorms,
    "pvt_tiny": nn.Identity,
    "pvt_v2_b0_cb": nn.Identity,
    "cvt_13_sima": nn.Identity,
    "xcit_nano_12_p16_sima": VitPyramid,
    "xcit_nano_12_p8_sima": VitPyramid,
    "deit_small_sima": VitPyramid,
    "deit_tiny_distilled_cb": VitPyramid,
    "localvit_tiny": VitPyramid,
    "amixer_deit_small": VitPyramid,
}
TIMM = {
    "resnet18": nn.Identity,
    "convnext_atto": nn.Identity,
    "swin_tiny_patch4_window7_224": LevelNorms,
    "deit_tiny_patch16_224": VitPyramid,
    "xcit_nano_12_p8_224": VitPyramid,
    "efficientnet_b0": nn.Identity,
    "dla46_c": nn.Identity,  # supports only features_only
    "efficientvit_b0": nn.Identity,  # its head cannot be pruned
    "naflexvit_base_patch16_gap": VitPyramid,  # cannot be pruned at all
    "vit_small_patch14_dinov2": VitPyramid,
    "vit_small_patch32_224": VitPyramid,
}
# one block per stage, or the fewest blocks that give four levels
SHALLOW: dict[type, dict[str, Any]] = {LevelNorms: {"depths": (1, 1, 1, 1)}, VitPyramid: {"depth": 4}}


def tiny(**kwargs: object) -> ATMNet:
    return ATMNet(**TINY, **kwargs)


def test_golden_segmentation_backbone() -> None:
    """Outputs and gradients of the authors' segmentation/activemlp.py, loaded under its own parameter names."""
    golden = load_golden("atm_seg_backbone")
    backbone = create_backbone(build(golden), checkpoint=golden.weights).double().eval()
    assert sum(p.numel() for p in backbone.parameters()) == golden.meta["params"]
    maps = backbone(golden.inputs["x"])
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(maps):
        assert_golden(out, golden.outputs[f"c{i}"], f"map {i}")
        total = total + (out * golden.loss_weights[f"c{i}"]).sum()
    total.backward()
    ours = {name.removeprefix("body."): p.grad for name, p in backbone.named_parameters()}
    for name, (norm, _) in golden.meta["grad_norm_sum_all_params"].items():
        mine = name.replace("norm_", "levels.") if name.startswith("norm_") else next(iter(translate({name: EMPTY})))
        assert_golden(ours[mine].norm(), torch.tensor(norm, dtype=torch.float64), name)


EMPTY = torch.zeros(1, 1)


@pytest.mark.parametrize(("name", "levels"), (OURS | TIMM).items())
def test_maps(name: str, levels: type[nn.Module]) -> None:
    """Odd sides, an image one pixel high, and a gradient for every trainable parameter."""
    backbone = create_backbone(name, **SHALLOW.get(levels, {}))
    assert type(backbone.levels) is levels
    assert backbone.strides == (4, 8, 16, 32)[: len(backbone.channels)]
    backbone.eval()
    for height, width in ((70, 45), (1, 100)):
        images = torch.randn(1, 3, height, width)
        with torch.no_grad():
            maps = backbone(images)
            for features, padded in zip(maps, backbone(backbone.pad(images)), strict=True):
                assert torch.equal(features, padded)
        padded_sides = backbone.pad(images).shape[-2:]
        for features, channels, stride in zip(maps, backbone.channels, backbone.strides, strict=True):
            assert features.shape == (1, channels, *(math.ceil(side / stride) for side in padded_sides))
            assert features.isfinite().all()
    backbone.train()
    sum(features.square().mean() for features in backbone(torch.randn(2, 3, 64, 64))).backward()
    assert [n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None] == []
    assert backbone.no_weight_decay() <= {n for n, _ in backbone.named_parameters()}


@pytest.mark.parametrize("name", ["cait_xxs24_224", "levit_128s", "efficientformerv2_s0"])
def test_models_of_one_image_size(name: str) -> None:
    """Smaller images are padded to it, every trainable parameter gets a gradient, and larger images are an error."""
    backbone = create_backbone(name)
    assert backbone.fixed_size == (224, 224)
    images = torch.randn(2, 3, 70, 45)
    assert backbone.pad(images).shape == (2, 3, 224, 224)
    maps = backbone(images)
    assert [m.shape[1:] for m in maps] == [
        (c, 224 // s, 224 // s) if 224 % s == 0 else (c, 4, 4)
        for c, s in zip(backbone.channels, backbone.strides, strict=True)
    ]
    sum(m.square().mean() for m in maps).backward()
    assert [n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None] == []
    with pytest.raises(
        ValueError, match=r"takes images of at most 224x224 px, got 64x230; create it with img_size=\(64"
    ):
        backbone(torch.zeros(1, 3, 64, 230))


def test_models_of_one_image_size_take_another() -> None:
    backbone = create_backbone("cait_xxs24_224", img_size=(64, 96)).eval()
    assert backbone.fixed_size == (64, 96)
    assert [m.shape[-2:] for m in backbone(torch.zeros(1, 3, 50, 96))] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    segmenter = create_segmenter("semantic_fpn", backbone, 3, width=8, neck_width=8).eval()
    assert segmenter(torch.zeros(1, 3, 50, 90)).shape == (1, 3, 50, 90)


def test_padding_is_minimal_at_the_right_and_bottom() -> None:
    backbone = create_backbone(tiny())
    images = torch.randn(2, 3, 64, 70)
    padded = backbone.pad(images)
    assert padded.shape == (2, 3, 64, 72)
    assert torch.equal(padded[..., :70], images)
    assert not padded[..., 70:].any()
    assert backbone.pad(padded) is padded
    assert backbone.pad(torch.zeros(1, 3, 1, 4000)).shape == (1, 3, 32, 4000)
    assert create_backbone("resnet18").pad(images).shape == (2, 3, 64, 96)


def test_images_are_padded_to_the_blocks_of_attention() -> None:
    """timm's bilinear attention divides the last map, of stride 32, into blocks of 8x8."""
    backbone = create_backbone("bat_resnext26ts").eval()
    with torch.no_grad():
        assert [m.shape[-2:] for m in backbone(torch.zeros(1, 3, 100, 90))] == [(n, n) for n in (64, 32, 16, 8)]


def test_level_norms() -> None:
    images = torch.randn(1, 3, 64, 64)
    model = tiny()
    plain = create_backbone(tiny(), level_norm=False)
    plain.body.load_state_dict(model.state_dict(), strict=False)
    normed = create_backbone(model)
    assert isinstance(plain.levels, nn.Identity)
    for raw, out in zip(plain(images), normed(images), strict=True):
        expected = (raw - raw.mean(1, keepdim=True)) / (raw.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(out, expected)
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_select_blocks() -> None:
    assert select_blocks(12) == (3, 5, 7, 11)
    assert select_blocks(24) == (7, 11, 15, 23)
    assert select_blocks(4) == (0, 1, 2, 3)
    assert select_blocks(5) == (0, 1, 2, 4)
    with pytest.raises(ValueError, match="at least 4 blocks, got 3"):
        select_blocks(3)


def test_vit_pyramid_by_hand() -> None:
    """Two transposed convolutions with BatchNorm and GELU between them; one; identity; the maximum of 2x2."""
    pyramid = VitPyramid(1).eval()
    up = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    first, norm, _, second = pyramid.levels[0]
    for conv in (first, second, pyramid.levels[1]):
        conv.weight.data = up.view(1, 1, 2, 2).clone()
        conv.bias.data.fill_(0.5)
    norm.running_mean.fill_(1.0)
    norm.running_var.fill_(4.0 - norm.eps)
    x = torch.tensor([[1.0, -2.0, 0.0]]).view(1, 1, 1, 3)
    four, two, one, half = pyramid([x] * 4)
    doubled = torch.kron(x[0, 0], up) + 0.5
    torch.testing.assert_close(two[0, 0], doubled)
    hidden = nn.functional.gelu((doubled - 1) / 2)
    torch.testing.assert_close(four[0, 0], torch.kron(hidden, up) + 0.5)
    assert torch.equal(one, x)
    assert half.tolist() == [[[[1.0, 0.0]]]]
    finer = VitPyramid(1, stride=8)
    assert [tuple(m.shape[-2:]) for m in finer([torch.zeros(1, 1, 8, 12)] * 4)] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert pyramid.strides == finer.strides == (4, 8, 16, 32)
    with pytest.raises(ValueError, match="patches of 8 to 32 px, got 4"):
        VitPyramid(1, stride=4)


@pytest.mark.parametrize("stride", [14, 32])
def test_maps_of_different_strides_are_resized_to_16(stride: int) -> None:
    """A ramp over an image of 224 px stays the same ramp at stride 16."""
    pyramid = VitPyramid(1, stride)
    cells = 224 // stride
    ramp = (torch.arange(cells) + 0.5) * stride
    _, _, one, half = pyramid([ramp.expand(1, 1, cells, cells)] * 4)
    assert one.shape[-2:] == (14, 14)
    assert half.shape[-2:] == (7, 7)
    torch.testing.assert_close(one[0, 0, 3, 1:-1], (torch.arange(1, 13) + 0.5) * 16)


def test_columns_use_the_outputs_of_the_selected_blocks() -> None:
    backbone = create_backbone("xcit_nano_12_p16_sima").eval()
    outputs: dict[int, Tensor] = {}
    for i in (3, 5, 7, 11):
        backbone.body.blocks[i].register_forward_hook(lambda _, __, out, i=i: outputs.__setitem__(i, out))
    inputs: list[Tensor] = []
    backbone.levels.register_forward_pre_hook(lambda _, args: inputs.extend(args[0]))
    backbone(torch.randn(1, 3, 32, 48))
    for features, i in zip(inputs, outputs, strict=True):
        assert torch.equal(features.flatten(2).transpose(1, 2), outputs[i])


def have_equal_weights(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_checkpoints() -> None:
    """Of a classifier, a backbone and a segmenter; an incomplete one is an error."""
    classifier = tiny()
    loaded = create_backbone(tiny(), checkpoint={"state_dict": classifier.state_dict()})
    assert all(torch.equal(v, classifier.state_dict()[n]) for n, v in loaded.body.state_dict().items())
    nn.init.normal_(loaded.levels[2].weight)
    assert have_equal_weights(create_backbone(tiny(), checkpoint=loaded.state_dict()), loaded)
    segmenter = {f"backbone.{n}": v for n, v in loaded.state_dict().items()} | {"head.weight": torch.zeros(1)}
    assert have_equal_weights(create_backbone(tiny(), checkpoint=segmenter), loaded)
    column = create_backbone("xcit_nano_12_p16_sima")
    assert have_equal_weights(create_backbone("xcit_nano_12_p16_sima", checkpoint=column.state_dict()), column)
    part = {n: v for n, v in classifier.state_dict().items() if not n.startswith("stages.1.")}
    with pytest.raises(ValueError, match=r"the checkpoint lacks \d+ parameters of ATMNet, for example stages\.1"):
        create_backbone(tiny(), checkpoint=part)


def test_arguments_reach_the_model() -> None:
    backbone = create_backbone("atmnet_xtiny", drop_path=0.3, in_chans=4)
    assert backbone.body.stages[3].blocks[-1].drop_path.drop_prob == pytest.approx(0.3)
    assert backbone(torch.zeros(1, 4, 32, 32))[0].shape == (1, 64, 8, 8)
    with pytest.raises(ValueError, match="takes images of 4 channels, got 3; create it with in_chans=3"):
        backbone(torch.zeros(1, 3, 32, 32))
    assert create_backbone(backbone) is backbone
    swin = timm.create_model("swin_tiny_patch4_window7_224", in_chans=4, strict_img_size=False, always_partition=True)
    from_model = create_backbone(swin)
    assert from_model.fixed_size is None
    assert from_model(torch.zeros(1, 4, 64, 32))[3].shape == (1, 768, 2, 1)


def test_checkpointing_gives_the_same_gradients() -> None:
    backbone, images = create_backbone(tiny()).train(), torch.randn(1, 3, 64, 64)

    def gradients() -> list[Tensor]:
        backbone.zero_grad()
        sum(m.square().sum() for m in backbone(images)).backward()
        return [p.grad.clone() for p in backbone.parameters()]

    plain = gradients()
    backbone.set_grad_checkpointing()
    assert backbone.body.stages[0].grad_checkpointing
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="there is no model 'atmnet_xtin'; did you mean atmnet_xtiny"):
        create_backbone("atmnet_xtin")
    with pytest.raises(ValueError, match="a model object takes no further arguments, got drop_path"):
        create_backbone(tiny(), drop_path=0.1)
    with pytest.raises(ValueError, match="Linear has no feature_info"):
        create_backbone(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="colour"):
        create_backbone("atmnet_xtiny", colour="red")


@pytest.mark.parametrize("name", ["atmnet_xtiny", "stvit_small", "pyramid_tiny_sima"])
def test_encoder_in_segmentation_models_pytorch(name: str) -> None:
    assert name in tokamix.list_models()
    model = smp.FPN(f"tu-{name}", encoder_weights=None, classes=5)
    model(torch.randn(2, 3, 64, 96)).sum().backward()
    assert model.eval()(torch.randn(1, 3, 64, 96)).shape == (1, 5, 64, 96)
    assert model.encoder.model.model.stem is not None


class ForTorchvision(nn.Module):
    """Our maps under the names that torchvision's pooling expects."""

    def __init__(self, backbone: DenseBackbone, width: int) -> None:
        super().__init__()
        self.backbone, self.out_channels = backbone, width
        self.neck = torchvision.ops.FeaturePyramidNetwork(list(backbone.channels), width)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.neck({str(i): m for i, m in enumerate(self.backbone(images))})


@pytest.mark.parametrize("name", ["atmnet_xtiny", "xcit_nano_12_p16_sima"])
def test_backbone_in_torchvisions_mask_rcnn(name: str) -> None:
    detection = torchvision.models.detection
    anchors = detection.anchor_utils.AnchorGenerator(((16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 4)
    few = {"rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5}
    model = detection.MaskRCNN(
        ForTorchvision(create_backbone(name), 32), 3, min_size=64, max_size=128, rpn_anchor_generator=anchors, **few
    )
    masks = torch.zeros(1, 50, 70, dtype=torch.uint8)
    masks[0, 10:30, 10:40] = 1
    target = {"boxes": torch.tensor([[10.0, 10.0, 40.0, 30.0]]), "labels": torch.tensor([1]), "masks": masks}
    losses = model([torch.rand(3, 50, 70), torch.rand(3, 64, 64)], [target, target | {"masks": masks[:, :, :64]}])
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.backbone.parameters() if p.requires_grad)
    (detections,) = model.eval()([torch.rand(3, 50, 70)])
    assert detections["masks"].shape[1:] == (1, 50, 70)


@pytest.mark.parametrize("name", ["atmnet_xtiny", "stvit_small"])
def test_backbone_in_hugging_face(name: str) -> None:
    options: dict[str, Any] = {"out_indices": [0, 1, 2, 3], "use_pretrained_backbone": False}
    config = TimmBackboneConfig(backbone=name, **options)
    backbone = TimmBackbone(config=config).eval()
    ours = timm.create_model(name, features_only=True).eval()
    ours.load_state_dict(backbone._backbone.state_dict())
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for theirs, mine in zip(backbone(images).feature_maps, ours(images), strict=True):
            assert torch.equal(theirs, mine)
    assert list(backbone.channels) == ours.feature_info.channels()
