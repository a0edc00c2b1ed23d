"""Layouts, configurations and constructors refuse what they cannot do, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sparse_kvcm as kvcm
from factories import make_config
from sparse_kvcm import (
    InvalidArgument,
    KvCacheManager,
    KvCacheManagerConfig,
    NotAvailable,
    SelectionGroupConfig,
    UnitLayout,
)


def layout() -> UnitLayout:
    return UnitLayout([8])


def group(layers: Any = (0,), top_k: Any = 4) -> SelectionGroupConfig:
    return SelectionGroupConfig(layers, top_k, layout())


CONFIG_CASES: list[tuple[Callable[[], dict[str, Any]], list[str]]] = [
    (lambda: {"groups": []}, ["groups", "empty"]),
    (lambda: {"groups": group()}, ["groups must be a sequence of SelectionGroupConfig"]),
    (lambda: {"groups": [group(), 7]}, ["groups[1] must be a SelectionGroupConfig", "got int 7"]),
    (lambda: {"groups": [group([], 4)]}, ["groups[0].layers"]),
    (lambda: {"groups": [group([-1], 4)]}, ["groups[0].layers", "got -1"]),
    (lambda: {"groups": [group([0, 0], 4)]}, ["layer 0", "groups[0]", "twice"]),
    (lambda: {"groups": [group(), group()]}, ["layer 0", "groups[1]", "twice"]),
    (lambda: {"groups": [group([0], 0)]}, ["groups[0].top_k", "got 0"]),
    (lambda: {"groups": [group([0], 9)]}, ["groups[0].top_k", "8", "got 9"]),
    (lambda: {"groups": [group(range(65), 4)]}, ["[1, 64]", "got 65"]),
    (lambda: {"cached_slots": 0}, ["cached_slots", "[4, 65535]", "got 0"]),
    (lambda: {"cached_slots": 10}, ["cached_slots", "multiple", "4", "got 10"]),
    (lambda: {"cached_slots": 65536}, ["cached_slots", "65535", "got 65536"]),
    (lambda: {"cached_slots": None}, ["cached_slots must be an int", "got None"]),
    (lambda: {"cached_slots": 8.0}, ["cached_slots must be an int", "got float 8.0"]),
    (lambda: {"window_slots": 0}, ["window_slots", "got 0"]),
    (lambda: {"window_slots": 6}, ["window_slots", "multiple", "got 6"]),
    (lambda: {"window_slots": 2**31}, ["window_slots must be an int of 32 bits", "got 2147483648"]),
    (lambda: {"max_new_units": 0}, ["max_new_units", "[1, 4]", "got 0"]),
    (lambda: {"max_new_units": 5}, ["max_new_units", "[1, 4]", "got 5"]),
    (lambda: {"arena_pages": 0}, ["arena_pages", "got 0"]),
    (lambda: {"arena_pages": 2**31}, ["arena_pages", "got 2147483648"]),
    (lambda: {"host_pages": 0}, ["host_pages", "got 0"]),
    (lambda: {"host_pages": 2**62}, ["host_pages", "got 4611686018427387904"]),
    (lambda: {"host_pages": 2**64}, ["host_pages", "got 18446744073709551616"]),
    (lambda: {"max_leases": 0}, ["max_leases", "got 0"]),
    (lambda: {"max_leases": True}, ["max_leases must be an int", "got bool True"]),
    (lambda: {"tokens_per_block": 0}, ["tokens_per_block", "got 0"]),
    (lambda: {"tokens_per_block": -4}, ["tokens_per_block", "got -4"]),
    (lambda: {"tokens_per_unit": 0}, ["tokens_per_unit", "got 0"]),
    (lambda: {"tokens_per_unit": 3}, ["tokens_per_unit", "divide", "got 3"]),
    (lambda: {"device": "gpu"}, ["device", '"cpu"', 'got "gpu"']),
    (lambda: {"device": "cuda:x"}, ["cuda:<index>", 'got "cuda:x"']),
    (lambda: {"device": "cpu\0x"}, ["device must be a str without", r"got str 'cpu\x00x'"]),
    (lambda: {"device": "\ud800"}, ["device must be a str without", r"got str '\ud800'"]),
    (lambda: {"device": 0}, ["device must be a str", "got int 0"]),
]


@pytest.mark.parametrize(("change", "text"), CONFIG_CASES)
def test_config_refuses_a_field_by_name(
    change: Callable[[], dict[str, Any]], text: list[str]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_config(**change())
    missing = [fragment for fragment in text if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


LAYOUT_CASES: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: UnitLayout([]), ["[UnitLayout] region_bytes", "1 to 4", "got 0"]),
    (lambda: UnitLayout([8] * 5), ["[UnitLayout] region_bytes", "1 to 4", "got 5"]),
    (lambda: UnitLayout([8, 6]), ["[UnitLayout] region_bytes[1]", "multiple of 4", "got 6"]),
    (lambda: UnitLayout([0]), ["[UnitLayout] region_bytes[0]", "[4, 65536]", "got 0"]),
    (lambda: UnitLayout([65540]), ["[UnitLayout] region_bytes[0]", "[4, 65536]", "got 65540"]),
    (lambda: UnitLayout(8), ["[UnitLayout] region_bytes must be a sequence of ints", "got int 8"]),
    (lambda: UnitLayout("8"), ["[UnitLayout] region_bytes must be a sequence", "got str '8'"]),
    (lambda: UnitLayout([8.0]), ["[UnitLayout] region_bytes[0] must be an int", "got float 8.0"]),
    (lambda: UnitLayout([8], 0), ["[UnitLayout] page_alignment", "[1, 65536]", "got 0"]),
    (lambda: UnitLayout([8], None), ["[UnitLayout] page_alignment must be an int", "got None"]),
    (lambda: layout().page_bytes(0), ["[UnitLayout.page_bytes] units_per_page", ">= 1", "got 0"]),
    (lambda: layout().page_bytes(None), ["[UnitLayout.page_bytes] units_per_page", "got None"]),
    (
        lambda: layout().region_offset(1, 4),
        ["[UnitLayout.region_offset] region", "[0, 1)", "got 1"],
    ),
    (lambda: layout().region_offset(-1, 4), ["[UnitLayout.region_offset] region", "got -1"]),
    (
        lambda: SelectionGroupConfig(0, 4, layout()),
        ["[SelectionGroupConfig] layers must be a sequence of ints", "got int 0"],
    ),
    (
        lambda: SelectionGroupConfig([0], None, layout()),
        ["[SelectionGroupConfig] top_k must be an int", "got None"],
    ),
    (
        lambda: SelectionGroupConfig([0], 4, 8),
        ["[SelectionGroupConfig] layout must be a UnitLayout", "got int 8"],
    ),
    (
        lambda: KvCacheManager(None),
        ["[KvCacheManager] config must be a KvCacheManagerConfig", "got None"],
    ),
    (
        lambda: KvCacheManager({}),
        ["[KvCacheManager] config must be a KvCacheManagerConfig", "got dict {}"],
    ),
]


@pytest.mark.parametrize(("call", "text"), LAYOUT_CASES)
def test_constructor_refuses_a_value_by_name(call: Callable[[], Any], text: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    missing = [fragment for fragment in text if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_manager_on_a_device_that_is_not_there_is_not_available() -> None:
    if kvcm.cuda_is_available():
        pytest.skip("this machine has a GPU")
    config: KvCacheManagerConfig = make_config(device="cuda")
    assert config.device == "cuda:0"
    with pytest.raises(NotAvailable, match=r".+"):
        KvCacheManager(config)


def test_manager_larger_than_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        KvCacheManager(
            make_config(
                host_pages=2**31 - 1,
                cached_slots=65532,
                groups=[SelectionGroupConfig(range(16), 4, UnitLayout([65536] * 4))],
            )
        )
