"""The baselines against their papers' formulas, written out token by token in float64."""

import math

import pytest
import torch
from torch import Tensor, nn

from tokamix.mixers import ContextBroadcast, Linformer, Performer, Pooling, Site, SoftmaxAttention, create_mixer
from tokamix.mixers.cosformer import cosformer_attention
from tokamix.mixers.efficient import efficient_attention
from tokamix.mixers.heads import segment_means
from tokamix.mixers.linformer import resize_projection
from tokamix.mixers.nystrom import nystrom_attention, pseudo_inverse
from tokamix.mixers.performer import orthogonal_directions, performer_attention
from tokamix.mixers.soft import newton_inverse, soft_attention
from tokamix.mixers.softmax import attend_in_windows
from tokamix.mixers.xca import cross_covariance_attention
from tokamix.ops import broadcast_context

BASELINES = ("softmax", "xca", "linformer", "performer", "nystrom", "soft", "efficient", "cosformer")
GRID = (3, 4)
DIM, HEADS = 12, 2


def heads(count: int = 3, grid: tuple[int, int] = GRID, dim: int = 6) -> list[Tensor]:
    return [torch.randn(2, HEADS, grid[0] * grid[1], dim, dtype=torch.float64) for _ in range(count)]


def by_head(attend, *tensors: Tensor) -> Tensor:
    """Apply a formula for one image and head (N, D) to each of them."""
    batch, count = tensors[0].shape[:2]
    rows = [[attend(*(t[b, h] for t in tensors)) for h in range(count)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in rows])


def softmax_rows(logits: Tensor) -> Tensor:
    """Row by row, from the definition."""
    return torch.stack([row.exp() / row.exp().sum() for row in logits])


def weighted_mean(weights: Tensor, v: Tensor) -> Tensor:
    """Each row of weights, divided by its sum, applied to the values."""
    return torch.stack([sum(w * value for w, value in zip(row, v, strict=True)) / row.sum() for row in weights])


def make(name: str, grid: tuple[int, int] = GRID, **options) -> nn.Module:
    return create_mixer(name, Site(DIM, HEADS, grid), **options)


def test_softmax_against_its_formula() -> None:
    mixer = SoftmaxAttention(DIM, HEADS, dtype=torch.float64)
    x = torch.randn(2, 12, DIM, dtype=torch.float64)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in mixer.qkv(x).chunk(3, dim=-1))
    out = by_head(lambda q, k, v: softmax_rows(q @ k.T / math.sqrt(6)) @ v, q, k, v)
    torch.testing.assert_close(mixer(x, GRID), mixer.proj(out.transpose(1, 2).flatten(2)))


def test_normalised_queries_and_keys() -> None:
    mixer = SoftmaxAttention(DIM, HEADS, qk_norm=True, dtype=torch.float64)
    plain = SoftmaxAttention(DIM, HEADS, dtype=torch.float64)
    assert set(mixer.state_dict()) - set(plain.state_dict()) == {
        f"{part}_norm.{name}" for part in "qk" for name in ("weight", "bias")
    }
    q, k, v = heads()
    nn.init.normal_(mixer.q_norm.weight)

    def normalise(t: Tensor, norm: nn.LayerNorm) -> Tensor:
        centred = t - t.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias

    normalised = normalise(q, mixer.q_norm), normalise(k, mixer.k_norm)
    torch.testing.assert_close(mixer.attend(q, k, v, GRID), plain.attend(*normalised, v, GRID))
    with torch.autocast("cpu", torch.bfloat16):
        assert mixer.float()(torch.randn(2, 12, DIM), GRID).dtype == torch.bfloat16


def test_xca_against_its_formula() -> None:
    q, k, v = heads()
    temperature = torch.rand(HEADS, dtype=torch.float64) + 0.5

    def formula(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
        channels = range(q.shape[1])
        logits = [[(q[:, i] @ k[:, j]) / (q[:, i].norm() * k[:, j].norm()) for j in channels] for i in channels]
        weights = softmax_rows(torch.tensor(logits, dtype=q.dtype) * temperature)
        return torch.stack([sum(weights[i, j] * v[:, j] for j in channels) for i in channels], dim=1)

    expected = by_head(formula, q, k, v, temperature.expand(2, HEADS))
    torch.testing.assert_close(cross_covariance_attention(q, k, v, temperature), expected)


def test_xca_equals_timm() -> None:
    from timm.models.xcit import XCA as TimmXCA

    theirs, ours = TimmXCA(DIM, HEADS, qkv_bias=True).double(), make("xca", dtype=torch.float64)
    ours.load_state_dict({n: p.flatten() if n == "temperature" else p for n, p in theirs.state_dict().items()})
    with torch.no_grad():
        theirs.temperature.mul_(1.7)
        ours.temperature.mul_(1.7)
    x = torch.randn(2, 12, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x, GRID), theirs(x))


def test_linformer_against_its_formula() -> None:
    mixer = Linformer(DIM, HEADS, GRID, projected=5, dtype=torch.float64)
    to_keys, to_values = mixer.projection.detach().flatten(-2)  # (5, 12) each
    q, k, v = heads()

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.stack([sum(e * row for e, row in zip(row_e, k, strict=True)) for row_e in to_keys])
        values = torch.stack([sum(f * row for f, row in zip(row_f, v, strict=True)) for row_f in to_values])
        return softmax_rows(q @ keys.T / math.sqrt(q.shape[1])) @ values

    torch.testing.assert_close(mixer.attend(q, k, v, GRID), by_head(formula, q, k, v))


def test_linformer_projections_follow_the_grid() -> None:
    projection = torch.randn(2, 5, *GRID, dtype=torch.float64)
    torch.testing.assert_close(resize_projection(projection, GRID), projection)
    flat = torch.ones(2, 1, *GRID)
    assert resize_projection(flat, (9, 5)).sum() == pytest.approx(flat.sum().item())
    mixer = Linformer(DIM, HEADS, GRID, projected=8, dtype=torch.float64)
    x = torch.randn(1, 35, DIM, dtype=torch.float64)
    before = mixer(x, (5, 7))
    mixer.set_grid((5, 7))
    assert mixer.projection.shape == (2, 8, 5, 7)
    torch.testing.assert_close(mixer(x, (5, 7)), before)


def test_performer_against_its_formula() -> None:
    q, k, v = heads()
    directions = orthogonal_directions(10, 6)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q / 6**0.25, k / 6**0.25
        kernel = torch.zeros(len(q), len(k), dtype=q.dtype)
        for w in directions:
            kernel += torch.outer(*((t @ w - (t * t).sum(1) / 2).exp() for t in (q, k)))
        return weighted_mean(kernel, v)

    torch.testing.assert_close(performer_attention(q, k, v, directions, eps=0.0), by_head(formula, q, k, v))


def test_performer_features_estimate_softmax() -> None:
    q, k, v = (t / 2 for t in heads())
    exact = nn.functional.scaled_dot_product_attention(q, k, v)
    errors = [(performer_attention(q, k, v, orthogonal_directions(m, 6)) - exact).norm() for m in (12, 20_000)]
    assert errors[1] < 0.05 * exact.norm()
    assert errors[1] < errors[0]


def test_performer_features_are_orthogonal_and_always_the_same() -> None:
    directions = orthogonal_directions(15, 6, seed=3)
    for block in directions.split(6):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag())
    torch.testing.assert_close(directions, orthogonal_directions.__wrapped__(15, 6, seed=3))
    with torch.device("meta"):
        assert torch.equal(directions, orthogonal_directions.__wrapped__(15, 6, seed=3))
    # lengths are those of normal vectors, so that the estimate of exp is unbiased
    lengths = orthogonal_directions(6_000, 6).square().sum(-1)
    assert lengths.mean().item() == pytest.approx(6, rel=0.05)
    assert Performer(DIM, HEADS).directions.shape == (int(6 * math.log(6)), 6)
    assert "directions" in Performer(DIM, HEADS).state_dict()


def test_nystrom_against_its_formula() -> None:
    q, k, v = heads()

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_means, k_means = (torch.stack([part.mean(0) for part in t.chunk(4)]) for t in (q, k))
        first, second, third = (
            softmax_rows(a @ b.T / math.sqrt(6)) for a, b in ((q, k_means), (q_means, k_means), (q_means, k))
        )
        return first @ torch.linalg.pinv(second) @ third @ v

    torch.testing.assert_close(nystrom_attention(q, k, v, landmarks=4, iterations=30), by_head(formula, q, k, v))


def test_nystrom_with_a_landmark_for_each_token_is_softmax() -> None:
    q, k, v = heads()
    exact = nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(nystrom_attention(q, k, v, landmarks=12, iterations=30), exact)


def test_pseudo_inverse() -> None:
    a = torch.randn(3, 5, 5, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(pseudo_inverse(a, 30), torch.linalg.inv(a))
    a[:, 1] = a[:, 0]  # singular
    torch.testing.assert_close(pseudo_inverse(a, 40), torch.linalg.pinv(a, rtol=1e-10), rtol=1e-5, atol=1e-5)
    first = a.mT / (a.abs().sum(1).max(1).values * a.abs().sum(2).max(1).values).view(3, 1, 1)
    eye = torch.eye(5, dtype=a.dtype)
    step = 0.25 * first @ (13 * eye - a @ first @ (15 * eye - a @ first @ (7 * eye - a @ first)))
    torch.testing.assert_close(pseudo_inverse(a, 1), step)


@pytest.mark.parametrize("normalize", [False, True])
def test_soft_against_its_formula(normalize: bool) -> None:
    q, v = (t * 2 for t in heads(2, grid=(4, 6)))

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        rows = [[math.exp(-((x - y) ** 2).sum().item() / (2 * math.sqrt(6))) for y in b] for x in a]
        return torch.tensor(rows, dtype=torch.float64)

    def formula(q: Tensor, v: Tensor) -> Tensor:
        cells = q.view(2, 2, 2, 3, 6)  # 2x2 parts of 2x3 tokens
        landmarks = torch.stack([cells[i, :, j].reshape(6, 6).mean(0) for i in range(2) for j in range(2)])
        among, between = kernel(landmarks, landmarks), kernel(q, landmarks)
        inverse = torch.linalg.inv(among)
        if normalize:
            root = among.sum(1).sqrt()
            inverse = inverse / torch.outer(root, root)
        return between @ inverse @ between.T @ v

    out = soft_attention(q, v, grid=(4, 6), cells=2, iterations=40, normalize=normalize)
    torch.testing.assert_close(out, by_head(formula, q, v))


def test_newton_inverse_and_its_gradient() -> None:
    a = torch.randn(2, 4, 4, dtype=torch.float64)
    a = (a @ a.mT + torch.eye(4)).requires_grad_()
    torch.testing.assert_close(newton_inverse(a, 40), torch.linalg.inv(a))
    assert torch.autograd.gradcheck(lambda a: newton_inverse(a @ a.mT, 60), a)
    ones = torch.ones(1, 4, 4, dtype=torch.float64)  # the paper's starting value falls to zero here
    torch.testing.assert_close(newton_inverse(ones), ones / 16)


def test_efficient_attention_against_its_formula() -> None:
    q, k, v = heads()
    expected = by_head(lambda q, k, v: softmax_rows(q) @ softmax_rows(k.T) @ v, q, k, v)
    torch.testing.assert_close(efficient_attention(q, k, v), expected)


@pytest.mark.parametrize("reweight", [False, True])
def test_cosformer_against_its_formula(reweight: bool) -> None:
    q, k, v = heads()
    q = q + 1  # so that every query has a key
    height, width = GRID

    def near(i: int, j: int) -> float:
        dy, dx = i // width - j // width, i % width - j % width
        return math.cos(math.pi / 2 * dy / height) * math.cos(math.pi / 2 * dx / width) if reweight else 1.0

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.clamp(min=0), k.clamp(min=0)
        weights = [[(q[i] @ k[j]).item() * near(i, j) for j in range(len(k))] for i in range(len(q))]
        return weighted_mean(torch.tensor(weights, dtype=q.dtype), v)

    torch.testing.assert_close(cosformer_attention(q, k, v, grid=GRID, reweight=reweight), by_head(formula, q, k, v))


def test_cosformer_query_without_keys_gives_zero() -> None:
    q, k, v = heads()
    q[:, :, 3] = -1
    assert not cosformer_attention(q, k, v, grid=GRID)[:, :, 3].any()


def test_pooling_against_its_formula() -> None:
    x = torch.randn(1, 12, 2, dtype=torch.float64)
    grid = x[0].view(*GRID, 2)
    for y in range(3):
        for z in range(4):
            around = grid[max(y - 1, 0) : y + 2, max(z - 1, 0) : z + 2].reshape(-1, 2).mean(0)
            torch.testing.assert_close(Pooling()(x, GRID)[0, 4 * y + z], around - grid[y, z])
    with pytest.raises(ValueError, match="4x4 has no centre"):
        Pooling(4)


def test_identity_does_nothing() -> None:
    x = torch.randn(1, 12, DIM)
    assert make("identity")(x, GRID) is x


def test_segment_means() -> None:
    like = torch.empty(0, dtype=torch.float64)
    torch.testing.assert_close(segment_means(12, 4, like), torch.eye(4).double().repeat_interleave(3, 1) / 3)
    for length, segments in ((13, 4), (5, 7), (1, 3), (49, 49)):
        x = torch.randn(1, 2, length, dtype=torch.float64)
        pooled = nn.functional.adaptive_avg_pool1d(x, segments)
        torch.testing.assert_close(x @ segment_means(length, segments, like).T, pooled)


@pytest.mark.parametrize("name", BASELINES)
def test_gradients(name: str) -> None:
    options = {"soft": {"cells": 2, "iterations": 60}, "nystrom": {"landmarks": 4}}.get(name, {})
    grid = (2, 3)
    mixer = make(name, grid, dtype=torch.float64, **options)
    x = torch.randn(1, 6, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mixer(x, grid), x)
    mixer(x, grid).square().sum().backward()
    assert all(p.grad.any() for p in mixer.parameters())


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (9, 7), (5, 13)])
def test_any_grid(name: str, grid: tuple[int, int]) -> None:
    mixer, x = make(name, (7, 7)), torch.randn(2, grid[0] * grid[1], DIM)
    out = mixer(x, grid)
    assert out.shape == x.shape
    assert out.isfinite().all()
    torch.testing.assert_close(mixer(x[:1], grid), out[:1])  # images are independent
    strided = x.repeat_interleave(2, -1)[..., ::2]
    torch.testing.assert_close(mixer(strided, grid), out)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Finite for very small, very large and many tokens; close to float32 for ordinary ones."""
    mixer = make(name, (7, 7))
    for scale in (0.0, 1e-3, 1.0, 1e3):
        x = torch.randn(1, 49, DIM) * scale
        assert mixer.to(dtype)(x.to(dtype), (7, 7)).isfinite().all(), scale
    x = torch.full((1, 4_096, DIM), 8.0, dtype=dtype)  # the sum of their squares overflows float16
    assert mixer(x, (64, 64)).isfinite().all()
    x = torch.randn(1, 49, DIM).to(dtype)
    half, exact = mixer(x, (7, 7)).float(), mixer.float()(x.float(), (7, 7))
    assert (half - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", BASELINES)
def test_autocast(name: str) -> None:
    mixer, x = make(name, (7, 7)), torch.randn(2, 49, DIM)
    exact = mixer(x, (7, 7))
    with torch.autocast("cpu", torch.bfloat16):
        half = mixer(x, (7, 7))
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() < 0.05 * exact.norm()


def test_wrong_heads() -> None:
    with pytest.raises(ValueError, match="12 channels do not divide into 5 heads"):
        SoftmaxAttention(12, 5)


@pytest.mark.parametrize("kind", ["cb", "cbs", "gate", "hybrid"])
def test_context_broadcast(kind: str) -> None:
    module = ContextBroadcast(4, kind, dtype=torch.float64)
    assert [n for n, _ in module.named_parameters()] == (["scale"] if kind == "cbs" else [])
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    plain = broadcast_context(x, kind="cb" if kind == "cbs" else kind)
    torch.testing.assert_close(module(x), plain)
    if kind == "cbs":
        nn.init.constant_(module.scale, 3.0)
        torch.testing.assert_close(module(x), (x + 3 * x.mean(1, keepdim=True)) / 2)


def test_context_broadcast_errors() -> None:
    with pytest.raises(ValueError, match="unknown kind 'cbx'"):
        ContextBroadcast(4, "cbx")
    for kind in ("gate", "hybrid"):
        with pytest.raises(ValueError, match="multiplies by the class token, but class_token is False"):
            ContextBroadcast(4, kind, class_token=False)


@pytest.mark.parametrize(("grid", "window", "shift"), [((4, 6), 2, 0), ((5, 7), 3, 0), ((5, 7), 3, 1), ((3, 3), 8, 2)])
def test_windows(grid: tuple[int, int], window: int, shift: int) -> None:
    """Attention among the tokens whose shifted rows and columns belong to one window, and no others."""
    q, k, v = heads(3, grid)
    token = torch.arange(grid[0] * grid[1])
    place = torch.stack([(token // grid[1] + shift) // window, (token % grid[1] + shift) // window])
    together = (place[:, :, None] == place[:, None]).all(0)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, together)
    torch.testing.assert_close(attend_in_windows(q, k, v, grid, window, shift), expected)


def test_every_second_block_shifts_its_windows() -> None:
    shifts = [create_mixer("softmax", Site(8, 2, (6, 6), index=i), window=3).shift for i in range(3)]
    assert shifts == [0, 1, 0]
    assert create_mixer("softmax", Site(8, 2, (3, 3), index=1), window=3).shift == 0
