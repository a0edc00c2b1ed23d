"""A resident cache manager as a sender needs it: its table, and the pages of its requests."""

from __future__ import annotations

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager
from sparse_kvcm.dsa import DSACacheManagerV2
from sparse_kvcm.transfer.page_table import PageTable
from sparse_kvcm.transfer.tables import dsa_buffers, make_tables, v4_buffers
from sparse_kvcm.transfer.wire import PageList


class ResidentSource:
    """Sends from a manager that has everything in pools.

    Parameters
    ----------
    manager : DSACacheManagerV2 or DeepseekV4CacheManager

    Raises
    ------
    InvalidArgument
        For one with `offload`.
    """

    def __init__(self, manager: DSACacheManagerV2 | DeepseekV4CacheManager) -> None:
        if manager.config.offload is not None:
            raise InvalidArgument("[ResidentSource] manager must be resident, got one with offload")
        self._manager = manager
        if isinstance(manager, DSACacheManagerV2):
            storage, buffers = manager.manager.storage, dsa_buffers(manager.config)
        else:
            storage, buffers = manager.store.storage, v4_buffers(manager.config)
        self._tables = make_tables(storage, buffers)

    @property
    def table(self) -> PageTable:
        """What is sent from."""
        return self._tables.table

    def pages(self, request_id: int) -> list[PageList]:
        """All pages of a request. It must not decode while they belong to a sender."""
        manager = self._manager
        found = []
        for storage_group, group in self._tables.group_of.items():
            if isinstance(manager, DSACacheManagerV2):
                slots = manager.kv_cache(request_id).get_base_page_indices(storage_group)
            else:
                slots = manager.store.page_indices(request_id, storage_group)
            found.append(PageList.of(group, 0, slots))
        return found
