"""nn.MultiheadAttention, replaced by SimA."""

from torch import nn

from tokamix.mixers.sima_multihead import SimA
from tokamix.swap._host import Adapter


def _create(host: nn.MultiheadAttention, num_heads: int) -> SimA:
    module = SimA(
        host.embed_dim,
        num_heads,
        host.dropout,
        bias=host.in_proj_bias is not None,
        kdim=host.kdim,
        vdim=host.vdim,
        batch_first=host.batch_first,
        device="meta",
    )
    for name, parameter in host.named_parameters(recurse=False):
        setattr(module, name, parameter)
    module.out_proj = host.out_proj
    return module


def _check(name: str, host: nn.MultiheadAttention) -> None:
    if host.bias_k is not None or host.add_zero_attn:
        raise ValueError(
            f"{name} adds a token to keys and values (add_bias_kv, add_zero_attn), which SimA cannot; build the model"
            " without these options"
        )


ADAPTERS: dict[type[nn.Module], Adapter] = {
    nn.MultiheadAttention: Adapter(_create, output="out_proj", check=_check),
}
