"""Each operation refuses what it cannot do, by name, and has then changed nothing.

A case changes one argument of a call that works. The message must name the function, the argument,
what it must be and what was given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from factories import int32
from foreign_array import ForeignArray
from ops_arguments import (
    CALLS,
    Kwargs,
    every_other,
    move_arguments,
    outputs,
    read_only,
    resolve_arguments,
    unaligned,
)
from sparse_kvcm import ops

# Per call: the shape of each array argument, as the message has it, and whether it is written.
ARRAYS: dict[str, dict[str, tuple[str, bool]]] = {
    "resolve": {
        "rows": ("int32 [b = 2 of selection]", False),
        "row_states": ("int32 [num_rows, 8]", False),
        "step": ("uint32 or int32 [2]", False),
        "entries": ("uint32 or int32 [num_slots]", True),
        "last": ("uint32 or int32 [num_leases]", True),
        "row_errors": ("uint32 or int32 [num_rows = 2 of row_states]", True),
        "batch_error": ("uint32 or int32 [1]", True),
    },
    "fetch": {
        "row_states": ("int32 [num_rows, 8]", False),
        "page_table": ("int32 [num_rows = 2 of row_states, max_pages]", False),
        "row_errors": ("uint32 or int32 [num_rows = 2 of row_states]", True),
        "batch_error": ("uint32 or int32 [1]", True),
    },
    "flush": {"host_units": ("int64 [n = 2 of slots]", False)},
    "load": {"host_units": ("int64 [n = 2 of slots]", False)},
    "convert": {
        "out": ("int32 or int64 [b = 2 of slots, k = 3 of slots]", True),
        "selection": ("int32 [b = 2 of slots, k = 3 of slots]", False),
        "rows": ("int32 [b = 2 of slots]", False),
        "errors": ("uint32 or int32 [b = 2 of slots]", True),
    },
    "decode_entries": {"entries": ("uint32 or int32 [num_slots]", False)},
}
OUT_FIELDS = {
    "slots": "int32 [b = 2 of selection, k = 3 of selection]",
    "write_slots": "int32 [b = 2 of selection, max_new_units]",
    "miss_ordinals": "int32 [b = 2 of selection, k = 3 of selection]",
    "miss_slots": "int32 [b = 2 of selection, k = 3 of selection]",
    "miss_counts": "int32 [b = 2 of selection]",
    "hit_counts": "int32 [b = 2 of selection]",
    "errors": "uint32 or int32 [b = 2 of selection]",
}


def array_faults(array: Any, written: bool, strided: bool = True) -> list[tuple[Any, str]]:
    """Replacements of an array that must be refused, and what the message says of them."""
    more = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
    faults = [
        (array.astype(np.float32), "float32"),
        (array.astype(np.int16), "int16"),
        (array.tolist(), "list"),
        ("text", "str 'text'"),
        (array.astype(array.dtype.newbyteorder()), "pass a NumPy array"),
        (array.reshape(1, *array.shape), str([1, *array.shape])),
        (
            array.reshape(-1)[:0].reshape(0, *array.shape[1:])[..., None],
            ", 1]" if array.ndim > 1 else "[0, 1]",
        ),
        (unaligned(array), "unaligned"),
    ]
    if array.ndim > 1 or array.shape[0] <= 2:
        faults.append((more, str(list(more.shape))))
    if strided:
        faults.append((every_other(array), "strides"))
    if written:
        faults.append((read_only(array), "read-only"))
    return faults


def array_cases() -> list[Any]:
    cases = []
    for function, arrays in ARRAYS.items():
        for name, (wanted, written) in arrays.items():
            array = CALLS[function][1]()[name]
            for value, given in array_faults(array, written, strided=array.size > 1):
                if name in ("page_table", "entries", "last") and given == str(
                    [*array.shape[:-1], array.shape[-1] + 1]
                ):
                    continue  # any extent will do
                cases.append(
                    pytest.param(
                        function,
                        {name: value},
                        [name, wanted, given],
                        id=f"{function} {name} {given}",
                    )
                )
    for name, wanted in OUT_FIELDS.items():
        array = getattr(outputs(), name)
        for value, given in array_faults(array, written=True):
            if name == "write_slots" and given == "[2, 2]":
                continue  # as many as one likes
            cases.append(
                pytest.param(
                    "resolve",
                    {"out": outputs(**{name: value})},
                    [f"out.{name}", wanted, given],
                    id=f"resolve out.{name} {given}",
                )
            )
    return cases


def case(function: str, *fragments: str, **change: Any) -> Any:
    name, value = next(iter(change.items()))
    return pytest.param(function, change, list(fragments), id=f"{function} {name}={value!r:.40}")


CASES = [
    *array_cases(),
    case("resolve", "selection", "int32 [b, k]", "int64 [2, 3]", selection=np.zeros((2, 3), int)),
    case("resolve", "selection", "float32", selection=np.zeros((2, 3), np.float32)),
    case("resolve", "selection", "None", selection=None),
    case(
        "resolve",
        "selection",
        "each row C-contiguous",
        "strides [1, 2]",
        selection=np.asfortranarray(np.zeros((2, 3), np.int32)),
    ),
    case(
        "resolve", "selection", "strides [0, 1]", selection=np.broadcast_to(int32(1, 2, 3), (2, 3))
    ),
    case("resolve", "selection", "strides [-3, 1]", selection=np.zeros((2, 3), np.int32)[::-1]),
    case(
        "resolve",
        "k must be in [1, 65535]",
        "0",
        selection=np.zeros((2, 0), np.int32),
        out=ops.ResolveOutputs.empty(2, 0, 1),
    ),
    case("resolve", "out", "ResolveOutputs", "None", out=None),
    case("resolve", "out", "ResolveOutputs", "dict", out={}),
    case("resolve", "no_write_slot", ">= -1", "-2", no_write_slot=-2),
    case("resolve", "no_write_slot", "int", "None", no_write_slot=None),
    case("resolve", "no_write_slot", "int", "float 0.5", no_write_slot=0.5),
    case("resolve", "no_write_slot", "int of 32 bits", "99999999999", no_write_slot=99999999999),
    case("resolve", "stream", "0", "-1", stream=-1),
    case("resolve", "stream", "int", "str", stream="default"),
    case("resolve", "stream", "int", "bool True", stream=True),
    case("fetch", "memory must be a GroupMemory", "None", memory=None),
    case("fetch", "rows", "int32 [b]", "int64 [2]", rows=np.zeros(2, int)),
    case(
        "fetch",
        "out.miss_slots",
        "int32 [b = 2 of rows, k = 3 of out.miss_ordinals]",
        "[2, 4]",
        out=outputs(miss_slots=np.zeros((2, 4), np.int32)),
    ),
    case("fetch", "out.errors", "read-only", out=outputs(errors=read_only(int32(0, 0)))),
    case("fetch", "stream", "None", stream=None),
    case("flush", "slots", "int32 [n]", "int64 [2]", slots=np.zeros(2, int)),
    case("flush", "slots[1]", "[0, 12)", "12", slots=int32(0, 12)),
    case("flush", "slots[0]", "[0, 12)", "-1", slots=int32(-1, 0)),
    case("flush", "host_units[1]", "[0, 20)", "20", host_units=np.array([0, 20], np.int64)),
    case("flush", "host_units[0]", "[0, 20)", "-1", host_units=np.array([-1, 2], np.int64)),
    case("flush", "memories", "sequence of GroupMemory", "None", memories=None),
    case("flush", "memories[0]", "GroupMemory", "int 3", memories=[3]),
    case("load", "slots[1]", "[0, 12)", "12", slots=int32(0, 12)),
    case("load", "host_units[1]", "[0, 20)", "20", host_units=np.array([0, 20], np.int64)),
    case("convert", "slots", "int32 [b, k]", "int64 [2, 3]", slots=np.zeros((2, 3), int)),
    case("convert", "units_per_page", ">= 1", "0", units_per_page=0),
    case("convert", "page_stride", "[0, ", "-1", page_stride=-1),
    case("convert", "page_stride", "2147483647", page_stride=2**31),
    case("convert", "unit_stride", "[0, ", "-1", unit_stride=-1),
    case("convert", "unit_stride", "int", "float", unit_stride=1.0),
    case("convert", "first", "[0, 2147483647]", "-1", first=-1),
    case("convert", "num_slots", "[0, 2147483647]", "-1", num_slots=-1),
    case("convert", "num_slots", "[0, 2147483647]", "2147483648", num_slots=2**31),
    case("convert", "num_slots", "1208925819614629174706176", num_slots=2**80),
    case("convert", "selection", "None", selection=None),
    case("convert", "rows", "int32 [b = 2 of slots]", "None", rows=None),
    case("convert", "row_states", "int32 [num_rows, 8]", "None", row_states=None),
    case("convert", "errors", "uint32 or int32", "None", errors=None),
    case("reset_leases", "leases", "sequence", "int 3", leases=3),
    case("reset_leases", "leases[0]", "lease_id, base, cached_slots", "(0, 0)", leases=[(0, 0)]),
    case("reset_leases", "leases[1].base", "int", "float 1.5", leases=[(0, 0, 1), (1, 1.5, 1)]),
    case("reset_leases", "leases[1].lease_id", "[0, 2)", "2", leases=[(0, 0, 4), (2, 4, 4)]),
    case("reset_leases", "leases[0].base", "[0, 4]", "5", leases=[(0, 5, 4)]),
    case("reset_leases", "leases[0].base", "-1", leases=[(0, -1, 4)]),
    case("reset_leases", "leases[0].cached_slots", "[0, 65535]", "-1", leases=[(0, 0, -1)]),
    case("reset_leases", "leases[0].cached_slots", "65536", leases=[(0, 0, 65536)]),
    case(
        "reset_leases",
        "entries[1]",
        "num_slots = 8 of entries[0]",
        "[9]",
        entries=[np.zeros(8, np.uint32), np.zeros(9, np.uint32)],
    ),
    case("reset_leases", "last", "one array per group", "1", last=[np.zeros(2, np.uint32)]),
    case("reset_leases", "last[0]", "float64", last=[np.zeros(2), np.zeros(2)]),
    case("reset_leases", "clock", "4294967295", "-1", clock=-1),
    case("reset_leases", "clock", "4294967295", "4294967296", clock=2**32),
    case("reset_leases", "clock", "int", "None", clock=None),
    case("GroupMemory", "arenas", "sequence of arrays", "int 1", arenas=1),
    case("pack_host_row", "num_members", "[1, 64]", "0", arenas=[]),
    case(
        "GroupMemory",
        "arenas[0]",
        "page_bytes = 32 of layout",
        "[3, 33]",
        arenas=[np.zeros((3, 33), np.uint8)] * 2,
    ),
    case(
        "GroupMemory",
        "arenas[1]",
        "pages = 3 of arenas[0]",
        "[4, 32]",
        arenas=[np.zeros((3, 32), np.uint8), np.zeros((4, 32), np.uint8)],
    ),
    case("GroupMemory", "arenas[0]", "uint8", "int8", arenas=[np.zeros((3, 32), np.int8)] * 2),
    case(
        "GroupMemory",
        "arenas[0]",
        "writable",
        "read-only",
        arenas=[read_only(np.zeros((3, 32), np.uint8))] * 2,
    ),
    case(
        "GroupMemory",
        "arenas[0]",
        "each row C-contiguous",
        "strides [0, 1]",
        arenas=[np.broadcast_to(np.zeros(32, np.uint8), (3, 32))] * 2,
    ),
    case(
        "GroupMemory",
        "host",
        "units_per_page = 4",
        "[5, 3, 16]",
        host=np.zeros((5, 3, 16), np.uint8),
    ),
    case(
        "GroupMemory",
        "host",
        "host_unit_bytes = 16",
        "[5, 4, 8]",
        host=np.zeros((5, 4, 8), np.uint8),
    ),
    case(
        "GroupMemory",
        "host",
        "C-contiguous",
        "strides",
        host=np.zeros((5, 4, 32), np.uint8)[:, :, :16],
    ),
    case("GroupMemory", "layout", "UnitLayout", "list [8]", layout=[8]),
    case("UnitLayout.page_bytes", "units_per_page", ">= 1", "0", units_per_page=0),
    case("GroupMemory", "units_per_page", "int", "None", units_per_page=None),
    case("host_row", "layout", "UnitLayout", "None", layout=None),
    case("pack_host_row", "num_members", "[1, 64]", "65", num_members=65),
    case("decode_entries", "entries", "None", entries=None),
]
# Cases whose fault a function underneath reports under its own name.
CALLED_AS = {"pack_host_row": "GroupMemory", "UnitLayout.page_bytes": "GroupMemory"}


def arrays_of(arguments: Kwargs) -> list[Any]:
    found: list[Any] = []
    for value in arguments.values():
        if isinstance(value, np.ndarray):
            found.append(value)
        elif isinstance(value, list):
            found.extend(item for item in value if isinstance(item, np.ndarray))
        elif isinstance(value, ops.ResolveOutputs):
            found.extend(item for item in vars(value).values() if isinstance(item, np.ndarray))
    return found


@pytest.mark.parametrize("function", CALLS)
def test_unchanged_arguments_are_taken(function: str) -> None:
    call, arguments = CALLS[function]
    call(**arguments())


@pytest.mark.parametrize(("function", "change", "fragments"), CASES)
def test_bad_argument_is_refused_by_name(
    function: str, change: Kwargs, fragments: list[str]
) -> None:
    called = CALLED_AS.get(function, function)
    if "num_members" in change:
        called = "host_row"
    call, make_arguments = CALLS[called]
    arguments = make_arguments() | change
    arrays = arrays_of(arguments)
    before = [array.tobytes() for array in arrays]
    with pytest.raises(kvcm.InvalidArgument) as caught:
        call(**arguments)
    message = str(caught.value)
    assert message.startswith(f"[{function}] ")
    missing = [text for text in fragments if text not in message]
    assert not missing, f"{missing} not in: {message}"
    assert [array.tobytes() for array in arrays] == before


@pytest.mark.parametrize(
    ("device", "given"),
    [((2, 0), "on cuda:0"), ((2, 3), "on cuda:3"), ((8, 0), "on DLPack device type 8")],
)
def test_array_on_another_device_is_refused(device: tuple[int, int], given: str) -> None:
    arguments = resolve_arguments() | {"rows": ForeignArray((2,), device)}
    with pytest.raises(kvcm.InvalidArgument) as caught:
        ops.resolve(**arguments)
    assert "rows must be int32 [b = 2 of selection] on cpu" in str(caught.value)
    assert given in str(caught.value)


def test_arrays_on_a_device_that_is_not_there_are_refused() -> None:
    if kvcm.cuda_is_available():
        pytest.skip("this machine has a GPU")
    arguments = {"slots": ForeignArray((2, 3)), "out": ForeignArray((2, 3))}
    numbers = {"units_per_page": 4, "page_stride": 4, "unit_stride": 1, "num_slots": 8}
    with pytest.raises(kvcm.NotAvailable):
        ops.convert(**arguments, **numbers)


def test_host_arrays_must_be_in_host_memory() -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"slots must be int32 \[n\] in host memory"):
        ops.flush(**move_arguments() | {"slots": ForeignArray((2,))})
