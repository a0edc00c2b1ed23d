"""What the slice does on a device beside torch and the library: Triton on a GPU, torch on a CPU."""

from __future__ import annotations

import torch

from benchmarks.decode_slice.cache import Buffer

FP8 = torch.float8_e4m3fn


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def index_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: Buffer,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """Score all units of each row into the front of `scores`, float32 ``[b, units]``.

    Parameters
    ----------
    queries : torch.Tensor, E4M3, shape (b, heads, width)
    weights : torch.Tensor, float32, shape (b, heads)
    keys : Buffer
        Pages of E4M3 keys, then of their float32 scales.
    rows, lengths : torch.Tensor, int32, shape (b,)
        Rows of the page table, and units of each; padding has no units.
    """
    b, heads, width = queries.shape
    if queries.is_cuda:
        from benchmarks.decode_slice import kernels

        block, steps = 128, 8
        grid = (b, -(-scores.shape[1] // (block * steps)))
        kernels.index_scores[grid](
            queries, weights, keys.pages, keys.table, rows, lengths, scores,
            keys.pages.stride(0), keys.units * width, keys.table.stride(0), scores.stride(0),
            HEADS=heads, WIDTH=width, UNITS=keys.units, BLOCK=block, STEPS=steps,
        )  # fmt: skip
        return
    for place in range(b):
        n = int(lengths[place])
        ordinals = torch.arange(n, dtype=torch.int32)
        slots = look_up(ordinals[None], keys, rows[place : place + 1])[0].long()
        page, unit = keys.pages[slots // keys.units], slots % keys.units
        data = page[:, : keys.units * width].view(n, keys.units, width)
        scale = page[:, keys.units * width :].contiguous().view(torch.float32)
        each = torch.arange(n)
        key = data[each, unit].contiguous().view(FP8).float()
        dots = (queries[place].float() @ key.T).relu()
        scores[place, :n] = (weights[place][:, None] * dots).sum(0) * scale[each, unit]


def top_k(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """The best units of each row into `out`, int32 ``[b, k]``, in no order; -1 = none."""
    b, k = out.shape
    out.fill_(-1)
    if scores.is_cuda:
        from benchmarks.decode_slice import kernels

        kernels.top_k[(b,)](scores, lengths, out, scores.stride(0), K=k, CHUNK=8192, num_warps=16)
        return
    for place, n in enumerate(lengths.tolist()):
        if n:
            best = scores[place, :n].topk(min(k, n)).indices
            out[place, : len(best)] = best.int()


def look_up(
    ordinals: torch.Tensor, buffer: Buffer, rows: torch.Tensor, units: int | None = None
) -> torch.Tensor:
    """Slots of ordinals in a buffer's pages, int32 ``[b, k]``; -1 for -1 and for row -1."""
    b, k = ordinals.shape
    units = units or buffer.units
    if ordinals.is_cuda:
        from benchmarks.decode_slice import kernels

        out = torch.empty((b, k), dtype=torch.int32, device=ordinals.device)
        block = min(512, _power(k))
        kernels.look_up[(b, -(-k // block))](
            ordinals, buffer.table, rows, out, k, ordinals.stride(0), buffer.table.stride(0),
            UNITS=units, BLOCK=block,
        )  # fmt: skip
        return out
    exists = (ordinals >= 0) & (rows >= 0)[:, None]
    table = buffer.table[rows.clamp(min=0).long()]
    page = table.gather(1, (ordinals.clamp(min=0) // units).long())
    return (page * units + ordinals % units).masked_fill(~exists | (page < 0), -1).int()


def write_units(record: torch.Tensor, slots: torch.Tensor, buffer: Buffer, offset: int = 0) -> None:
    """Write a region of units, uint8 ``[b, bytes]``, to slots int32 ``[b]``; -1 is skipped.

    `offset` is that of the region's first unit within a page.
    """
    b, size = record.shape
    if record.is_cuda:
        from benchmarks.decode_slice import kernels

        kernels.write_units[(b,)](
            record, slots, buffer.pages, buffer.pages.stride(0), offset, slots.stride(0),
            BYTES=size, UNITS=buffer.units, BLOCK=_power(size),
        )  # fmt: skip
        return
    for one, slot in zip(record, slots.tolist(), strict=True):
        if slot >= 0:
            begin = offset + slot % buffer.units * size
            buffer.pages[slot // buffer.units, begin : begin + size] = one
