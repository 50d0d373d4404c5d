"""The part of a network that is exported, as one module from a tensor of images to a tuple of tensors."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tokamix.dense.detector import Detector, batch_images
from tokamix.inference import DTYPES, InferenceConfig

Size = tuple[int, int]


class Graph(nn.Module):
    """Images -> tensors in the order of `names`.

    Args:
        network: in evaluation mode.
        config: of the network.
        preprocessing: take uint8 images (B, H, W, C) and return classes as well; otherwise images are normalised,
            (B, C, H, W).
        features: return the feature maps (B, C, H, W) of a classifier's backbone.
        dtype: of weights and activations; inputs and outputs stay float32.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, network: Any, config: InferenceConfig, preprocessing: bool, features: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self.task, self.preprocessing, self.features, self.dtype = config.task, preprocessing, features, dtype
        self.in_chans = config.in_chans
        mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
        self.register_buffer("mean", 255 * mean)
        self.register_buffer("scale", 1 / (255 * std))

    def example(self, size: Size, batch: int) -> Tensor:
        """Random images of the form that the graph takes."""
        device = self.mean.device
        if self.preprocessing:
            return torch.randint(256, (batch, *size, self.in_chans), dtype=torch.uint8, device=device)
        return torch.randn(batch, self.in_chans, *size, device=device)

    def names(self, outputs: Sequence[Tensor]) -> list[str]:
        """Names of the outputs."""
        if self.features:
            return [f"features_{i}" for i in range(len(outputs))]
        if self.task == "detect":
            return ["boxes", "labels", "scores", "masks"][: len(outputs)]
        if self.task == "segment":
            return ["logits", "classes"][: len(outputs)]
        return ["scores", "classes"] if self.preprocessing else ["logits"]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Run the network."""
        if self.preprocessing:
            images = (images.permute(0, 3, 1, 2).float() - self.mean) * self.scale
        outputs = self._run(images.to(self.dtype))
        return tuple(x.float() if x.is_floating_point() else x for x in outputs)

    def _run(self, images: Tensor) -> Sequence[Tensor]:
        network: Any = self.network
        if self.features:
            return network.forward_intermediates(images, output_fmt="NCHW", intermediates_only=True)
        if isinstance(network, Detector):
            found = network.detect(batch_images(images, network.backbone.strides[-1]))
            return [found[name] for name in ("boxes", "labels", "scores", "masks") if name in found]
        logits = network(images)
        if not self.preprocessing:
            return [logits]
        return [logits if self.task == "segment" else logits.float().softmax(1), logits.argmax(1)]


def create_graph(
    network: nn.Module, config: InferenceConfig, preprocessing: bool, features: bool, precision: str
) -> Graph:
    """Copy a network, fold its BatchNorms and wrap it for export."""
    check_plain(network)
    check_finite(network)
    if features and not hasattr(network, "forward_intermediates"):
        raise ValueError(
            f"{type(network).__name__} has no feature maps; --features needs a classifier that supports"
            " forward_intermediates"
        )
    dtype = DTYPES[precision] if precision in ("fp16", "bf16") else torch.float32
    with torch.no_grad():
        network = reparameterize_model(copy.deepcopy(network).cpu().float().eval(), inplace=True)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    return Graph(network, config, preprocessing, features, dtype).eval()


def check_finite(network: nn.Module) -> None:
    """Refuse weights that are NaN or infinite: a detector with such weights finds nothing, and seems to be right."""
    for name, parameter in network.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device, which has no values; load the weights before the export")
        if not torch.isfinite(parameter).all():
            raise ValueError(f"{name} has values that are NaN or infinite; export weights from before the divergence")


def check_plain(network: nn.Module) -> None:
    """Refuse wrappers and hooks, which an exported graph would silently contain or lose."""
    for name, module in network.named_modules():
        where = name or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{where} is a TorchScript module; export the module that it was made from")
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None):
            raise ValueError(f"{where} is compiled; export the model as it was before torch.compile")
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"{where} is wrapped in {type(module).__name__}; export its `.module`")
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # those of swap_mixer and insert_context_broadcast are part of the network, and traced with it
        if any(not getattr(hook, "__module__", "").startswith("tokamix.swap") for hook in hooks):
            kind = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(f"{kind} has forward hooks, which a graph cannot hold; remove them before the export")
