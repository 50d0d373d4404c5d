"""One process or many: Accelerate over torch.distributed, DDP and FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tokamix.compile import compile_blocks
from tokamix.distributed import init_process_group
from tokamix.recipes import Recipe
from tokamix.train.loop.optim import create_optimizer

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
except ImportError as error:
    raise ImportError("training needs Accelerate: pip install 'tokamix[train]'") from error


def create_accelerator(precision: str, device: str | None = None) -> Accelerator:
    """This process's place among those that torchrun or `accelerate launch` started; alone otherwise."""
    # Accelerate keeps one setting for the whole process, but a process may train several models
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if device not in (None, "cpu", "cuda", "mps"):
        raise ValueError(f"device is {device!r}, but must be cpu, cuda or mps; CUDA_VISIBLE_DEVICES chooses among GPUs")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU that PyTorch can use; `tokamix info` says why, --device cpu trains without")
    cpu = device == "cpu" or (device is None and not (torch.cuda.is_available() or torch.backends.mps.is_available()))
    if precision == "fp16" and cpu:
        raise ValueError("fp16 needs a GPU; on the CPU train with --set precision=fp32 or precision=bf16")
    if cpu or torch.cuda.is_available():
        init_process_group("gloo" if cpu else "nccl")
    return Accelerator(mixed_precision={"fp32": "no"}.get(precision, precision), cpu=cpu)


def distribute(
    accelerator: Accelerator, model: nn.Module, recipe: Recipe, fsdp: bool
) -> tuple[nn.Module, nn.Module, Any]:
    """A model ready to be trained: wrapped for its forward pass in training, the module itself, and its optimizer."""
    device = accelerator.device
    model.to(device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    if recipe.grad_checkpointing:
        if not hasattr(model, "set_grad_checkpointing"):
            raise ValueError(f"{type(model).__name__} cannot checkpoint; train with --set grad_checkpointing=false")
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    if fsdp and accelerator.num_processes > 1:
        shard(model, device.type)
        optimizer = accelerator.prepare_optimizer(create_optimizer(model, recipe, device))
        # the module is distributed already; what is left is its precision
        wrapped = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    else:
        wrapped, optimizer = accelerator.prepare(model, create_optimizer(model, recipe, device))
    core = accelerator.unwrap_model(wrapped)
    if recipe.compile:
        graphs = device.type == "cuda" and accelerator.num_processes == 1 and recipe.accumulate == 1
        compile_blocks(core, graphs)
    return wrapped, core, optimizer


def release(core: nn.Module) -> None:
    """Take away what Accelerate put around a module's forward, so that its owner can go on with it."""
    for name in ("_is_accelerate_prepared", "_original_forward"):
        core.__dict__.pop(name, None)
    if "forward" in core.__dict__ and hasattr(core.__dict__["forward"], "__wrapped__"):
        del core.forward


def shard(model: nn.Module, device_type: str) -> None:
    """FSDP2 over all processes: every block of a model, which is what its lists and sequences hold, then the rest.

    Weights are gathered for each forward pass and given back after it, also at the root: so that what an evaluation saw
    is never left over for the next step.
    """
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    blocks = dict.fromkeys(child for module in lists for child in module if any(True for _ in child.children()))
    for block in reversed(blocks):  # the inner ones first
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process; the same answer in each."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return flag
    answer = torch.tensor(float(flag), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())
