"""Small managers and units whose bytes tell which unit they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import sparse_kvcm as kvcm

Bytes = npt.NDArray[np.uint8]


def make_config(**changes: Any) -> kvcm.KvCacheManagerConfig:
    """Two groups, pages of 4 units, leases of 8 + 4 slots."""
    fields: dict[str, Any] = {
        "groups": [
            kvcm.SelectionGroupConfig([0, 2], top_k=6, layout=kvcm.UnitLayout([24, 8])),
            kvcm.SelectionGroupConfig([1], top_k=4, layout=kvcm.UnitLayout([36])),
        ],
        "cached_slots": 8,
        "window_slots": 4,
        "max_new_units": 2,
        "arena_pages": 12,
        "host_pages": 64,
        "max_leases": 4,
        "tokens_per_block": 4,
    }
    return kvcm.KvCacheManagerConfig(**(fields | changes))


def unit_bytes(request: int, layer: int, ordinals: npt.ArrayLike, num_bytes: int) -> Bytes:
    """[n, num_bytes] that differ between requests, layers, units and bytes."""
    ordinal = np.asarray(ordinals, np.uint64).reshape(-1, 1)
    byte = np.arange(num_bytes, dtype=np.uint64)
    mixed = (ordinal * 1_000_003 + request * 7919 + layer * 104_729 + byte * 31) * 2_654_435_761
    return (mixed >> 16).astype(np.uint8)


def layout_of(manager: kvcm.KvCacheManager, layer: int) -> kvcm.UnitLayout:
    return manager.config.groups[manager.group_of(layer)].layout


def history(manager: kvcm.KvCacheManager, request: int, first: int, last: int) -> dict[int, Bytes]:
    """Units [first, last) of a request for import_history."""
    return {
        layer: unit_bytes(request, layer, range(first, last), layout_of(manager, layer).unit_bytes)
        for layer in manager.layers
    }


def read_slot(manager: kvcm.KvCacheManager, layer: int, slot: int) -> Bytes:
    """A unit's bytes in the arena, its regions one after the other."""
    return np.concatenate([region.copy() for region in slot_regions(manager, layer, slot)])


def write_slot(manager: kvcm.KvCacheManager, layer: int, slot: int, unit: Bytes) -> None:
    begin = 0
    for region in slot_regions(manager, layer, slot):
        region[:] = unit[begin : begin + len(region)]
        begin += len(region)


def slot_regions(manager: kvcm.KvCacheManager, layer: int, slot: int) -> list[Bytes]:
    units_per_page = manager.config.units_per_page
    page, offset = divmod(slot, units_per_page)
    views, begin = [], 0
    for size in layout_of(manager, layer).region_bytes:
        at = begin + offset * size
        views.append(manager.arena(layer)[page, at : at + size])
        begin += units_per_page * size
    return views


def int32(*values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def active(manager: kvcm.KvCacheManager, need: int, length: int, number: int = 1) -> kvcm.KvCache:
    """A request with a lease. Dropping it closes it, so tests keep a reference."""
    cache = manager.create_kv_cache(need)
    cache.import_history(history(manager, number, 0, length))
    assert cache.resume()
    return cache


def take_step(batch: kvcm.Batch, **lengths: int) -> dict[int, kvcm.ResizeResult]:
    """Opens a step in which row 0 has the length row0=..., and so on."""
    results = batch.resize({int(name[3:]): length for name, length in lengths.items()})
    batch.publish()
    batch.wait_ready()
    return results
