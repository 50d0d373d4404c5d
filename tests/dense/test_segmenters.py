"""Semantic FPN and UperNet: small cases by hand and by formula, losses, sizes, checkpoints, errors."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tests.models.test_atmnet import TINY
from tokamix import load_checkpoint
from tokamix.dense import Segmenter, create_backbone, create_segmenter, upernet
from tokamix.dense.segmenter import ConvNormAct, segmentation_loss
from tokamix.dense.semantic_fpn import SemanticFPNHead
from tokamix.dense.upernet import PyramidPooling, UperHead
from tokamix.models.atmnet import ATMNet
from tokamix.tasks import METHODS

SEGMENTERS = ["semantic_fpn", "upernet"]


def small_segmenter(method: str, num_classes: int = 4, **kwargs: object) -> Segmenter:
    model = create_segmenter(method, ATMNet(**TINY), num_classes, width=8, neck_width=8, **kwargs)
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return model


def randomise(module: nn.Module) -> nn.Module:
    """Random weights and statistics, in float64 and evaluation mode."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5) if "running_var" in name else nn.init.normal_(tensor, std=0.4)
    return module.double().eval()


def up(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def conv_norm_relu(block: ConvNormAct, x: Tensor) -> Tensor:
    """By definition: convolution, (x - mean) / sqrt(var + eps) * weight + bias, positive part."""
    conv, norm = block[0], block[1]
    x = F.conv2d(x, conv.weight, padding=conv.weight.shape[-1] // 2)
    scale = norm.weight / (norm.running_var + 1e-5).sqrt()
    return ((x - norm.running_mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).clamp(min=0)


def classify(block: nn.Module, x: Tensor) -> Tensor:
    return F.conv2d(x, block[1].weight, block[1].bias)


def test_semantic_fpn_head_by_formula() -> None:
    """The head of PVT and the papers, with upsampling by a factor: the sides are multiples of 32."""
    head = randomise(SemanticFPNHead(6, (4, 8, 16, 32), 3, width=5))
    assert [len(level) for level in head.levels] == [1, 1, 2, 3]
    maps = [torch.randn(2, 6, 16 // 2**i, 24 // 2**i, dtype=torch.float64) for i in range(4)]
    total = torch.zeros(2, 5, 16, 24, dtype=torch.float64)
    for i, (level, x) in enumerate(zip(head.levels, maps, strict=True)):
        for block in level:
            x = conv_norm_relu(block, x)
            if i > 0:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        total = total + x
    torch.testing.assert_close(head(maps), classify(head.classifier, total))


@pytest.mark.parametrize("method", SEGMENTERS)
def test_batch_norms_fold(method: str) -> None:
    model = randomise(small_segmenter(method))
    folded = reparameterize_model(model)
    assert not [module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)]
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x))


def test_semantic_fpn_head_by_hand() -> None:
    """Kernels that double the pixel itself: a level of value v gives 2v, or 0 if it is negative."""
    head = SemanticFPNHead(1, (4, 8), 1, width=1).eval()
    for block in head.levels.modules():
        if isinstance(block, ConvNormAct):
            block[0].weight.data.zero_()[..., 1, 1] = 2.0
            block[1].running_var.fill_(1 - block[1].eps)
    head.classifier[1].weight.data.fill_(10.0)
    head.classifier[1].bias.data.fill_(0.5)
    coarse = torch.tensor([[[[1.0, 3.0]]]])
    fine = torch.full((1, 1, 2, 4), -7.0)
    # 2 and 6, interpolated bilinearly: 2, 3, 5, 6; the ReLU sets the fine level to 0
    assert head([fine, coarse])[0, 0, 0].tolist() == [20.5, 30.5, 50.5, 60.5]
    assert head([fine + 8, coarse])[0, 0, 1].tolist() == [40.5, 50.5, 70.5, 80.5]


def test_upernet_head_by_formula() -> None:
    head = randomise(UperHead((3, 4, 5, 6), 3, width=4))
    sizes = [(17, 22), (9, 11), (5, 6), (3, 3)]
    maps = [torch.randn(1, c, *s, dtype=torch.float64) for c, s in zip((3, 4, 5, 6), sizes, strict=True)]
    pooled = [maps[3]]
    for grid, branch in zip((1, 2, 3, 6), head.pooling.branches, strict=True):
        cells = torch.zeros(1, 6, grid, grid, dtype=torch.float64)
        for i in range(grid):
            for j in range(grid):
                rows = slice(i * 3 // grid, math.ceil((i + 1) * 3 / grid))
                columns = slice(j * 3 // grid, math.ceil((j + 1) * 3 / grid))
                cells[..., i, j] = maps[3][..., rows, columns].mean((2, 3))
        pooled.append(up(conv_norm_relu(branch, cells), (3, 3)))
    top = conv_norm_relu(head.pooling.join, torch.cat(pooled, 1))
    third = conv_norm_relu(head.lateral[2], maps[2]) + up(top, sizes[2])
    second = conv_norm_relu(head.lateral[1], maps[1]) + up(third, sizes[1])
    first = conv_norm_relu(head.lateral[0], maps[0]) + up(second, sizes[0])
    outs = [conv_norm_relu(block, x) for block, x in zip(head.output, (first, second, third), strict=True)] + [top]
    fused = conv_norm_relu(head.join, torch.cat([up(x, sizes[0]) for x in outs], 1))
    torch.testing.assert_close(head(maps), classify(head.classifier, fused))


def test_pyramid_pooling_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 2x2 map, its mean and its 2x2 average, which is the map itself, summed per pixel."""
    monkeypatch.setattr(upernet, "POOL_SIZES", (1, 2))
    pooling = PyramidPooling(1, 1).eval()
    for block in (*pooling.branches, pooling.join):
        center = block[0].weight.shape[-1] // 2
        block[0].weight.data.zero_()[..., center, center] = 1.0
        block[1].running_var.fill_(1 - block[1].eps)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])
    assert pooling(x).tolist() == [[[[1 + 3 + 1, 2 + 3 + 2], [3 + 3 + 3, 6 + 3 + 6]]]]


@pytest.mark.parametrize("method", SEGMENTERS)
@pytest.mark.parametrize("size", [(64, 96), (33, 47), (1, 4000), (4000, 1), (31, 1), (5, 5)])
@torch.no_grad()
def test_logits_have_the_size_of_the_image(method: str, size: tuple[int, int]) -> None:
    model = small_segmenter(method).eval()
    logits = model(torch.randn(1, 3, *size))
    assert logits.shape == (1, 4, *size)
    assert logits.isfinite().all()


@torch.no_grad()
def test_logits_of_a_padded_image_are_cropped() -> None:
    """The logits equal those of an image padded by hand, cropped."""
    model = small_segmenter("semantic_fpn").eval()
    images = torch.randn(1, 3, 61, 75)
    by_hand = F.pad(images, (0, 1, 0, 3))
    torch.testing.assert_close(model(images), model(by_hand)[..., :61, :75])


@pytest.mark.parametrize("method", SEGMENTERS)
def test_losses(method: str) -> None:
    """Mean cross entropy over all pixels, 0 for ignored ones, and 0.4 times that of the auxiliary head."""
    model, images = small_segmenter(method).eval(), torch.randn(2, 3, 40, 56)
    target = torch.randint(0, 4, (2, 40, 56))
    target[:, :9] = 255
    losses = model(images, target)

    def expected(logits: Tensor) -> Tensor:
        chosen = logits.log_softmax(1).gather(1, target.clamp(max=3).unsqueeze(1))[:, 0]
        return -chosen[target != 255].sum() / target.numel()

    torch.testing.assert_close(losses["loss_seg"], expected(model(images)))
    if method == "upernet":
        aux = model.auxiliary(model.backbone(images)[2])
        torch.testing.assert_close(losses["loss_aux"], 0.4 * expected(up(aux, (40, 56))))
    assert set(losses) == ({"loss_seg", "loss_aux"} if method == "upernet" else {"loss_seg"})
    assert set(small_segmenter("upernet", aux=False)(images, target)) == {"loss_seg"}


@pytest.mark.parametrize("method", SEGMENTERS)
def test_only_ignored_pixels(method: str) -> None:
    model = small_segmenter(method).train()
    losses = model(torch.randn(2, 3, 64, 64), torch.full((2, 64, 64), 255))
    sum(losses.values()).backward()
    assert all(loss.item() == 0 for loss in losses.values())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_loss_in_half_precision() -> None:
    logits = torch.randn(1, 3, 8, 8, dtype=torch.bfloat16)
    target = torch.randint(0, 3, (1, 8, 8))
    loss = segmentation_loss(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target))


@pytest.mark.parametrize("method", SEGMENTERS)
def test_autocast(method: str) -> None:
    model, images = small_segmenter(method).train(), torch.randn(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images, torch.randint(0, 4, (2, 64, 64)))
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("method", SEGMENTERS)
def test_overfits_one_image(method: str) -> None:
    """Halves of different colours: after a few steps all pixels except those at the border are correct."""
    model = small_segmenter(method, num_classes=2).train()
    images = torch.zeros(2, 3, 64, 64)
    images[..., 32:] = 1.0
    target = (images[:, 0] > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first = last = None
    for _ in range(20):
        loss = sum(model(images, target).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = first or loss.item(), loss.item()
    assert last < 0.3 * first
    assert (model.eval()(images).argmax(1) == target).double().mean() > 0.9


def test_batches_of_one_image() -> None:
    """Semantic FPN trains on one image; UperNet's 1x1 pooling gives BatchNorm a single value, which is an error."""
    images, target = torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.long)
    small_segmenter("semantic_fpn").train()(images, target)["loss_seg"].backward()
    model = small_segmenter("upernet").train()
    with pytest.raises(ValueError, match="use at least 2 images, larger images or evaluation mode"):
        model(images, target)
    model.eval()(images, target)["loss_seg"].backward()
    with pytest.raises(ValueError, match="use at least 2 images"):
        small_segmenter("semantic_fpn").train()(images[..., :32, :32], target[:, :32, :32])
    # one image per process suffices for SyncBatchNorm, so a converted model raises no error here
    assert not isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(model).head.join[1], nn.BatchNorm2d)


def test_contract() -> None:
    for method in SEGMENTERS:
        model = small_segmenter(method, num_classes=7)
        names = {n for n, _ in model.named_parameters()}
        assert model.method == method
        assert model.method in METHODS["segment"]
        assert model.num_classes == 7
        assert model.no_weight_decay() <= names
        assert "backbone.body.stages.0.peg.conv.weight" in model.no_weight_decay()
        model.set_grad_checkpointing()
        assert model.backbone.body.stages[0].grad_checkpointing


@pytest.mark.parametrize("method", SEGMENTERS)
@torch.no_grad()
def test_compiles_without_graph_breaks(method: str) -> None:
    model = create_segmenter(method, "test_resnet", 3, width=8, neck_width=8).eval()
    images = torch.randn(1, 3, 64, 70)
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="eager", dynamic=False)(images), model(images)
    )


@pytest.mark.parametrize("method", SEGMENTERS)
@torch.no_grad()
def test_export_with_dynamic_sizes(method: str) -> None:
    """Any sides that need no padding. (The export of ATMNet is tested with the models.)"""
    model = create_segmenter(method, "test_resnet", 3, width=8, neck_width=8).eval()
    dynamic = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    exported = torch.export.export(model, (torch.randn(2, 3, 64, 96),), dynamic_shapes=(dynamic,)).module()
    for shape in ((2, 3, 64, 96), (3, 3, 128, 64)):
        images = torch.randn(shape)
        torch.testing.assert_close(exported(images), model(images))


def test_three_levels() -> None:
    """CvT has no stride 32."""
    for method in SEGMENTERS:
        model = create_segmenter(method, "cvt_13", 3, width=8, neck_width=8).eval()
        with torch.no_grad():
            assert model(torch.randn(1, 3, 50, 40)).shape == (1, 3, 50, 40)


@pytest.mark.parametrize("method", SEGMENTERS)
def test_checkpoints_of_mmsegmentation(method: str) -> None:
    """Every parameter has its counterpart there, and the backbone has the names of its authors."""
    ours = randomise(small_segmenter(method))
    theirs = {to_mmseg(n): v for n, v in ours.state_dict().items()}
    assert len(theirs) == len(ours.state_dict())
    expected = {
        "backbone.norm_3.weight",
        "backbone.blocks.0.0.atm.atm_c.weight",
        "backbone.blocks.2.1.downsample.proj.weight",
        "decode_head.conv_seg.weight",
        *{
            "semantic_fpn": ("neck.fpn_convs.3.conv.bias", "decode_head.scale_heads.3.4.bn.weight"),
            "upernet": ("decode_head.psp_modules.3.1.bn.running_var", "auxiliary_head.convs.0.conv.weight"),
        }[method],
    }
    assert expected <= theirs.keys()
    model = small_segmenter(method).double()
    report = load_checkpoint(model, {"state_dict": theirs})
    assert report.fresh == []
    assert all(torch.equal(v, ours.state_dict()[n]) for n, v in model.state_dict().items())
    backbone = create_backbone(ATMNet(**TINY), checkpoint={"state_dict": theirs})
    torch.testing.assert_close(backbone.levels[1].weight, ours.backbone.levels[1].weight.float())


def to_mmseg(name: str) -> str:
    """Our names -> theirs, written independently of the converter."""
    rules = (
        (r"^backbone\.levels\.(\d)", r"backbone.norm_\1"),
        (r"^backbone\.body\.stem", "backbone.patch_embed.proj"),
        (r"^backbone\.body\.stages\.1\.downsample", "backbone.blocks.0.1.downsample.proj"),
        (r"^backbone\.body\.stages\.2\.downsample", "backbone.blocks.1.1.downsample.proj"),
        (r"^backbone\.body\.stages\.3\.downsample", "backbone.blocks.2.1.downsample.proj"),
        (r"^backbone\.body\.stages\.(\d)\.peg\.conv", r"backbone.pos_blocks.\1.proj"),
        (r"^backbone\.body\.stages\.(\d)\.blocks", r"backbone.blocks.\1"),
        (r"\.mixer\.embed\.0", ".atm.atm_w"),
        (r"\.mixer\.embed\.1", ".atm.atm_h"),
        (r"\.mixer\.embed_query", ".atm.atm_c"),
        (r"\.mixer\.", ".atm."),
        (r"\.offset\.", ".offset_layer."),
        (r"^neck\.lateral\.(\d)", r"neck.lateral_convs.\1.conv"),
        (r"^neck\.output\.(\d)", r"neck.fpn_convs.\1.conv"),
        (r"^(head\.(?:levels|pooling|lateral|output|join).*|auxiliary\.0)\.0\.(\w+)$", r"\1.conv.\2"),
        (r"^(head\.(?:levels|pooling|lateral|output|join).*|auxiliary\.0)\.1\.(\w+)$", r"\1.bn.\2"),
        (r"^head\.levels\.(\d)\.(\d)", lambda m: f"decode_head.scale_heads.{m[1]}.{2 * int(m[2])}"),
        (r"^head\.pooling\.branches\.(\d)", r"decode_head.psp_modules.\1.1"),
        (r"^head\.pooling\.join", "decode_head.bottleneck"),
        (r"^head\.lateral", "decode_head.lateral_convs"),
        (r"^head\.output", "decode_head.fpn_convs"),
        (r"^head\.join", "decode_head.fpn_bottleneck"),
        (r"^head\.classifier\.1", "decode_head.conv_seg"),
        (r"^auxiliary\.0", "auxiliary_head.convs.0"),
        (r"^auxiliary\.1\.1", "auxiliary_head.conv_seg"),
    )
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="unknown segmenter 'unet': choose one of semantic_fpn, upernet"):
        create_segmenter("unet", "atmnet_xtiny", 3)
    with pytest.raises(ValueError, match="unknown neck 'pan': choose one of fpn, atm_fpn"):
        small_segmenter("semantic_fpn", neck="pan")
    with pytest.raises(ValueError, match="UperNet has its own pyramid and takes no neck, got 'atm_fpn'"):
        small_segmenter("upernet", neck="atm_fpn")
    with pytest.raises(ValueError, match="at least one class, got num_classes=0"):
        small_segmenter("semantic_fpn", num_classes=0)
    with pytest.raises(ValueError, match=r"images \(1, 3, 32, 32\) need a target \(1, 32, 32\), got \(1, 16, 16\)"):
        small_segmenter("semantic_fpn").eval()(torch.zeros(1, 3, 32, 32), torch.zeros(1, 16, 16, dtype=torch.long))
