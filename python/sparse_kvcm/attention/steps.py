"""A manager's open step as attention sees it: rows to read, and slots for what it writes.

The same calls for DSA and DeepSeek-V4, resident and offloaded: only `attention_base` tells where
rows count. In a step that decodes, addresses and shapes are the same every time, so all of it can
be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.attention.pointers import AttentionBase, attention_base
from sparse_kvcm.attention.rows import RowForm, WindowRows, sparse_arena_rows
from sparse_kvcm.attention.write import write_latents
from sparse_kvcm.deepseek_v4.indices import (
    AttentionIndices,
    completed_entries,
    global_indices,
)
from sparse_kvcm.deepseek_v4.manager import ALL, DeepseekV4CacheManager
from sparse_kvcm.deepseek_v4.step import At, DeepseekV4Step
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.dsa.step_tensors import DsaStep
from sparse_kvcm.models import AttentionType

if TYPE_CHECKING:
    import torch

Manager = DsaManager | DeepseekV4CacheManager


def row_form(base: AttentionBase) -> RowForm:
    """Rows that are slots, as FlashMLA and kernels with a page stride count them."""
    pages = min(len(one) for one in base.buffers)
    units = base.layout.units_per_page
    return RowForm(units, pages * units)


def step_rows(
    manager: Manager,
    layer: int,
    slots: torch.Tensor | None = None,
    *,
    selection: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    at: At = ALL,
) -> AttentionIndices:
    """What attention on a layer reads in the open step.

    Parameters
    ----------
    manager : DsaManager or DeepseekV4CacheManager
    layer : int
    slots : torch.Tensor, int, shape (n, k)
        Of the layer's `select`, or of its leader's; None in layers of DeepSeek-V4 that do not
        select.
    selection : torch.Tensor, int32, shape (n, k), optional
        See `sparse_arena_rows`.
    out : torch.Tensor, int32, optional
        Where the rows go.
    at : slice or sequence of int
        DeepSeek-V4 alone: the queries that they are for, as in the manager's calls.

    Returns
    -------
    AttentionIndices
        Window rows, none with DSA, then rows of `attention_base`.

    Raises
    ------
    InvalidArgument
        If an argument does not fit.
    InvalidState
        If no step is open.
    """
    if isinstance(manager, DsaManager):
        step = _dsa_step(manager, "step_rows", at)
        if slots is None:
            raise InvalidArgument("[step_rows] slots must be given: every layer of DSA selects")
        form = row_form(attention_base(manager, layer))
        rows = sparse_arena_rows(slots, form, out=out, selection=selection, batch_rows=step.rows)
        return AttentionIndices(rows, 0)
    v4 = manager.require_step_at("step_rows", at)
    ratio = manager.config.geometry.compress_ratios[layer]
    if (slots is None) != (ratio != 4):
        raise InvalidArgument(
            f"[step_rows] slots must be given at ratio 4 alone, layer {layer} has ratio {ratio}"
        )
    if ratio == 128:
        return manager.attention_indices(layer, at=at)
    window = _window(manager, v4, layer, at)
    if slots is None:
        slots = v4.rows.new_empty((len(window.lengths), 0))
        form = RowForm(1, 0)
    else:
        form = row_form(attention_base(manager, layer))
    places = v4.rows[v4.query_places[at]] if selection is not None else None
    rows = sparse_arena_rows(
        slots, form, window=window, out=out, selection=selection, batch_rows=places
    )
    return AttentionIndices(rows, window.width)


def write_step(
    manager: Manager,
    layer: int,
    values: torch.Tensor,
    *,
    kind: AttentionType | None = None,
    rotary: torch.Tensor | None = None,
    at: At = ALL,
) -> None:
    """Write what the open step adds to a layer, quantised, straight into its slots.

    Parameters
    ----------
    manager : DsaManager or DeepseekV4CacheManager
    layer : int
    values : torch.Tensor, BF16, FP16 or FP32, shape (n, width)
        Of new tokens or queries. Under offload the layer's group has selected before.
    kind : AttentionType, optional
        DeepSeek-V4 alone: COMPRESS (the default), entries that tokens complete, or SWA, windows.
    rotary : torch.Tensor, shape (n, rope), optional
        As in `write_latents`.
    at : slice or sequence of int
        As in `step_rows`.

    Raises
    ------
    InvalidArgument
        If an argument does not fit.
    InvalidState
        If no step is open, or nothing was selected.
    """
    base = attention_base(manager, layer, kind)
    if isinstance(manager, DsaManager):
        group = manager.config.geometry.selection_group_of[layer]
        slots = manager.latents.write_slots(_dsa_step(manager, "write_step", at), group)
    else:
        slots = _v4_slots(manager, layer, AttentionType.COMPRESS if kind is None else kind, at)
    write_latents(
        base.layout, base.buffers, values, slots, rotary=rotary, scale=manager.config.kv_scale
    )


def _v4_slots(
    manager: DeepseekV4CacheManager, layer: int, kind: AttentionType, at: At
) -> torch.Tensor:
    """Slots of each query's new item, -1 (or the trash page) where it has none."""
    step = manager.require_step_at("write_step", at)
    if kind is AttentionType.COMPRESS and layer in manager.access.arenas:
        return manager.write_slots(layer, at)
    lengths = step.query_lengths[at].long()
    if kind is AttentionType.SWA:
        items = lengths - 1
    else:
        items = completed_entries(lengths, manager.config.geometry.compress_ratios[layer])
    table = manager.access.table(step, layer, kind)[step.query_places[at]]
    per_page = manager.access.layout(layer, kind).items_per_page
    return global_indices(table, items[:, None], per_page)[:, 0]


def _window(
    manager: DeepseekV4CacheManager, step: DeepseekV4Step, layer: int, at: At
) -> WindowRows:
    """The window of each query, by the pool's slots, or by page indices in a prompt's step."""
    kind = AttentionType.SWA
    pool = manager.access.pools[manager.config.geometry.compress_ratios[layer], kind][0]
    table, scale, position = step.tables[pool.layer_group], pool.scale, pool.positions[layer]
    if len(step.query_places) != len(step.rows) or step.scratch[pool.layer_group]:
        table, scale, position = manager.access.table(step, layer, kind), 1, 0
        table = table[step.query_places]
    return WindowRows(
        table[at],
        step.query_lengths[at],
        manager.config.geometry.sliding_window,
        pool.page.tokens_per_block,
        len(pool.view(layer)),
        scale,
        position,
    )


def _dsa_step(manager: DsaManager, function: str, at: At) -> DsaStep:
    step = manager.require_step(function)
    if at != ALL:
        raise InvalidArgument(f"[{function}] at must be left out with DSA, got {at}")
    return step
