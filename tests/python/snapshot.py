"""Everything of a manager, a Batch and requests that can be seen from outside."""

from __future__ import annotations

from typing import Any

import sparse_kvcm as kvcm


def of_request(cache: kvcm.KvCache) -> dict[str, Any]:
    names = [
        "state",
        "need",
        "length",
        "committed_length",
        "watermark",
        "window_begin",
        "lease",
        "row",
        "host_pages",
    ]
    seen = {name: getattr(cache, name) for name in names}
    if cache.state == kvcm.KvCacheState.ACTIVE:
        seen["entries"] = [cache.decode_entries(0), cache.decode_entries(1)]
    return seen


def of_batch(batch: kvcm.Batch) -> dict[str, Any]:
    return {
        "clock": batch.clock,
        "step_open": batch.step_open,
        "dirty_rows": batch.dirty_rows,
        "row_states": batch.row_states.tobytes(),
        "page_table": batch.page_table.tobytes(),
    }


def of_manager(manager: kvcm.KvCacheManager) -> dict[str, Any]:
    occupancy = manager.occupancy()
    return {
        "arenas": [manager.arena(layer).tobytes() for layer in manager.layers],
        "hosts": [manager.host_history(g).tobytes() for g in range(manager.num_groups)],
        "free_host_pages": occupancy.free_host_pages,
        "free_arena_slots": occupancy.free_arena_slots,
        "largest_free_arena_run": occupancy.largest_free_arena_run,
        "free_leases": occupancy.free_leases,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]
