"""One process or many: Accelerate over torch.distributed, DDP and FSDP2; precision and numerical settings."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tokamix.distributed import init_process_group
from tokamix.layers import BatchNorm
from tokamix.recipes import Recipe
from tokamix.train.loop.optim import create_optimizer

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
except ImportError as error:
    raise ImportError("training needs Accelerate: pip install 'tokamix[train]'") from error

_log = logging.getLogger("tokamix")


def create_accelerator(recipe: Recipe, device: str | None = None, *, precision: str | None = None) -> Accelerator:
    """Create the accelerator of this process, which torchrun or `accelerate launch` may have started with others.

    Args:
        recipe: its precision is for GPUs; a CPU trains in fp32.
        device: "cpu", "cuda" or "mps"; default: a GPU if there is one.
        precision: requested explicitly, on any device.
    """
    # Accelerate keeps one setting for the whole process, but a process may train several models
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if device not in (None, "cpu", "cuda", "mps"):
        raise ValueError(f"device is {device!r}, but must be cpu, cuda or mps; CUDA_VISIBLE_DEVICES selects GPUs")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no GPU; `tokamix info` shows why, --device cpu trains without one")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("PyTorch finds no MPS device on this machine; --device cpu trains without one")
    cpu = device == "cpu" or (device is None and not (torch.cuda.is_available() or torch.backends.mps.is_available()))
    chosen = precision or ("fp32" if cpu else recipe.precision)
    if cpu and chosen == "fp16":
        raise ValueError("fp16 needs a GPU; train on the CPU with --set precision=fp32")
    if cpu and chosen == "bf16":  # the oneDNN backward pass of bf16 convolutions reads uninitialised memory
        _log.warning("bf16 on a CPU can give NaN with convolutions in PyTorch 2.15; precision=fp32 is safe")
    if cpu or torch.cuda.is_available():
        init_process_group("gloo" if cpu else "nccl")
    return Accelerator(mixed_precision={"fp32": "no"}.get(chosen, chosen), cpu=cpu)


def distribute(
    accelerator: Accelerator, model: nn.Module, recipe: Recipe, fsdp: bool
) -> tuple[nn.Module, nn.Module, Any]:
    """Move a model to the device and distribute it; returns the wrapped model, the module itself and its optimizer."""
    device = accelerator.device
    model.to(device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    if recipe.grad_checkpointing:
        if not hasattr(model, "set_grad_checkpointing"):
            raise ValueError(f"{type(model).__name__} has no checkpointing; train with --set grad_checkpointing=false")
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    if fsdp and accelerator.num_processes > 1:
        shard(model, device.type)
        optimizer = accelerator.prepare_optimizer(create_optimizer(model, recipe, device))
        # the module is distributed already; what is missing is its precision
        wrapped = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    else:
        wrapped, optimizer = accelerator.prepare(model, create_optimizer(model, recipe, device))
    return wrapped, accelerator.unwrap_model(wrapped), optimizer


def synchronise_batch_norm(model: nn.Module, recipe: Recipe) -> str | None:
    """Make BatchNorm use the images of all processes, in place, and return a line about it; None: nothing to do.

    Otherwise a run in several processes would have other losses than in one: each process normalises over its own part
    of the batch. PyTorch synchronises BatchNorm on GPUs only.
    """
    norms = sum(isinstance(m, BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    if not norms or recipe.eval_mode or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not recipe.sync_bn:
        return f"{norms} BatchNorm layers use the images of each process alone (sync_bn: false)"
    if dist.get_backend() != "nccl":
        _log.warning("BatchNorm uses the images of each process alone: PyTorch synchronises it on GPUs only")
        return None
    convert_sync_batchnorm(model)  # timm's version keeps the activations inside its norms
    return f"{norms} BatchNorm layers are synchronised over {dist.get_world_size()} processes"


def release(model: nn.Module) -> None:
    """Remove what Accelerate put around a module's forward, so that its owner gets it back unchanged."""
    for name in ("_is_accelerate_prepared", "_original_forward"):
        model.__dict__.pop(name, None)
    if "forward" in model.__dict__ and hasattr(model.__dict__["forward"], "__wrapped__"):
        del model.forward


def shard(model: nn.Module, device_type: str) -> None:
    """Apply FSDP2 over all processes: to every block, that is, every child of lists and sequences, then to the rest.

    Weights are gathered for each forward pass and released after it, also at the root, so that no weights of an
    evaluation are left for the next step.
    """
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    blocks = dict.fromkeys(child for module in lists for child in module if any(True for _ in child.children()))
    for block in reversed(blocks):  # inner blocks first
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process; the result is the same in all of them."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return flag
    result = torch.tensor(float(flag), device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return bool(result.item())


def broadcast_from_main(value: Any) -> Any:
    """The value of rank 0, in every process."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


@contextmanager
def numerics(device: torch.device, deterministic: bool, fixed_size: bool) -> Iterator[None]:
    """PyTorch's numerical settings for a run; the previous ones are restored afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    benchmark, cudnn_attention = torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by PyTorch
        torch.use_deterministic_algorithms(True)
    # cuDNN's attention kernel can give NaN gradients (pytorch/pytorch issue 196678); seen here with 64 tokens
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda" and not deterministic:
        torch.set_float32_matmul_precision("high")
        # it tries algorithms for each new size: a detector has a new number of regions at every step, and a segmenter
        # is evaluated on images of all sizes
        torch.backends.cudnn.benchmark = fixed_size
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        if torch.get_float32_matmul_precision() != before[1]:  # even the same value makes compiled code compile again
            torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
