"""Arguments that run Python code during a call: they raise, give nonsense or let go of objects."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm
from factories import int32
from ops_arguments import memory_arguments, move_arguments, resolve_arguments
from scenes import Scene
from sparse_kvcm import InvalidArgument, UnitLayout, ops

LONE_SURROGATE = "\ud800"


class Raises:
    """Raises `error` from the one special method `method`."""

    def __new__(cls, method: str, error: type[BaseException]) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise error("from the argument")

        return object.__new__(type("Raises", (), {method: fail}))


def mapping(items: Callable[[], Any]) -> Any:
    """A mapping whose items are what the function returns."""
    members = {"items": lambda _: items(), "__getitem__": lambda *_: None}
    return type("Mapping", (), members)()


def mapping_that_raises(error: type[BaseException]) -> Any:
    def items() -> Any:
        raise error("from the argument")

    return mapping(items)


def outputs_that_raise(error: type[BaseException]) -> Any:
    def fail(_: Any) -> Any:
        raise error("from the argument")

    return type("Outputs", (), {"slots": property(fail)})()


# What runs code of an argument, and how the message begins if that raises a plain error.
CALLS: dict[str, tuple[Callable[[type[BaseException]], Any], str]] = {
    "__index__": (
        lambda error: UnitLayout([8], Raises("__index__", error)),
        "[UnitLayout] page_alignment must be an int",
    ),
    "__iter__": (
        lambda error: UnitLayout(Raises("__iter__", error)),
        "[UnitLayout] region_bytes must be a sequence of ints",
    ),
    "__repr__": (
        lambda error: UnitLayout(Raises("__repr__", error)),
        "[UnitLayout] region_bytes must be a sequence of ints",
    ),
    "__dlpack__": (
        lambda error: ops.decode_entries(Raises("__dlpack__", error)),
        "[decode_entries] entries must be uint32 or int32",
    ),
    "__dlpack__, written": (
        lambda error: ops.resolve(**resolve_arguments() | {"last": Raises("__dlpack__", error)}),
        "[resolve] last must be uint32 or int32",
    ),
    "items": (
        lambda error: Scene().batch.resize(mapping_that_raises(error)),
        "[Batch.resize] lengths must be a dict",
    ),
    "attribute": (
        lambda error: ops.resolve(**resolve_arguments() | {"out": outputs_that_raise(error)}),
        "[resolve] out must be a ResolveOutputs",
    ),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("where", CALLS)
def test_error_that_is_not_about_the_argument_comes_through(
    where: str, error: type[BaseException]
) -> None:
    with pytest.raises(error, match=r"^from the argument$"):
        CALLS[where][0](error)


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, BufferError])
@pytest.mark.parametrize("where", CALLS)
def test_other_error_of_an_argument_refuses_it_by_name(
    where: str, error: type[BaseException]
) -> None:
    call, text = CALLS[where]
    with pytest.raises(InvalidArgument) as caught:
        call(error)
    assert str(caught.value).startswith(text)


def test_dlpack_that_gives_no_capsule_is_refused() -> None:
    array = np.zeros(4, np.uint32)
    exporter = type("Exporter", (), {"__dlpack__": lambda self, **_: array})()
    with pytest.raises(InvalidArgument, match=r"\[decode_entries\] entries must be"):
        ops.decode_entries(exporter)


@pytest.mark.parametrize("text", [LONE_SURROGATE, "a\0b"])
def test_representation_that_no_message_can_hold_is_left_out(text: str) -> None:
    odd = type("Odd", (), {"__repr__": lambda self: text})()
    with pytest.raises(InvalidArgument, match=r"page_alignment must be an int, got Odd$"):
        UnitLayout([8], odd)


@pytest.mark.parametrize("item", [5, (1,), (1, 41, 0), None])
def test_mapping_whose_items_are_no_pairs_is_refused(item: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Scene().batch.resize(mapping(lambda: [item]))
    text = str(caught.value)
    assert text.startswith("[Batch.resize] lengths must have pairs as items, got ")
    assert repr(item) in text


class Slots:
    """Slots that, when they are read, run `hook`."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self._hook = hook
        self._array = int32(0, 11)

    def __dlpack__(self, **options: Any) -> Any:
        self._hook()
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def memories_and_references(count: int) -> tuple[list[Any], list[weakref.ref[Any]]]:
    """GroupMemory objects, and references to arrays that only these hold."""
    memories, references = [], []
    for _ in range(count):
        arguments = memory_arguments()
        references.append(weakref.ref(arguments["host"]))
        memories.append(kvcm.ops.GroupMemory(**arguments))
    return memories, references


def pop_all(memories: list[Any]) -> Iterator[Any]:
    while memories:
        yield memories.pop()


@pytest.mark.parametrize("move", [ops.flush, ops.load])
@pytest.mark.parametrize("given", ["list", "iterator"])
def test_memories_live_until_the_call_ends(move: Callable[..., None], given: str) -> None:
    memories, references = memories_and_references(3)
    alive: list[bool] = []

    def let_go() -> None:
        memories.clear()
        alive.extend(reference() is not None for reference in references)

    move(
        **move_arguments()
        | {"slots": Slots(let_go), "memories": memories if given == "list" else pop_all(memories)}
    )
    assert alive == [True, True, True]
    assert [reference() is None for reference in references] == [True, True, True]
