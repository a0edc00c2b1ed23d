"""A working call of each operation, and arrays that spoil it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import sparse_kvcm as kvcm
from factories import int32
from sparse_kvcm import ops

Kwargs = dict[str, Any]


def read_only(array: Any) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def unaligned(array: Any) -> Any:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    return raw[1:].view(array.dtype).reshape(array.shape)


def every_other(array: Any) -> Any:
    """The same shape and dtype, with a gap behind every element."""
    wide = np.zeros((*array.shape, 2), array.dtype)
    return wide[..., 0]


def outputs(**changes: Any) -> ops.ResolveOutputs:
    out = ops.ResolveOutputs.empty(2, 3, 1)
    for array in vars(out).values():
        array[...] = 7
    return replace(out, **changes)


def memory(**changes: Any) -> ops.GroupMemory:
    return ops.GroupMemory(**(memory_arguments() | changes))


def memory_arguments() -> Kwargs:
    return {
        "arenas": [np.zeros((3, 32), np.uint8), np.zeros((3, 32), np.uint8)],
        "host": np.zeros((5, 4, 16), np.uint8),
        "layout": kvcm.UnitLayout([8]),
        "units_per_page": 4,
    }


def resolve_arguments() -> Kwargs:
    return {
        "selection": int32([0, 1, 2], [2, -1, 0]),
        "rows": int32(0, 1),
        "row_states": int32([0, 0, 4, 1, 5, 5, 5, 5], [1, 5, 4, 1, 5, 5, 5, 5]),
        "step": np.array([1, 1], np.uint32),
        "entries": np.full(10, 0xFFFFFFFF, np.uint32),
        "last": np.zeros(2, np.uint32),
        "out": outputs(),
        "no_write_slot": -1,
        "row_errors": np.zeros(2, np.uint32),
        "batch_error": np.zeros(1, np.uint32),
        "stream": 0,
    }


def fetch_arguments() -> Kwargs:
    out = outputs()
    out.miss_counts[:] = 0
    return {
        "out": out,
        "rows": int32(0, 1),
        "row_states": int32([0, 0, 4, 1, 5, 5, 5, 5], [1, 5, 4, 1, 5, 5, 5, 5]),
        "page_table": int32([0, 1], [2, 3]),
        "memory": memory(),
        "row_errors": np.zeros(2, np.uint32),
        "batch_error": np.zeros(1, np.uint32),
        "stream": 0,
    }


def move_arguments() -> Kwargs:
    return {
        "slots": int32(0, 11),
        "host_units": np.array([19, 0], np.int64),
        "memories": [memory()],
        "stream": 0,
    }


def convert_arguments() -> Kwargs:
    return {
        "slots": int32([0, -1, 7], [1, 2, 3]),
        "out": np.zeros((2, 3), np.int32),
        "units_per_page": 4,
        "page_stride": 4,
        "unit_stride": 1,
        "first": 0,
        "num_slots": 8,
        "selection": int32([0, 1, 2], [2, -1, 0]),
        "rows": int32(0, 1),
        "row_states": int32([0, 0, 4, 1, 5, 5, 5, 5], [1, 5, 4, 1, 5, 5, 5, 5]),
        "errors": np.zeros(2, np.uint32),
        "stream": 0,
    }


def reset_arguments() -> Kwargs:
    return {
        "leases": [(0, 0, 4), (1, 4, 4)],
        "entries": [np.zeros(8, np.uint32), np.zeros(8, np.uint32)],
        "last": [np.zeros(2, np.uint32), np.zeros(2, np.uint32)],
        "clock": 5,
        "stream": 0,
    }


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Kwargs]]] = {
    "resolve": (ops.resolve, resolve_arguments),
    "fetch": (ops.fetch, fetch_arguments),
    "flush": (ops.flush, move_arguments),
    "load": (ops.load, move_arguments),
    "convert": (ops.convert, convert_arguments),
    "reset_leases": (ops.reset_leases, reset_arguments),
    "GroupMemory": (ops.GroupMemory, memory_arguments),
    "decode_entries": (ops.decode_entries, lambda: {"entries": np.zeros(4, np.uint32)}),
    "host_row": (ops.host_row, lambda: {"layout": kvcm.UnitLayout([8]), "num_members": 2}),
}
