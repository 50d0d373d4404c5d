"""Calibration: fit new mixers to the attention they replace on a few images, in closed form.

After a swap the outputs of SimA are one to three orders of magnitude too small, so a pretrained network starts with its
attention almost off. Calibration rewrites weights that exist: it adds no parameters, draws no random numbers and takes
no gradient steps. Three fits, each by least squares:

- Queries and keys of SimA. SimA's weights are bilinear in the tokens, those of softmax are not; the best bilinear
  approximation of a head's attention matrix, as a function of its queries, keys and a constant, is a small matrix M.
  Its factors become the new projections. They are rotated so that every channel has the same norm: SimA divides each
  channel by its norm, which would change their proportions otherwise.
- The bank of weight mixing becomes the logarithm of the mean attention at each displacement.
- A gain for each head, then the output projection, so that the mixer's output is that of the attention.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tokamix.layers import split_heads
from tokamix.mixers.weight_mixing import WeightMixing
from tokamix.swap.attention import ImageSize, Swapped, to_tokens, token_grid
from tokamix.swap.bank import displacements, set_entries

OUTPUTS = ("proj", "out_proj", "refine.proj")  # names of output projections
RIDGE = 1e-2  # of the output projection, relative to the energy of each feature; it keeps the projection at 0 features
DAMPING = 1e-4  # of the bilinear fit
STEPS = 8  # of conjugate gradients; more do not change the accuracy
MATRIX_ELEMENTS = 2**26  # of the attention matrices held at a time
Images = Tensor | Iterable[Tensor]


@torch.no_grad()
def calibrate_mixers(
    model: nn.Module, hosts: Mapping[str, nn.Module], original: nn.Module, images: Images
) -> dict[str, float]:
    """Fit the new mixers of a model to those they replace, in place.

    Every mixer is fitted on the activations of the original network, so the blocks do not depend on each other.

    Args:
        model: the network after the swap.
        hosts: the replaced mixers, by their name in the model; modules of `original`.
        original: the network before the swap, with its own copy of the weights.
        images: a batch (B, C, H, W), normalised, or several.

    Returns:
        The squared error of each mixer's output, relative to the variance of the replaced one's: 0 is a perfect copy.
    """
    batches = _list_batches(images)
    mixers = {name: model.get_submodule(name) for name in hosts}
    sizes: list[Any] = [module.seen_size for module in model.modules() if hasattr(module, "seen_size")]
    training = {module: module.training for network in (model, original) for module in network.modules()}
    model.eval(), original.eval()
    try:
        fits = {name: fit for name, host in hosts.items() if (fit := _input_fit(mixers[name], host)) is not None}
        _observe(original, {hosts[name]: fit.add for name, fit in fits.items()}, batches, sizes)
        for fit in fits.values():
            fit.solve()
        outputs = {name: OutputFit(mixers[name], host) for name, host in hosts.items()}
        watchers = {fit.host_layer: fit.see for fit in outputs.values() if fit.host_layer is not None}
        watchers |= {hosts[name]: fit.add for name, fit in outputs.items()}
        _observe(original, watchers, batches, sizes)
        return {name: fit.solve() for name, fit in outputs.items()}
    finally:
        for module, mode in training.items():
            module.training = mode


def describe_unfitted(model: nn.Module, hosts: Mapping[str, nn.Module]) -> list[str]:
    """A note on the mixers that a calibration leaves as they are."""
    mixers = {name: model.get_submodule(name) for name in hosts}
    names = [
        name
        for name, mixer in mixers.items()
        if _output_layer(mixer) is None and _input_fit(mixer, hosts[name]) is None
    ]
    return [f"not calibrated: {len(names)} without a linear output projection, such as {names[0]}"] if names else []


@torch.no_grad()
def check_images(original: nn.Module, images: Images) -> list[Tensor]:
    """The batches of images for a calibration, after a trial with one image of each shape."""
    batches = _list_batches(images)
    own = next(original.parameters())
    training = {module: module.training for module in original.modules()}
    try:
        for batch in {(batch.shape[1:], batch.dtype): batch for batch in reversed(batches) if len(batch)}.values():
            original.eval()(batch[:1].to(own.device))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"the model does not take the images for calibration, {tuple(batch.shape)} {batch.dtype}: {error}"
        ) from error
    finally:
        for module, mode in training.items():
            module.training = mode
    return batches


def _list_batches(images: Images) -> list[Tensor]:
    single = isinstance(images, Tensor) or not isinstance(images, Iterable)
    batches: list[Any] = [images] if single else list(images)
    wrong = next((batch for batch in batches if not isinstance(batch, Tensor) or batch.ndim != 4), None)
    if wrong is not None:
        given = tuple(wrong.shape) if isinstance(wrong, Tensor) else type(wrong).__name__
        raise ValueError(f"calibration needs images (B, C, H, W) without labels, got {given}")
    if not batches or not sum(map(len, batches)):
        raise ValueError("calibration needs images, got none; give a batch (B, C, H, W)")
    if not all(batch.isfinite().all() for batch in batches):
        raise ValueError("the images for calibration have values that are not finite; leave these images out")
    return batches


def _observe(
    original: nn.Module,
    watchers: Mapping[nn.Module, Callable[..., None]],
    batches: Sequence[Tensor],
    sizes: Sequence[ImageSize],
) -> None:
    """Run the original on all images, and call each watcher with the input and the output of its module.

    `sizes` tell the new mixers, which do not see the images themselves, the grids of their tokens.
    """
    if not watchers:
        return
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        for module, watch in watchers.items():
            hook = module.register_forward_hook(
                lambda _, args, kwargs, output, watch=watch: watch(args, kwargs, output), with_kwargs=True
            )
            stack.callback(hook.remove)
        torch.backends.mha.set_fastpath_enabled(False)  # it skips the modules inside nn.TransformerEncoderLayer
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        device = next(original.parameters()).device
        for batch in batches:
            for size in sizes:
                size.size = (batch.shape[-2], batch.shape[-1])
            original(batch.to(device))


def _input_fit(mixer: Any, host: Any) -> Any:
    """The fit of what a new mixer computes from its input, where there is one."""
    if not (isinstance(getattr(host, "qkv", None), nn.Linear) and hasattr(host, "q_norm") and hasattr(host, "k_norm")):
        return None  # not the softmax attention of timm or of a body
    if isinstance(getattr(mixer, "mixer", mixer), WeightMixing):
        return BankFit(mixer, host)
    if not any("SimA" in type(module).__name__ for module in (mixer, getattr(mixer, "mixer", None))):
        return None
    norms = (getattr(mixer, name, nn.Identity()) for name in ("q_norm", "k_norm"))
    plain = all(isinstance(norm, nn.Identity) for norm in norms)
    return BilinearFit(mixer, host) if plain and mixer.num_heads == host.num_heads else None


def _attention(host: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (B, H, N, D) of a softmax attention before their norms, and its matrix (B, H, N, N)."""
    q, k, _ = (split_heads(part, host.num_heads) for part in host.qkv(x).chunk(3, dim=-1))
    scale = getattr(host, "scale", q.shape[-1] ** -0.5)
    return q, k, (host.q_norm(q) @ host.k_norm(k).mT * scale).softmax(-1)


def _parts(x: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Tokens (B, N, C) in parts whose attention matrices fit into half a gigabyte."""
    return x.split(max(1, MATRIX_ELEMENTS // (num_heads * x.shape[1] ** 2)))


class BilinearFit:
    """Queries and keys of SimA whose products are the best bilinear approximation of a softmax attention matrix.

    For one head with queries q, keys k and attention A over N tokens it minimises the sum over all images of
    |N A - q' M k'|^2, where q' and k' have a constant appended if the projection has a bias. The normal equations,
    sum of (q'^T q') M (k'^T k') = sum of q'^T N A k', are solved by conjugate gradients.
    """

    def __init__(self, mixer: Any, host: Any) -> None:
        self.mixer, self.host = mixer, host
        self.grams_q: list[Tensor] = []  # (B, H, D', D') of each batch
        self.grams_k: list[Tensor] = []
        self.products: list[Tensor] = []

    def add(self, args: Any, kwargs: Any, output: Any) -> None:
        """Add a batch of tokens."""
        for x in _parts(_first(args, kwargs).flatten(1, -2), self.host.num_heads):
            q, k, attention = _attention(self.host, x)
            if self.host.qkv.bias is not None:
                q, k = (torch.cat([part, torch.ones_like(part[..., :1])], -1) for part in (q, k))
            q, k = q.double(), k.double()
            self.grams_q.append(q.mT @ q / x.shape[1])
            self.grams_k.append(k.mT @ k / x.shape[1])
            self.products.append(q.mT @ attention.double() @ k / x.shape[1])

    def solve(self) -> None:
        """Rewrite the projections of queries and keys."""
        grams_q, grams_k = torch.cat(self.grams_q).transpose(0, 1), torch.cat(self.grams_k).transpose(0, 1)
        target = torch.cat(self.products).mean(0)  # (H, D', D')
        weight, bias = self.mixer.qkv.weight, self.mixer.qkv.bias
        heads, width = self.host.num_heads, len(weight) // (3 * self.host.num_heads)
        rotation = _dct(width).to(target)
        for head in range(heads):
            left, right = _bilinear_factors(grams_q[head], grams_k[head], target[head], width)
            for part, factor in enumerate((left @ rotation, right @ rotation)):  # (D', D)
                start = part * heads * width + head * width
                rows = slice(start, start + width)
                weight[rows] = (factor[:width].T @ self.host.qkv.weight[rows].double()).to(weight)
                if bias is not None:
                    bias[rows] = (factor[:width].T @ self.host.qkv.bias[rows].double() + factor[-1]).to(bias)


def _bilinear_factors(grams_q: Tensor, grams_k: Tensor, target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors L, R (D', rank) of M = L R^T, the solution of mean(Gq M Gk) = target, cut to its largest components."""
    (root_q, inverse_q), (root_k, inverse_k) = _roots(grams_q.mean(0)), _roots(grams_k.mean(0))

    def apply(m: Tensor) -> Tensor:
        return (grams_q @ m @ grams_k).mean(0) + DAMPING * m

    def precondition(r: Tensor) -> Tensor:
        return inverse_q @ inverse_q @ r @ inverse_k @ inverse_k

    m = precondition(target)
    residual = target - apply(m)
    direction = step = precondition(residual)
    size = (residual * step).sum()
    for _ in range(STEPS):
        image = apply(direction)
        length = size / (direction * image).sum().clamp_min(torch.finfo(m.dtype).tiny)
        m, residual = m + length * direction, residual - length * image
        step = precondition(residual)
        before, size = size, (residual * step).sum()
        direction = step + size / before.clamp_min(torch.finfo(m.dtype).tiny) * direction
    u, s, vt = torch.linalg.svd(root_q @ m @ root_k)
    root = s[:rank].sqrt()
    return inverse_q @ u[:, :rank] * root, inverse_k @ vt[:rank].T * root


def _roots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a Gram matrix, and its inverse."""
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    values, vectors = torch.linalg.eigh(damped)
    return vectors * values.sqrt() @ vectors.T, vectors * values.rsqrt() @ vectors.T


def _dct(size: int) -> Tensor:
    """An orthogonal matrix whose first row is constant: the largest component is spread evenly over all channels."""
    n = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi * n[:, None] * (n + 0.5) / size) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix


class BankFit:
    """The bank of weight mixing: the logarithm of each head's mean attention at every displacement."""

    def __init__(self, mixer: Any, host: Any) -> None:
        self.mixer: Any = getattr(mixer, "mixer", mixer)
        self.host, self.swapped = host, mixer
        self.prefix = getattr(mixer, "prefix", 0)
        self.total: Tensor | None = None  # of the attention (H, displacements), and of the pairs of tokens
        self.pairs: Tensor | None = None

    def add(self, args: Any, kwargs: Any, output: Any) -> None:
        """Add a batch of tokens of a grid."""
        x, n = _first(args, kwargs), self.prefix
        x, size = to_tokens(x, "tokens")
        if isinstance(self.swapped, Swapped):
            grid = size or token_grid(x.shape[1] - n, self.swapped.image_size.size)
        else:
            grid = args[1]
        parts = _parts(x, self.host.num_heads)
        attention: Any = sum(_attention(self.host, part)[2].sum(0).double() for part in parts)
        attention = attention[:, n:, n:] * (x.shape[1] / len(x))
        index, held = displacements(grid, self.mixer.window, x.device)
        size = self.mixer.bank[0].numel()
        total = attention.new_zeros(len(attention), size).index_add_(1, index[held], attention[:, held])
        pairs = attention.new_zeros(size).index_add_(0, index[held], attention.new_ones(int(held.sum())))
        self.total = total if self.total is None else self.total + total
        self.pairs = pairs if self.pairs is None else self.pairs + pairs

    def solve(self) -> None:
        """Rewrite the first entries of the bank, one for each head, and let each head's policy choose its own."""
        if self.total is None or self.pairs is None:  # the original does not call this module
            return
        mean = (self.total / self.pairs.clamp_min(1)).clamp_min(1e-6)
        mean[:, self.pairs == 0] = mean[:, self.pairs > 0].min()
        set_entries(self.mixer, mean.log(), adapt=0.1)  # the choice adapts to the tokens from here on


class OutputFit:
    """Gains of the heads and the output projection of a mixer, so that its output is that of the replaced attention.

    What the mixer gives to its output projection is a feature f of each token. The output of the host's projection, or
    of the host, is the target, W f + b in the least squares sense: first one gain per head on the columns of W, then W
    and b themselves, with a ridge penalty on the change of W.
    """

    def __init__(self, mixer: nn.Module, host: Any) -> None:
        self.mixer = mixer
        self.layout = mixer.adapter.layout if isinstance(mixer, Swapped) else "tokens"
        self.name = _output_layer(mixer)
        # a swapped attention projects tokens in the host's order; mixers of bodies may project windows
        comparable = self.name is not None and isinstance(mixer, Swapped)
        self.host_layer = _submodule(host, str(self.name)) if comparable else None
        self.seen: list[Tensor] = []  # outputs of the host's layer since the last call of `add`
        self.heads = getattr(host, "num_heads", 1)
        self.gram: Any = 0.0  # of the features and a constant
        self.product: Any = 0.0
        self.energy: Any = 0.0
        self.mean: Any = 0.0
        self.error: Any = 0.0  # of a mixer without an output projection
        self.count = 0.0  # sum of the weights of the tokens

    def see(self, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the output of the host's own projection: the target, whatever the host does with it then."""
        self.seen.append(output)

    def add(self, args: Any, kwargs: Any, output: Any) -> None:
        """Add the features and targets of a batch of tokens."""
        seen, self.seen = self.seen, []
        output = output[0] if isinstance(output, tuple) else output
        if self.name is None:
            target = _tokens(output, self.layout)
            mixed = self.mixer(*args, **kwargs)
            mixed = mixed[0] if isinstance(mixed, tuple) else mixed
            self.error = self.error + (_tokens(mixed, self.layout) - target).square().sum()
            self._add_moments(target, torch.ones_like(target[:, :1]))
            return
        if len(seen) == 1:
            output = seen[0]
            features, layout = self._layer_input(args, kwargs), _layer_layout(self.mixer.get_submodule(self.name))
        else:  # the host uses the weights of its projection without calling it
            features, layout = self._output_without_layer(args, kwargs), self.layout
        features, target = _tokens(features, layout), _tokens(output, layout)
        weight = self._row_weights(output, target)
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        self._add_moments(target, weight)
        root = weight.sqrt()
        self.gram = self.gram + (features * root).T @ (features * root)
        self.product = self.product + (features * root).T @ (target * root)

    def _add_moments(self, target: Tensor, weight: Tensor) -> None:
        self.mean, self.count = self.mean + (weight * target).sum(0), self.count + float(weight.sum())
        self.energy = self.energy + (weight * target.square()).sum()

    def _layer_input(self, args: Any, kwargs: Any) -> Tensor:
        """What the mixer gives to its output projection."""
        inputs: list[Tensor] = []
        layer = self.mixer.get_submodule(str(self.name))
        with layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
            self.mixer(*args, **kwargs)
        return inputs[-1]

    def _output_without_layer(self, args: Any, kwargs: Any) -> Tensor:
        """The mixer's output with its output projection left out."""
        path, _, name = str(self.name).rpartition(".")
        parent: Any = self.mixer.get_submodule(path)
        projection = getattr(parent, name)
        setattr(parent, name, nn.Identity())
        try:
            mixed = self.mixer(*args, **kwargs)
        finally:
            setattr(parent, name, projection)
        return mixed[0] if isinstance(mixed, tuple) else mixed

    def _row_weights(self, output: Tensor, rows: Tensor) -> Tensor:
        """Weights (rows, 1) of the tokens.

        Prefix tokens of mixers on a grid attend as before the swap: together they weigh as much as the patch tokens, so
        that the fit to these does not spoil the class token.
        """
        weight = torch.ones_like(rows[:, :1])
        prefix, product = getattr(self.mixer, "prefix", 0), getattr(self.mixer, "mixer", None)
        if prefix and getattr(product, "on_grid", False):
            weight.view(*output.shape[:-1], 1)[..., :prefix, :] = max(1.0, (output.shape[-2] - prefix) / prefix)
        return weight

    def solve(self) -> float:
        """Rewrite the output projection; returns the relative error."""
        if not self.count:
            return float("nan")  # the original does not call this module
        variance = self.energy - (self.mean / self.count).square().sum() * self.count
        if self.name is None:
            return (self.error / variance).item()
        projection: Any = self.mixer.get_submodule(self.name)
        matrix = projection.weight.flatten(1)  # also of 1x1 convolutions
        bias = projection.bias if projection.bias is not None else torch.zeros_like(matrix[:, 0])
        weight = torch.cat([matrix, bias[:, None]], 1).double()  # (out, features + 1)
        self.heads = self.heads if matrix.shape[1] % self.heads == 0 else 1
        weight[:, :-1] *= self._gains(weight).repeat_interleave(matrix.shape[1] // self.heads)
        gram, used = self.gram, slice(None) if projection.bias is not None else slice(-1)
        penalty = RIDGE * torch.diag(gram.diagonal().clamp_min(gram.diagonal().mean() * 1e-9))
        penalty[-1, -1] = 0.0 if projection.bias is not None else 1.0
        residual = self.product - gram @ weight.T
        change = torch.linalg.solve((gram + penalty)[used, used], residual[used]).T
        weight[:, used] += change
        projection.weight.copy_(weight[:, :-1].view_as(projection.weight))
        if projection.bias is not None:
            projection.bias.copy_(weight[:, -1])
        error = self.energy - 2 * (weight.T * self.product).sum() + ((weight @ gram) * weight).sum()
        return (error / variance).item()

    def _gains(self, weight: Tensor) -> Tensor:
        """The factor of each head's columns with the least error."""
        width = (weight.shape[1] - 1) // self.heads
        # gram of the heads' contributions to the output, (heads, heads), around the bias
        columns = weight[:, :-1].unflatten(1, (self.heads, width))
        grams = self.gram[:-1, :-1].unflatten(0, (self.heads, width)).unflatten(2, (self.heads, width))
        matrix = torch.einsum("ohi,higj,ogj->hg", columns, grams, columns)
        product = (self.product[:-1] - self.gram[:-1, -1:] @ weight[:, -1:].T).unflatten(0, (self.heads, width))
        right = torch.einsum("ohi,hio->h", columns, product)
        damping = 1e-6 * matrix.diagonal().mean().clamp_min(1e-30) * torch.eye(self.heads).to(matrix)
        return torch.linalg.solve(matrix + damping, right)


def _output_layer(mixer: nn.Module) -> str | None:
    """The name of a mixer's output projection, a linear layer or a 1x1 convolution; None if it has none."""
    for name in (mixer.adapter.output, "mixer.proj") if isinstance(mixer, Swapped) else OUTPUTS:
        root = _submodule(mixer, name)
        layers = [] if root is None else [path for path, layer in root.named_modules() if _is_linear(layer)]
        if layers:
            return f"{name}.{layers[-1]}".rstrip(".")
    return None


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or (
        isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.weight[0, 0].numel() == 1
    )


def _layer_layout(layer: nn.Module) -> str:
    return "nchw" if isinstance(layer, nn.Conv2d) else "tokens"


def _first(args: Any, kwargs: Any) -> Any:
    return next(iter((*args, *kwargs.values())))


def _tokens(tensor: Tensor, layout: str) -> Tensor:
    """Tokens as rows, in float64."""
    if layout == "nchw" and tensor.ndim == 4:
        tensor = tensor.movedim(1, -1)
    return tensor.flatten(0, -2).double()
