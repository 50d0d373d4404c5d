"""Registered models with a swapped mixer or context broadcasting: sizes, outputs, and timm's contract."""

import copy
import functools
import math
import re
from collections import Counter

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import create_feature_extractor, get_pretrained_cfg, group_parameters, model_entrypoint, save_for_hf
from torch import Tensor, nn

import tokamix
from tokamix.layers import PatchConv
from tokamix.mixers.context_broadcast import ContextBroadcast
from tokamix.models.swapped import VARIANTS
from tokamix.swap.product import SimAProduct

PARAMETERS = {
    "deit_small_sima": 22_050_664,
    "deit_small_sima_1head": 22_050_664,
    "deit_small_sima_relu": 22_050_664,
    "cvt_13_sima": 19_997_480,
    "deit_tiny_cb": 5_717_416,
    "deit_tiny_cbs": 5_719_720,
    "deit_tiny_cbgate": 5_717_416,
    "deit_tiny_cbhybrid": 5_717_416,
    "deit_small_cb": 22_050_664,
    "deit_small_cbs": 22_055_272,
    "deit_small_cbgate": 22_050_664,
    "deit_small_cbhybrid": 22_050_664,
    "deit_base_cb": 86_567_656,
    "deit_base_cbs": 86_576_872,
    "deit_base_cbgate": 86_567_656,
    "deit_base_cbhybrid": 86_567_656,
    "deit_tiny_distilled_cb": 5_910_800,
    "deit_tiny_distilled_cbs": 5_913_104,
    "deit_small_distilled_cb": 22_436_432,
    "deit_small_distilled_cbs": 22_441_040,
    "deit_base_distilled_cb": 87_338_192,
    "deit_base_distilled_cbs": 87_347_408,
    "pvt_small_cb": 24_485_864,
    "swin_tiny_cb": 28_288_354,
    "localvit_tiny_cb": 5_908_696,
    "pvt_v2_b0_cb": 3_666_760,
    "pit_s_cb": 23_461_912,
}
SIZE, CLASSES = 64, 7
# options that make a host small, by its family
SMALL: dict[str, dict[str, object]] = {
    "deit": {"img_size": SIZE, "depth": 3, "embed_dim": 24, "num_heads": 3},
    "pit": {"img_size": SIZE, "depth": [1, 1, 1], "base_dims": [8, 8, 8]},
    "pvt_v2": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)},
    "swin_transformer": {"img_size": SIZE, "depths": (1, 1, 2, 1), "embed_dim": 24},
}
TIMM_HOSTS = [name for name, v in VARIANTS.items() if model_entrypoint(v.host).__module__.startswith("timm.")]
# one name for each structure: with the options above, DeiT's sizes do not differ
STRUCTURES = [
    *("deit_small_sima", "deit_small_sima_1head", "deit_small_sima_relu"),
    *("deit_tiny_cb", "deit_tiny_cbs", "deit_tiny_cbgate", "deit_tiny_cbhybrid"),
    *("deit_tiny_distilled_cb", "deit_tiny_distilled_cbs", "swin_tiny_cb", "pvt_v2_b0_cb", "pit_s_cb"),
]


def small(name: str) -> dict[str, object]:
    return SMALL[model_entrypoint(VARIANTS[name].host).__module__.rpartition(".")[2]]


def create(name: str, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **{"num_classes": CLASSES, **small(name), **kwargs})


def create_host(name: str, **kwargs: object) -> nn.Module:
    return timm.create_model(VARIANTS[name].host, **{"num_classes": CLASSES, **small(name), **kwargs})


@functools.lru_cache(maxsize=2)
def _shared(name: str) -> nn.Module:
    return create(name).eval()


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in STRUCTURES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> nn.Module:
    """A small copy of the named model in eval mode; tests must not change it."""
    return _shared(name)


def images(batch: int = 2, channels: int = 3, size: int = SIZE) -> Tensor:
    return torch.randn(batch, channels, size, size)


def classifiers(name: str) -> tuple[str, ...]:
    classifier = get_pretrained_cfg(name).classifier
    return (classifier,) if isinstance(classifier, str) else classifier


def test_every_structure_is_tested() -> None:
    """A variant that is left out differs from a tested one only in DeiT's size."""

    def structure(name: str) -> str:
        return re.sub("deit_(tiny|small|base)", "deit", name)

    assert {structure(name) for name in TIMM_HOSTS} == {structure(name) for name in STRUCTURES}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_and_inserted_modules(name: str) -> None:
    """The papers' sizes, 22.05 M and 20.0 M; only CB_S adds parameters to its host."""
    model, host = timm.create_model(name, device="meta"), timm.create_model(VARIANTS[name].host, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    added = set(model.state_dict()) - set(host.state_dict())
    assert set(host.state_dict()) <= set(model.state_dict())
    if not name.endswith("cbs"):
        assert not added
    else:
        assert added == {f"blocks.{i}.mlp.broadcast_after.scale" for i in range(12)}
    kinds = Counter(m.kind for m in model.modules() if isinstance(m, ContextBroadcast))
    mixers = [m for m in model.modules() if isinstance(m, SimAProduct)]
    if "sima" in name:
        assert not kinds
        assert len(mixers) == {"cvt": 13}.get(name.partition("_")[0], 12)
    else:
        kind = {"cb": "cb", "cbs": "cbs", "cbgate": "gate", "cbhybrid": "hybrid"}[name.rpartition("_")[2]]
        blocks = {"pvt": 16, "swin": 12, "pit": 12}.get(name.partition("_")[0], 12)
        assert kinds == {kind: 8 if name.startswith("pvt_v2") else blocks}
        assert not mixers


def test_every_variant_is_listed() -> None:
    assert PARAMETERS.keys() == VARIANTS.keys()
    assert set(VARIANTS) <= set(tokamix.list_models())


def test_forms_of_the_sima_paper() -> None:
    """One head, ReLU, and the exponentials of Table 1: H N^2 in each block of DeiT-S, none with SimA."""
    heads = [m.num_heads for m in create("deit_small_sima_1head").modules() if isinstance(m, SimAProduct)]
    assert heads == [1] * 3
    host, sima, relu = (
        tokamix.count_exp(timm.create_model(n), 224)
        for n in ("deit_small_patch16_224", "deit_small_sima", "deit_small_sima_relu")
    )
    assert host["softmax"] == 12 * 6 * 197**2
    assert sima["softmax"] == 0
    assert sima["gelu"] == host["gelu"] > 0
    assert relu.total() == 0
    assert tokamix.count_exp(timm.create_model("cvt_13_sima"), 224)["softmax"] == 0


@pytest.mark.parametrize(
    ("name", "macs"),
    [("deit_small_sima", 4_357_413_888), ("deit_small_sima_1head", 4_598_882_304), ("cvt_13_sima", 4_158_566_912)],
)
def test_macs(name: str, macs: int) -> None:
    """The paper prints the hosts' 4.6 and 4.5 G, which one head has too (N < D); more heads use the linear order."""
    assert tokamix.count_macs(timm.create_model(name), 224) == macs
    host = tokamix.count_macs(timm.create_model(VARIANTS[name].host), 224)
    assert (host == macs) if name.endswith("1head") else (host > macs)


@pytest.mark.parametrize("name", TIMM_HOSTS)
def test_cfg(name: str) -> None:
    model = create(name, device="meta")
    cfg, host = get_pretrained_cfg(name), get_pretrained_cfg(VARIANTS[name].host)
    assert cfg.architecture == name
    assert cfg.paper_ids in ("arXiv:2206.08898", "arXiv:2210.08457")
    assert cfg.paper_name
    assert not cfg.has_weights
    assert (cfg.input_size, cfg.mean, cfg.first_conv) == (host.input_size, host.mean, host.first_conv)
    parameters = dict(model.named_parameters())
    for layer in (cfg.first_conv, *classifiers(name)):
        assert f"{layer}.weight" in parameters, layer
    assert model.num_classes == CLASSES


def test_equals_the_changed_host(name: str, model: nn.Module) -> None:
    host = create_host(name).eval()
    VARIANTS[name].change(host)
    host.load_state_dict(model.state_dict())
    x = images()
    torch.testing.assert_close(host(x), model(x))
    assert type(host) is type(model)


def test_forward(name: str, model: nn.Module) -> None:
    x = images()
    logits = model(x)
    assert logits.shape == (2, CLASSES)
    assert logits.isfinite().all()
    torch.testing.assert_close(model(x[:1]), logits[:1], msg="logits depend on other images of the batch")
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), logits)
    torch.testing.assert_close(model.forward_head(model.forward_features(x)), logits)
    assert create(name, in_chans=4).eval()(images(channels=4)).isfinite().all()


def test_classifier(name: str) -> None:
    model = create(name).double().train()
    for classes in (5, 0):
        model.reset_classifier(classes)
        assert model.num_classes == classes
        assert all(p.dtype == torch.float64 for p in model.parameters())
        assert model.eval()(images().double()).shape == (2, classes or model.head_hidden_size)


def test_features(name: str) -> None:
    """Feature maps equal those of the changed host: the wrapper contains the mixer."""
    extractor = create(name, features_only=True).eval()
    host = create_host(name, features_only=True).eval()
    VARIANTS[name].change(host)
    host.load_state_dict(extractor.state_dict())
    x = images()
    maps = extractor(x)
    torch.testing.assert_close(host(x), maps)
    for features, channels in zip(maps, extractor.feature_info.channels(), strict=True):
        assert channels in features.shape
    assert extractor.feature_info.reduction() == host.feature_info.reduction()
    assert len(create(name, features_only=True, out_indices=(0,)).eval()(x)) == 1


@pytest.mark.parametrize("name", ["deit_small_sima", "deit_tiny_distilled_cbs", "swin_tiny_cb", "pvt_v2_b0_cb"])
def test_symbolic_tracing(name: str) -> None:
    """timm's feature extraction by torch.fx works."""
    model, x = create(name).eval(), images()
    logits = create_feature_extractor(model, [classifiers(name)[0]])(x)
    host = model.forward_features(x)
    expected = model.head(host[:, 0]) if "deit" in name else model(x)
    torch.testing.assert_close(next(iter(logits.values())), expected)


def test_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, x, gradients = create(name, drop_path_rate=0.0).train(), images(), []
    if name == "pit_s_cb":
        with pytest.raises(AssertionError, match="gradient checkpointing not supported"):  # nor is it in timm's host
            model.set_grad_checkpointing(True)
        return
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(x).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients[0].values())


def test_drop_path(name: str) -> None:
    rates = [m.drop_prob for m in create(name, drop_path_rate=0.3).modules() if isinstance(m, DropPath)]
    assert max(rates) == pytest.approx(0.3)


def test_parameter_groups(name: str, model: nn.Module) -> None:
    parameters = {n for n, _ in model.named_parameters()}
    for coarse in (False, True):
        if hasattr(model, "group_matcher"):
            groups = group_parameters(model, model.group_matcher(coarse=coarse))
            assert {n for group in groups.values() for n in group} == parameters
    assert not [n for n in model.no_weight_decay() if "broadcast" in n]


def test_hub_folder_round_trip(name: str, model: nn.Module, tmp_path) -> None:
    save_for_hf(model, str(tmp_path), model_args=small(name))
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images()
    assert torch.equal(loaded(x), model(x))
    report = tokamix.load_checkpoint(create(name, num_classes=3), tmp_path)
    assert report.fresh == [f"{layer}.{kind}" for layer in classifiers(name) for kind in ("weight", "bias")]


def test_host_checkpoints_load(name: str) -> None:
    host, model = create_host(name), create(name)
    report = tokamix.load_checkpoint(model, host.state_dict(), strict=not name.endswith("cbs"))
    assert all(re.search(r"broadcast_after\.scale$", parameter) for parameter in report.fresh)
    assert len(report.fresh) == (3 if name.endswith("cbs") else 0)
    own = model.state_dict()
    assert all(torch.equal(own[n], value) for n, value in host.state_dict().items())


@pytest.mark.parametrize("name", ["deit_small_sima", "deit_tiny_cbs", "deit_tiny_distilled_cbs", "swin_tiny_cb"])
def test_meta_construction_and_initialisation(name: str) -> None:
    model = create(name, device="meta", dtype=torch.float64)
    assert all(p.device.type == "meta" and p.dtype == torch.float64 for p in model.parameters())
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            t.fill_(math.nan if t.is_floating_point() else 0)
    model.init_weights()
    assert not [n for n, t in model.state_dict().items() if not t.isfinite().all()]
    assert all((p == 1).all() for n, p in model.named_parameters() if "broadcast" in n)
    assert model(images().double()).isfinite().all()


@pytest.mark.parametrize(
    "name",
    ["deit_small_sima", "pvt_v2_b0_cb", "deit_tiny_cbhybrid", "deit_tiny_distilled_cbs", "pit_s_cb", "swin_tiny_cb"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    half = copy.deepcopy(_shared(name)).to(dtype)
    for scale in (1e-3, 1.0, 1e3):
        assert half((images(1) * scale).to(dtype)).isfinite().all(), scale


@pytest.mark.parametrize(("name", "options"), [("deit_small_sima", {"depth": 1}), ("pvt_v2_b0_cb", {})])
def test_compile_and_export(name: str, options: dict[str, object]) -> None:
    """test_context_broadcast.py in tests/swap compiles and exports more hosts."""
    torch.compiler.reset()
    model, x = create(name, **options).eval(), images()
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    program = torch.export.export(model, (images(3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(x), expected)
    assert not [n for n in program.graph.nodes if "tokamix" in str(n.target)], "exported graphs hold plain operators"


@pytest.mark.parametrize("name", ["deit_small_sima", "deit_tiny_distilled_cb"])
def test_export_with_named_sizes(name: str) -> None:
    """Exported at the native size, a DeiT with `dynamic_img_size` takes every size between the limits."""
    model = copy.deepcopy(create(name, depth=1, dynamic_img_size=True, dynamic_img_pad=True)).eval()
    side = {"min": 64, "max": 1024}
    sizes = {0: torch.export.Dim("batch", min=1, max=64)}
    sizes |= {2: torch.export.Dim("height", **side), 3: torch.export.Dim("width", **side)}
    program = torch.export.export(model, (images(2),), dynamic_shapes=(sizes,))
    for size in ((224, 224), (64, 96), (70, 225)):
        x = torch.randn(3, 3, *size)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_other_image_sizes() -> None:
    model = create("deit_small_sima", dynamic_img_size=True).eval()
    assert model(images(size=96)).isfinite().all()
    assert create("deit_tiny_cb", img_size=96).eval()(images(size=96)).isfinite().all()
    swin = create("swin_tiny_cb").eval()
    swin.set_input_size((96, 96))
    assert swin(images(size=96)).isfinite().all()


def test_distilled_training() -> None:
    model = create("deit_tiny_distilled_cb").train()
    model.set_distilled_training(True)
    logits, distilled = model(images())
    assert logits.shape == distilled.shape == (2, CLASSES)
    assert not torch.allclose(logits, distilled)


@pytest.mark.parametrize("name", ["deit_tiny_cb", "swin_tiny_cb"])
def test_patch_embedding_is_a_matmul(name: str) -> None:
    model = tokamix.create_model(name, **SMALL["deit" if name.startswith("deit") else "swin_transformer"])
    assert isinstance(model.patch_embed.proj, PatchConv)
    assert not any(p.is_meta for p in model.parameters())
