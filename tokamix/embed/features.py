"""Features of any timm model: the choice of layer and pooling, and features of whole data sets."""

import inspect
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.inference import evaluation_mode

Pool = Literal["model", "token", "avg", "concat"]
CLASS_BLOCKS = ("class_blocks", "cls_attn_blocks")  # names of XCiT's class-attention blocks, ours and timm's


class FeatureExtractor(nn.Module):
    """A model that returns one vector for each image.

    Args:
        model: a timm model.
        pool: "model": the model's own input of its classifier; "token": the class token; "avg": the mean over all
            positions of the image; "concat": the class tokens of the last two class-attention blocks and the means of
            the last two other blocks, each normalised by the model's last norm, side by side (SimA, section 4.3; for
            XCiT).
        layer: block or stage to take "token" or "avg" from, normalised by the model's last norm where it allows that;
            negative ones count from the end. Default: the last.
    """

    def __init__(self, model: Any, pool: str = "model", layer: int | None = None) -> None:
        super().__init__()
        self.model, self.pool, self.layer = model, pool, layer
        name = type(model).__name__
        if pool not in get_args(Pool):
            raise ValueError(f"pool is {pool!r}, but must be one of {', '.join(get_args(Pool))}")
        if layer is not None:
            levels = len(model.feature_info)
            if pool not in ("token", "avg"):
                raise ValueError(f"pool {pool!r} has its own layers; leave out the layer, or use pool avg or token")
            if not -levels <= layer < levels:
                raise ValueError(f"{name} has no layer {layer}: it has {levels}, 0 to {levels - 1}")
        if pool == "token" and not getattr(model, "num_prefix_tokens", 0):
            raise ValueError(f"{name} has no class token; use pool avg or model")
        if pool == "token" and layer is not None and not _returns_prefix_tokens(model):
            raise ValueError(
                f"{name} does not return the class token of each layer; use pool avg, or leave out the layer"
            )
        if pool == "avg" and not hasattr(model, "forward_intermediates"):
            raise ValueError(f"{name} does not return its intermediate features; use pool model")
        self.outputs: list[Tensor] = []
        if pool == "concat":
            class_blocks = next((getattr(model, key) for key in CLASS_BLOCKS if hasattr(model, key)), ())
            if len(class_blocks) < 2:
                raise ValueError(f"{name} has no two class-attention blocks, which pool concat needs; use pool model")
            for block in (*model.blocks[-2:], *class_blocks[-2:]):
                block.register_forward_hook(lambda module, inputs, output: self.outputs.append(output))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> features (B, D)."""
        if self.pool == "avg":
            maps = self._intermediates(images)
            return maps.mean((2, 3))
        if self.pool == "token" and self.layer is not None:
            output = self._intermediates(images, return_prefix_tokens=True)
            if not isinstance(output, tuple):
                raise ValueError(f"{type(self.model).__name__} has no class token in layer {self.layer}; use pool avg")
            return output[1][:, 0]
        self.outputs.clear()
        features = self.model.forward_features(images)
        if self.pool == "token":
            return features[:, 0]
        if self.pool == "concat":
            *blocks, first, second = self.outputs
            parts = [self.model.norm(x).mean(1) for x in blocks] + [self.model.norm(x)[:, 0] for x in (first, second)]
            return torch.cat(parts, 1)
        return self.model.forward_head(features, pre_logits=True)

    def _intermediates(self, images: Tensor, **options: bool) -> Any:
        layer = len(self.model.feature_info) - 1 if self.layer is None else self.layer % len(self.model.feature_info)
        kept = {"norm": True, "intermediates_only": True, **options}
        return self.model.forward_intermediates(images, indices=[layer], **kept)[0]


def _returns_prefix_tokens(model: Any) -> bool:
    forward = getattr(model, "forward_intermediates", None)
    return forward is not None and "return_prefix_tokens" in inspect.signature(forward).parameters


@torch.no_grad()
def extract_features(model: nn.Module, loader: Any, pad_to: int | None = None) -> tuple[Tensor, Tensor]:
    """Features (N, D), in float32, and labels (N,) of all images of a loader; gathered from all processes.

    Args:
        model: returns features (B, D), such as a `FeatureExtractor`.
        loader: of this process's part of the images.
        pad_to: pad shorter batches to this size, so that a compiled model sees a single shape.
    """
    features, labels = [], []
    with evaluation_mode(model):
        for images, answers in loader.epoch(0):
            missing = max(0, (pad_to or 0) - len(images))
            output = model(F.pad(images, (0, 0) * 3 + (0, missing)) if missing else images)
            features.append(output[: len(images)].float())
            labels.append(answers)
    return gather(features, loader.device), gather(labels, loader.device)


def gather(parts: list[Tensor], device: torch.device) -> Tensor:
    """Join tensors along their first axis, over all processes; rank r of n has the rows r, r + n, r + 2n and so on."""
    everyone: list[Any] = [parts]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, [part.cpu() for part in parts])
    ranks = [torch.cat(one) for one in everyone if one]
    if not ranks:
        raise ValueError("there are no images to compute features of")
    joined = torch.cat(ranks).to(device)
    places = [torch.arange(rank, len(joined), world_size) for rank in range(world_size)]
    if world_size == 1 or list(map(len, places)) != list(map(len, ranks)):  # a stream's shards have any number of rows
        return joined
    return joined[torch.cat(places).argsort().to(device)]  # as one process would have them


def effective_rank(features: Tensor) -> float:
    """The effective rank (Roy and Vetterli, 2007) of centred features (N, D), in percent of min(N, D).

    It is exp of the entropy of the normalised singular values: 100 % if all directions matter equally, near 0 if the
    features have collapsed to a line.
    """
    centred = (features - features.mean(0)).double()
    covariance = centred.T @ centred if len(features) > features.shape[1] else centred @ centred.T
    singular = torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt()
    if not singular.sum():
        return 0.0
    share = singular / singular.sum()
    return float(100 * torch.special.entr(share).sum().exp() / len(share))


def feature_std(features: Tensor) -> Tensor:
    """Mean standard deviation of the normalised features (N, D) over the images, times sqrt(D): 0 after a collapse.

    Features that are spread evenly over the sphere have 1.
    """
    features = F.normalize(features.float(), dim=1)
    return features.std(0, unbiased=False).mean() * features.shape[1] ** 0.5
