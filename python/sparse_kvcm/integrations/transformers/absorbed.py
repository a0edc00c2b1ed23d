"""Form "triton" of a DSA model: its decode attention over units where they lie, by Triton.

Keys are not expanded: what makes keys of latents is multiplied into the query, what makes values of
them into the output. So attention reads stored records, rows of an arena or of a pool, and a new
latent goes straight to its slot.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_kvcm.attention import (
    _requirements,
    attention_base,
    sparse_mla_decode,
    step_rows,
    write_step,
)
from sparse_kvcm.attention.mla_tuning import Tuning
from sparse_kvcm.dsa import DsaManager

# Triton's interpreter takes its time by operation, whatever it is done to: few large ones.
_INTERPRETED = Tuning(block=256, num_warps=1, num_stages=1, programs=1)


def check(manager: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what the form cannot run on.

    Raises
    ------
    ValueError
        For a model that is not BF16 or where Triton cannot run, or a manager that is not a DSA
        model's.
    ImportError
        Without triton.
    """
    if not isinstance(manager, DsaManager):
        raise ValueError(
            '[OffloadedCache] manager must be a DsaManager with form "triton", got '
            f"{type(manager).__name__}"
        )
    check_model("OffloadedCache", dtype, device)


def check_model(function: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model that the kernel does not take or Triton cannot run on, as `check` does."""
    if dtype is not torch.bfloat16:
        raise ValueError(f'[{function}] model must be bfloat16 with form "triton", got {dtype}')
    _requirements.check()
    _requirements.check_device(function, 'model, with form "triton",', device)


def tuning_on(device: torch.device) -> Tuning | None:
    """The tuning of sparse MLA for a device; None: the usual one."""
    return _INTERPRETED if device.type == "cpu" else None


def attend(
    manager: DsaManager,
    module: Any,
    layer: int,
    query: torch.Tensor,
    latents: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """One layer of a decode step.

    Parameters
    ----------
    manager : DsaManager
        In a step.
    module : nn.Module
        The attention layer.
    layer : int
        Its index.
    query : torch.Tensor, BF16, shape (b, h, 1, nope + rope)
    latents : torch.Tensor, BF16, shape (b, rank + rope)
        Of the new tokens.
    slots : torch.Tensor, int, shape (b, k)
        Of the selected ones.
    scaling : float

    Returns
    -------
    torch.Tensor, BF16, shape (b, 1, h, v)
    """
    write_step(manager, layer, latents)
    base, rows = attention_base(manager, layer), step_rows(manager, layer, slots).rows
    keys, values = _expansions(module)
    nope = module.qk_nope_head_dim
    q_pass, q_rot = query[:, :, 0, :nope], query[:, :, 0, nope:]
    absorbed = torch.einsum("bhn,hnr->bhr", q_pass, keys)
    output, _ = sparse_mla_decode(
        torch.cat([absorbed, q_rot], -1),
        base.buffers,
        rows,
        layout=base.layout,
        softmax_scale=scaling,
        kv_scale=manager.config.kv_scale,
        tuning=tuning_on(query.device),
    )
    return torch.einsum("bhr,hvr->bhv", output, values)[:, None]


def _expansions(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer expands latents by: to keys ``[h, nope, rank]``, to values ``[h, v, rank]``."""
    weight: torch.Tensor = module.kv_b_proj.weight
    both, nope = weight.view(module.num_heads, -1, weight.shape[1]), module.qk_nope_head_dim
    return both[:, :nope], both[:, nope:]
