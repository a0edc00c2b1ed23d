"""Stateless operations on arrays that the caller owns.

The engine runs its steps through the same functions. Arrays are NumPy arrays, torch tensors or
other DLPack exporters; all arrays of a call are on one device unless said otherwise. None is copied
or converted: a dtype, shape, device or stride that does not fit is refused by name before anything
happens. On a GPU the work is ordered on ``stream`` (a ``cudaStream_t`` as int), and the arrays must
live until it is done.

A *slot* is a unit's place in the arena, ``page * units_per_page + offset``, a *host unit* the same
in host history. A *row* is a seat, described by a line of ``row_states``: lease_id (-1: unseated),
base, cached_slots, window_slots, length, committed, window_begin, watermark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _core
from ._core import DecodedEntry, GroupMemory, HostPiece, HostRowLayout, decode_entries, host_row
from ._typing import Array

__all__ = [
    "DecodedEntry",
    "GroupMemory",
    "HostPiece",
    "HostRowLayout",
    "ResolveOutputs",
    "convert",
    "decode_entries",
    "fetch",
    "flush",
    "host_row",
    "load",
    "reset_leases",
    "resolve",
]


@dataclass
class ResolveOutputs:
    """What resolve writes, in launch order: int32 unless said, contiguous, on the launch's device.

    Attributes
    ----------
    slots : ndarray, shape (b, k)
        Arena slot of each selected unit, or -1.
    write_slots : ndarray, shape (b, max_new_units)
        Window slots of units ``committed + j``, the ones that the step writes.
    miss_ordinals, miss_slots : ndarray, shape (b, k)
        Distinct misses by ascending ordinal, and where fetch puts them. Cells past the count are
        undefined.
    miss_counts, hit_counts : ndarray, shape (b,)
        Distinct misses and distinct cached hits; window units are not counted.
    errors : ndarray, uint32 or int32, shape (b,)
        `ErrorBits`, ORed.
    cursor : ndarray, uint32 or int32, shape (2,), optional
        Scratch of fetch: zero before and after it, and of one launch at a time. A GPU shares the
        work out by it, and leaves misses out if it was not zero; without it fetch copies the same,
        more slowly where misses lie far apart.
    """

    slots: Any
    write_slots: Any
    miss_ordinals: Any
    miss_slots: Any
    miss_counts: Any
    hit_counts: Any
    errors: Any
    cursor: Any = None

    @staticmethod
    def empty(b: int, k: int, max_new_units: int, like: Any = None) -> ResolveOutputs:
        """Make zeroed arrays for a launch of `b` rows of `k` units.

        Parameters
        ----------
        b, k, max_new_units : int
            Extents.
        like : torch.Tensor, optional
            If it is one, torch tensors on its device are made; else NumPy arrays.

        Returns
        -------
        ResolveOutputs
        """
        if type(like).__module__.partition(".")[0] == "torch":
            import torch

            def make(*shape: int) -> Any:
                return torch.zeros(shape, dtype=torch.int32, device=like.device)
        else:
            import numpy as np

            def make(*shape: int) -> Any:
                return np.zeros(shape, np.int32)

        return ResolveOutputs(
            slots=make(b, k),
            write_slots=make(b, max_new_units),
            miss_ordinals=make(b, k),
            miss_slots=make(b, k),
            miss_counts=make(b),
            hit_counts=make(b),
            errors=make(b),
            cursor=make(2),
        )


def resolve(
    selection: Array,
    rows: Array,
    row_states: Array,
    step: Array,
    entries: Array,
    last: Array,
    *,
    out: ResolveOutputs,
    no_write_slot: int = -1,
    row_errors: Array | None = None,
    batch_error: Array | None = None,
    stream: int = 0,
) -> None:
    """Map each selected unit to an arena slot and update the cache's entries.

    Parameters
    ----------
    selection : ndarray, int32, shape (b, k)
        Ordinals in [0, length); -1 anywhere marks an unused entry. Rows at any stride.
    rows : ndarray, int32, shape (b,)
        Row of each launch position; -1 is padding. A row at most once.
    row_states : ndarray, int32, shape (num_rows, 8)
        Columns as in the module's description.
    step : ndarray, uint32 or int32, shape (2,)
        The clock, which grows by one per step, and 1 while a step is open.
    entries : ndarray, uint32 or int32, shape (num_slots,)
        One packed word per slot, updated. 0xFFFFFFFF is empty. Those of a lease hold distinct
        ordinals, as resolve leaves them.
    last : ndarray, uint32 or int32, shape (num_leases,)
        Clock of each lease's last resolve, updated.
    out : ResolveOutputs
        Written completely, but for misses past their count.
    no_write_slot : int
        Fills write slots that name no unit.
    row_errors : ndarray, uint32 or int32, shape (num_rows,), optional
        Error words by row, ORed.
    batch_error : ndarray, uint32 or int32, shape (1,), optional
        `BatchErrorBits`, ORed.
    stream : int
        Where the work is ordered.

    Raises
    ------
    InvalidArgument
        If an argument does not fit. What only the device sees, such as an ordinal out of range,
        goes to the error words.

    Notes
    -----
    Victims are the oldest unselected entries, ties to the lower slot; by ascending ordinal the
    i-th miss takes the i-th victim by ascending slot. So the result depends on the set of ordinals
    alone, and is the same on every device.

    Examples
    --------
    A lease of 4 cached and 2 window slots at slot 0; units 8 and 9 are in the window.

    >>> import numpy as np
    >>> from sparse_kvcm import ops
    >>> out = ops.ResolveOutputs.empty(1, 3, 1)
    >>> ops.resolve(
    ...     np.array([[9, 5, -1]], np.int32), np.zeros(1, np.int32),
    ...     np.array([[0, 0, 4, 2, 10, 9, 8, 8]], np.int32), np.array([1, 1], np.uint32),
    ...     np.full(6, 0xFFFFFFFF, np.uint32), np.zeros(1, np.uint32), out=out)
    >>> out.slots.tolist(), out.write_slots.tolist(), out.miss_ordinals[0, :1].tolist()
    ([[5, 0, -1]], [[5]], [5])
    """
    _core.resolve(
        selection,
        rows,
        row_states,
        step,
        entries,
        last,
        out,
        no_write_slot,
        row_errors,
        batch_error,
        stream,
    )


def fetch(
    out: ResolveOutputs,
    rows: Array,
    row_states: Array,
    page_table: Array,
    memory: GroupMemory,
    *,
    row_errors: Array | None = None,
    batch_error: Array | None = None,
    stream: int = 0,
) -> None:
    """Copy every miss of a launch from host history to its slot, for all member layers at once.

    Parameters
    ----------
    out : ResolveOutputs
        As resolve wrote it. Its ``errors`` are ORed; its ``cursor`` must be zero and is so after.
    rows : ndarray, int32, shape (b,)
        As given to resolve.
    row_states : ndarray, int32, shape (num_rows, 8)
        As given to resolve.
    page_table : ndarray, int32, shape (num_rows, max_pages)
        Host page ids of each row's history in order, -1 where none.
    memory : GroupMemory
        Arena and host history.
    row_errors : ndarray, uint32 or int32, shape (num_rows,), optional
        Error words by row, ORed.
    batch_error : ndarray, uint32 or int32, shape (1,), optional
        `BatchErrorBits`, ORed.
    stream : int
        Where the work is ordered.

    Raises
    ------
    InvalidArgument
        If an argument does not fit. A miss at or above the row's watermark, without a page or with
        a slot outside the arena is skipped and sets HOLE, PAGE or LEASE.
    """
    _core.fetch(out, rows, row_states, page_table, memory, row_errors, batch_error, stream)


def flush(
    slots: Array,
    host_units: Array,
    memories: GroupMemory | Sequence[GroupMemory],
    *,
    stream: int = 0,
) -> None:
    """Copy units from the arena to host history, in several groups alike.

    Parameters
    ----------
    slots : ndarray, int32, shape (n,), host memory
        Arena slots, each below ``num_slots``.
    host_units : ndarray, int64, shape (n,), host memory
        Host units, distinct: ``page id * units_per_page + offset``.
    memories : GroupMemory or sequence of GroupMemory
        Groups to copy in.
    stream : int
        Where the work is ordered. `slots` and `host_units` are read before the call returns.

    Raises
    ------
    InvalidArgument
        If an argument does not fit or a place is outside the memory.

    Examples
    --------
    >>> import numpy as np
    >>> import sparse_kvcm as kvcm
    >>> arena = np.arange(32, dtype=np.uint8).reshape(1, 32)  # one page of 4 units of 8 bytes
    >>> host = np.zeros((1, 4, 16), np.uint8)
    >>> memory = kvcm.ops.GroupMemory([arena], host, kvcm.UnitLayout([8]), units_per_page=4)
    >>> kvcm.ops.flush(np.array([2], np.int32), np.array([0], np.int64), memory)
    >>> host[0, 0, :8].tolist()
    [16, 17, 18, 19, 20, 21, 22, 23]
    """
    _core.flush(slots, host_units, memories, stream)


def load(
    slots: Array,
    host_units: Array,
    memories: GroupMemory | Sequence[GroupMemory],
    *,
    stream: int = 0,
) -> None:
    """Copy units from host history to the arena: the reverse of `flush`.

    Parameters
    ----------
    slots : ndarray, int32, shape (n,), host memory
        Arena slots, distinct.
    host_units : ndarray, int64, shape (n,), host memory
        Host units.
    memories : GroupMemory or sequence of GroupMemory
        Groups to copy in.
    stream : int
        Where the work is ordered. `slots` and `host_units` are read before the call returns.

    Raises
    ------
    InvalidArgument
        If an argument does not fit or a place is outside the memory.
    """
    _core.load(slots, host_units, memories, stream)


def convert(
    slots: Array,
    *,
    out: Array,
    units_per_page: int,
    page_stride: int,
    unit_stride: int,
    first: int = 0,
    num_slots: int,
    selection: Array | None = None,
    rows: Array | None = None,
    row_states: Array | None = None,
    errors: Array | None = None,
    stream: int = 0,
) -> None:
    """Put slots into the form that an attention kernel wants.

    A slot gives ``first + slot // units_per_page * page_stride + slot % units_per_page *
    unit_stride``, and -1 stays -1.

    Parameters
    ----------
    slots : ndarray, int32, shape (b, k)
        As resolve wrote them.
    out : ndarray, int32 or int64, shape (b, k)
        Where the result goes.
    units_per_page : int
        Page size in units.
    page_stride, unit_stride, first : int
        In whatever the kernel counts: rows, elements or bytes.
    num_slots : int
        Every slot is below it; else it gives -1 and LEASE.
    selection, rows, row_states : ndarray, optional
        As given to resolve. With them a selected unit without a slot sets UNCOVERED.
    errors : ndarray, uint32 or int32, shape (b,), optional
        `ErrorBits`, ORed. Needed with `selection`.
    stream : int
        Where the work is ordered.

    Raises
    ------
    InvalidArgument
        If an argument does not fit, or a result need not fit `out`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparse_kvcm import ops
    >>> out = np.empty((1, 3), np.int32)
    >>> ops.convert(np.array([[5, -1, 2]], np.int32), out=out, units_per_page=4, page_stride=100,
    ...             unit_stride=10, num_slots=8)
    >>> out.tolist()
    [[110, -1, 20]]
    """
    _core.convert(
        slots,
        out,
        units_per_page,
        page_stride,
        unit_stride,
        first,
        num_slots,
        selection,
        rows,
        row_states,
        errors,
        stream,
    )


def reset_leases(
    leases: Sequence[tuple[int, int, int]],
    entries: Sequence[Array],
    last: Sequence[Array],
    clock: int,
    *,
    stream: int = 0,
) -> None:
    """Empty the cached slots of leases and set their ``last`` to the clock.

    Parameters
    ----------
    leases : sequence of (lease_id, base, cached_slots)
        What to empty.
    entries : sequence of ndarray, uint32 or int32, shape (num_slots,)
        Per selection group.
    last : sequence of ndarray, uint32 or int32, shape (num_leases,)
        Per selection group.
    clock : int
        The clock, in [0, 2**32).
    stream : int
        Where the work is ordered.

    Raises
    ------
    InvalidArgument
        If an argument does not fit or a lease is outside `entries` or `last`.
    """
    _core.reset_leases(leases, entries, last, clock, stream)
