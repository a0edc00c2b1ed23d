"""The page table of a manager's host history, in the form that it has there: unit-major.

Histories of two offloading workers have equal rows, so one goes to the other as it lies, page by
page. What a prefill has lies layer by layer, and comes by way of staging.
"""

from __future__ import annotations

from sparse_kvcm._core import InvalidArgument, KvCacheManager, host_row
from sparse_kvcm.transfer.page_table import (
    BufferEntry,
    LayerGroup,
    PageFormat,
    PageRegion,
    PageTable,
    Pool,
    PoolGroup,
    PoolView,
    check_table,
)

HISTORY = "HISTORY"


def history_table(manager: KvCacheManager) -> PageTable:
    """A table of one layer group, whose page ids are those of `KvCache.host_pages`.

    Raises
    ------
    InvalidArgument
        If the manager is resident.
    """
    storage, config = manager.storage, manager.config
    sparse = [i for i, one in enumerate(storage.layout.pool_groups) if one.is_sparse]
    if not sparse:
        raise InvalidArgument("[history_table] manager must have host history, it is resident")
    pools = {one.base_address: one for one in storage.pool_group_descs()[sparse[0]]}
    found, views, formats = [], [], []
    for index, group in enumerate(config.groups):
        memory = manager.host_history(index)
        units, row_bytes = memory.shape[1:]
        row = host_row(group.layout, len(group.layers))
        pieces = tuple((group.layers[one.member], one.region, one.bytes) for one in row.pieces)
        region = PageRegion(0, row_bytes)
        size = units * row_bytes
        formats.append(PageFormat(config.tokens_per_unit, units, units, size, (region,), pieces))
        entry = BufferEntry(tuple(group.layers), HISTORY, 0, index)
        views.append(PoolView(index, "unit_major", (entry,)))
        found.append(Pool.of(pools[memory.ctypes.data], config.device))
    table = PageTable(
        config.tokens_per_block,
        (LayerGroup(0, None, tuple(views)),),
        (PoolGroup(tuple(found)),),
        tuple(formats),
    )
    check_table(table)
    return table
