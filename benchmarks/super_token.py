"""Super token attention on a GPU: errors of the kernels, then times of the kernels and of the module.

    python benchmarks/super_token.py [tune]
    python benchmarks/super_token.py --cpu [compile] [profile]

With `tune`, all plans of the kernels are timed. With `--cpu`, STViT-S on the CPU is compared with the same network as
the authors wrote it: channels-first, 1x1 convolutions instead of linear layers, convolutions with one-hot kernels to
fold and unfold the super tokens. Ours is what `create_model` returns; "folded" has its BatchNorms folded.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tokamix.bench.timing import print_costs, relative_rmse
from tokamix.mixers import SuperTokenAttention
from tokamix.ops import super_token_sample, super_token_scatter

BANDWIDTH = 4.3e9  # bytes per millisecond
CASES = {  # B, H, W, C, heads, cell
    "stvit_small 1": (128, 56, 56, 64, 1, 8),
    "stvit_small 2": (128, 28, 28, 128, 2, 4),
    "1024 px 1": (4, 256, 256, 64, 1, 8),
    "stvit_base 1": (128, 56, 56, 96, 2, 8),
}
WARPS = (1, 2, 4, 8)


def inputs(case: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    *shape, _, _ = CASES[case]
    torch.manual_seed(0)
    return torch.randn(shape, device="cuda", dtype=dtype)


def kernel_runs(case: str, warps: int | None) -> dict[str, Callable[[], object]]:
    """Each kernel separately."""
    from tokamix.ops.super_token import kernels

    x, cell = inputs(case), (CASES[case][-1],) * 2
    plan = kernels.plan_for(x.shape[-1], cell)
    plan = plan._replace(warps=warps) if warps else plan
    tokens, association, weight = kernels.sample(x, cell, 1)
    wide = tokens.float()
    parts, weights = kernels.gather(x, association, cell, wide)
    return {
        "sample": lambda: kernels.sample(x, cell, 1, plan),
        "associate and gather": lambda: kernels.gather(x, association, cell, wide, plan),
        "gather": lambda: kernels.gather(x, association, cell, None, plan),
        "combine": lambda: kernels.combine(parts, weights, tokens, weight),
        "scatter": lambda: kernels.scatter(tokens, association, cell, None, plan),
        "scatter divided": lambda: kernels.scatter(tokens, association, cell, weight, plan),
    }


def compile_plans(case: str, warps: int) -> None:
    for run in kernel_runs(case, warps).values():
        run()


def tune() -> None:
    from triton.testing import do_bench_cudagraph

    start = time.time()
    jobs = [(case, warps) for case in CASES for warps in WARPS]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # fills Triton's cache
        list(pool.map(compile_plans, *zip(*jobs, strict=True)))
    print(f"compiled in {time.time() - start:.0f} s")
    for case in CASES:
        runs = {warps: kernel_runs(case, warps) for warps in WARPS}
        for name in runs[WARPS[0]]:
            times = [f"{w}: {do_bench_cudagraph(runs[w][name], rep=5) * 1e3:.1f}" for w in WARPS]
            print(f"{case:14s} {name:20s} us by warps {', '.join(times)}", flush=True)


def errors() -> None:
    """Relative error of outputs and gradients against float64, and that of plain PyTorch in the same precision."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape, cell in (((2, 16, 24, 64), (8, 8)), ((2, 13, 9, 96), (4, 4)), ((1, 7, 6, 33), (2, 3))):
            x = torch.randn(shape, device="cuda", dtype=dtype)
            results = []
            for cast, backend in ((torch.float64, "eager"), (dtype, "eager"), (dtype, "triton")):
                leaf = x.to(cast).requires_grad_()
                tokens, association = super_token_sample(leaf, cell, backend=backend)
                out = super_token_scatter(tokens, association, cell, backend=backend)
                seed = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(cast)
                results.append((tokens, association, out, *torch.autograd.grad(out, leaf, seed)))
            line = " ".join(
                f"{relative_rmse(k, e):.1e} ({relative_rmse(p, e):.1e})" for e, p, k in zip(*results, strict=True)
            )
            print(f"error {str(dtype)[6:]:9s} {shape!s:18s}: {line}")


def table() -> None:
    for case in CASES:
        try:
            print(row(case), flush=True)
        except Exception as error:
            print(f"{case}: {type(error).__name__} {str(error)[:300]}")


def row(case: str) -> str:
    """The whole module: called from Python, replayed as a CUDA graph, and on the plain backend."""
    from triton.testing import do_bench, do_bench_cudagraph

    _, height, width, dim, heads, cell = CASES[case]
    x, grid = inputs(case).flatten(1, 2), (height, width)
    leaf, seed = x.detach().requires_grad_(), torch.randn_like(x)
    mixer = SuperTokenAttention(dim, heads, cell, device="cuda", dtype=x.dtype)
    plain = SuperTokenAttention(dim, heads, cell, backend="eager", device="cuda", dtype=x.dtype)
    parameters = [leaf, *mixer.parameters()]

    def both(module: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(module(leaf, grid), [leaf, *module.parameters()], seed)

    with torch.no_grad():
        called, eager = do_bench(lambda: mixer(x, grid)), do_bench(lambda: plain(x, grid))
        graph = do_bench_cudagraph(lambda: mixer(x, grid), rep=20)
    called_both, eager_both = do_bench(both(mixer)), do_bench(both(plain))
    graph_both = graph_of(both(mixer), parameters)
    limit = (3 * x.numel() + 2 * x.numel() // dim * 9) * 2 / BANDWIDTH
    return (
        f"{case:14s} forward: graph {graph:.3f} called {called:.3f} plain {eager:.3f} (limit {limit:.3f})"
        f" forward+backward: graph {graph_both:.3f} called {called_both:.3f} plain {eager_both:.3f} ms"
    )


def graph_of(step: Callable[[], object], parameters: list[Tensor]) -> float:
    """Milliseconds of a training step replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def as_conv(layer: nn.Linear | nn.Conv2d) -> nn.Conv2d:
    """A plain convolution with the layer's weights."""
    if isinstance(layer, nn.Linear):
        conv = nn.Conv2d(layer.in_features, layer.out_features, 1)
    else:
        shape = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
        conv = nn.Conv2d(*shape, groups=layer.groups)
    conv.load_state_dict({"weight": layer.weight.view(conv.weight.shape), "bias": layer.bias})
    return conv


def as_norm(norm: nn.BatchNorm1d) -> nn.BatchNorm2d:
    copy = nn.BatchNorm2d(norm.num_features)
    copy.load_state_dict(norm.state_dict())
    return copy


class FoldedSuperTokens(nn.Module):
    """Super token attention on (B, C, H, W), with one-hot convolutions to gather and scatter the 3x3 neighbours."""

    def __init__(self, mixer: SuperTokenAttention) -> None:
        super().__init__()
        self.heads, self.cell = mixer.refine.num_heads, mixer.cell[0]
        self.qkv, self.proj = as_conv(mixer.refine.qkv), as_conv(mixer.refine.proj)
        self.scale = self.proj.in_channels**-0.5
        for name, weight in self.qkv.state_dict().items():  # here the queries, keys and values of a head are adjacent
            rows = weight.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)
            getattr(self.qkv, name).data.copy_(rows)
        self.register_buffer("one_hot", torch.eye(9).view(9, 1, 3, 3))

    def unfold(self, x: Tensor) -> Tensor:
        batch, channels, p, q = x.shape
        return F.conv2d(x.reshape(-1, 1, p, q), self.one_hot, padding=1).view(batch, channels * 9, p * q)

    def fold(self, x: Tensor, p: int, q: int) -> Tensor:
        return F.conv_transpose2d(x.reshape(-1, 9, p, q), self.one_hot, padding=1)

    def attend(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(x).view(batch, self.heads, -1, height * width).chunk(3, dim=2)
        weights = (k.transpose(-1, -2) @ q * (channels // self.heads) ** -0.5).softmax(-2)
        return self.proj((v @ weights).view(batch, channels, height, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.cell == 1:
            return self.attend(x)
        batch, channels, height, width = x.shape
        h = self.cell
        x = F.pad(x, (0, -width % h, 0, -height % h))
        p, q = x.shape[2] // h, x.shape[3] // h
        tokens = F.adaptive_avg_pool2d(x, (p, q))
        pixels = x.view(batch, channels, p, h, q, h).permute(0, 2, 4, 3, 5, 1).reshape(batch, p * q, h * h, channels)
        around = self.unfold(tokens).transpose(1, 2).reshape(batch, p * q, channels, 9)
        association = (pixels @ around * self.scale).softmax(-1)
        weight = self.fold(association.sum(2).transpose(1, 2), p, q)
        tokens = (pixels.transpose(-1, -2) @ association).permute(0, 2, 3, 1)
        tokens = self.fold(tokens, p, q).view(batch, channels, p, q) / (weight + 1e-12)
        around = self.unfold(self.attend(tokens)).transpose(1, 2).reshape(batch, p * q, channels, 9)
        pixels = (around @ association.transpose(-1, -2)).view(batch, p, q, channels, h, h)
        out = pixels.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, p * h, q * h)
        return out[:, :, :height, :width]


class FoldedBlock(nn.Module):
    """A block of STViT on (B, C, H, W)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.cpe, self.norm1 = as_conv(block.cpe), block.norm1
        self.mixer, self.norm2 = FoldedSuperTokens(block.mixer), as_norm(block.norm2)
        self.fc1, self.conv, self.fc2 = as_conv(block.mlp.fc1), as_conv(block.mlp.conv), as_conv(block.mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.cpe(x)
        normed = self.norm1(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
        x = x + self.mixer(normed)
        z = F.gelu(self.fc1(self.norm2(x)))
        return x + self.fc2(z + self.conv(z))


def authors_stvit(model: nn.Module) -> nn.Module:
    """An STViT in channels-first convolutions, with the same weights."""
    layers: list[nn.Module] = []
    stages = [part for stage in model.stages for part in (stage.downsample, *stage.blocks)]
    for layer in (*model.stem, *stages[1:]):  # the first stage does not reduce the map
        parts = list(layer) if isinstance(layer, nn.Sequential) else [layer]
        for part in parts:
            if isinstance(part, nn.Conv2d):
                layers.append(as_conv(part))
            elif isinstance(part, nn.BatchNorm1d):
                layers.append(as_norm(part))
            else:
                layers.append(nn.GELU() if isinstance(part, nn.GELU) else FoldedBlock(part))
    last, norm, act = model.norm
    return nn.Sequential(*layers, as_conv(last), as_norm(norm), act, nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head)


def cpu() -> None:
    import tokamix

    ours = tokamix.create_model("stvit_small").eval()
    models = {"authors": authors_stvit(ours).eval(), "ours": ours, "ours folded": reparameterize_model(ours)}
    if "compile" in sys.argv:
        models["ours compiled"] = torch.compile(models["ours folded"])
    with torch.inference_mode():
        for batch, rounds in ((1, 60), (8, 12)):
            time_alternately(models, torch.randn(batch, 3, 224, 224), rounds)
        if "profile" in sys.argv:
            image = torch.randn(1, 3, 224, 224)
            print_costs(lambda: ours(image), "cpu", calls=5, rows=12)


def time_alternately(models: dict[str, nn.Module], images: Tensor, rounds: int) -> None:
    """Medians of models that run in turn, so that other load affects all alike."""
    expected = models["authors"](images)
    for model in models.values():
        for _ in range(3):  # also warms up
            torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.perf_counter()
            model(images)
            times[name].append(1e3 * (time.perf_counter() - start))
    print(f"{torch.get_num_threads()} threads, batch {len(images)}, load average {os.getloadavg()[0]:.1f}")
    for name, own in times.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(times["authors"], own, strict=True))
        print(
            f"  {name:14s} median {statistics.median(own):6.1f} ms, least {min(own):6.1f} ms, {ratio:.2f}x", flush=True
        )


def main() -> None:
    if "--cpu" in sys.argv:
        cpu()
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    errors()
    if "tune" in sys.argv:
        tune()
    table()


if __name__ == "__main__":
    main()
