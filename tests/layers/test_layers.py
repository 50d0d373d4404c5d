"""Layers that more than one family stands on."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import (
    GELU,
    Layers,
    MapConv,
    PatchConv,
    PositionTable,
    SoftmaxProduct,
    map_to_tokens,
    merge_heads,
    near_gelu,
    split_heads,
)


class Positioned(nn.Module):
    """Positions added to a map (B, H, W, C)."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.positions = PositionTable(4, (4, 6), mode=mode, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.positions(*map_to_tokens(x))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_positions_exported_once_serve_all_grids(mode: str) -> None:
    """Exported from another grid, they are right at the table's own, where nothing needs resizing, and elsewhere."""
    model = Positioned(mode)
    dynamic = torch.export.Dim.AUTO
    example = torch.zeros(2, 7, 5, 4, dtype=torch.float64)
    exported = torch.export.export(model, (example,), dynamic_shapes=({0: dynamic, 1: dynamic, 2: dynamic},)).module()
    for grid in ((4, 6), (3, 9)):
        x = torch.randn(3, *grid, 4, dtype=torch.float64)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-9, atol=1e-11)
    table = model.positions.table
    torch.testing.assert_close(model(torch.zeros(1, 4, 6, 4, dtype=torch.float64)), table)


def test_prefix_positions_are_not_resized() -> None:
    positions = PositionTable(4, (2, 2), prefix=1)
    out = positions(torch.zeros(1, 1 + 3 * 3, 4), (3, 3))
    assert torch.equal(out[:, :1], positions.table[:, :1])
    expected = F.interpolate(positions.table[:, 1:].mT.unflatten(2, (2, 2)), size=(3, 3), mode="bilinear")
    torch.testing.assert_close(out[:, 1:], expected.flatten(2).mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_keep_their_dtype(dtype: torch.dtype) -> None:
    positions = PositionTable(4, (2, 2), mode="bicubic", dtype=dtype)
    assert positions(torch.zeros(1, 9, 4, dtype=dtype), (3, 3)).dtype == dtype
    positions.set_grid((3, 5))
    assert positions.table.dtype == dtype
    assert positions.table.shape == (1, 15, 4)


def test_softmax_product_takes_fewer_keys_than_queries() -> None:
    x, y = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    q, k, v = split_heads(x, 2), split_heads(y, 2), split_heads(y + 1, 2)
    out = merge_heads(SoftmaxProduct(0.3)(q, k, v))
    for h in range(2):
        part = slice(6 * h, 6 * (h + 1))
        expected = (0.3 * x[..., part] @ y[..., part].mT).softmax(-1) @ (y + 1)[..., part]
        torch.testing.assert_close(out[..., part], expected)


def test_near_gelu_is_near() -> None:
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64, requires_grad=True)
    near, exact = near_gelu(x), F.gelu(x)
    assert (near - exact).abs().max() < 3e-5
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (near, exact))
    assert (next(slopes) - next(slopes)).abs().max() < 2e-4
    torch.testing.assert_close(GELU()(x), exact)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{"padding": 1, "stride": 2}, {"padding": (0, 2), "stride": (1, 2), "dilation": 2}])
def test_heavy_convolutions_are_products(options: dict[str, object], batch: int) -> None:
    conv = MapConv(48, 96, 3, **options).double()
    x = torch.randn(batch, 7, 6, 48, dtype=torch.float64)
    expected = conv(x)  # with gradients: as a convolution
    with torch.inference_mode():
        assert conv._is_heavy(x.permute(0, 3, 1, 2)) == (batch == 1)
        torch.testing.assert_close(conv(x), expected.detach())
        assert conv(x).stride() == expected.stride()


@pytest.mark.parametrize("size", [(16, 20), (23, 27)])  # the second leaves pixels over
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("patch", [(8, 10), (4, 2)])  # a product, and on a CPU none
def test_patches_are_convolved(patch: tuple[int, int], bias: bool, size: tuple[int, int]) -> None:
    conv = PatchConv(3, 6, patch, dtype=torch.float64)
    conv.bias = conv.bias if bias else None
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    parameters = [x, *conv.parameters()]
    out, expected = conv(x), F.conv2d(x, conv.weight, conv.bias, conv.stride)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous(memory_format=torch.channels_last)
    gradients = (torch.autograd.grad(y.sin().sum(), parameters) for y in (out, expected))
    torch.testing.assert_close(*gradients)


def test_patches_of_other_channels_are_refused() -> None:
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 1 channels"):
        PatchConv(3, 6, 8)(torch.zeros(1, 1, 16, 16))


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 2, stride=2, bias=False)])
def test_folding(conv: nn.Module) -> None:
    """From the running statistics, whatever the mode; frozen stays frozen, and once is enough."""
    layers = Layers(conv, nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False)
    for tensor in (layers[1].running_mean, layers[1].weight, layers[1].bias):
        nn.init.normal_(tensor)
    nn.init.uniform_(layers[1].running_var, 0.5, 2.0)
    x = torch.randn(2, 3, 5, 6)
    expected = layers.eval()(x)
    layers.train().reparameterize()
    layers.reparameterize()
    assert [type(layer) for layer in layers] == [type(conv), nn.Identity, nn.ReLU]
    assert not layers[0].bias.requires_grad
    torch.testing.assert_close(layers(x), expected)


def test_folding_norms_of_higher_precision() -> None:
    layers = Layers(nn.Linear(3, 4).bfloat16(), nn.BatchNorm1d(4))
    layers.reparameterize()
    assert layers[0].bias.dtype == torch.bfloat16
    assert layers(torch.randn(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
