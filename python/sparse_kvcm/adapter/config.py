"""What the configurations of all models' managers share: what an engine wants, and offload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sparse_kvcm._core import BatchDesc, InvalidArgument, KvCacheDesc, SelectionGroupConfig
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.models import KvDtype, ModelGeometry


@dataclass(frozen=True)
class ManagerFeatures:
    """What an engine wants of a manager.

    Attributes
    ----------
    has_connector : bool
        A KV connector reads or writes pages.
    beam_width : int
    context_parallel : {"none", "helix", "star"}
    offloads : bool
        History goes to the host.
    """

    has_connector: bool = False
    beam_width: int = 1
    context_parallel: Literal["none", "helix", "star"] = "none"
    offloads: bool = False


@dataclass(frozen=True)
class OffloadSizes:
    """Memory of an offloading manager, beside its pools.

    Attributes
    ----------
    cached_slots : int
        N of a lease: a multiple of a page, at least the model's top-k.
    host_pages : int
        Pages of host history, for all requests together.
    window_slots : int, optional
        W of a lease, a multiple of a page. None: one page.
    arena_pages : int, optional
        Pages of all leases. None: for a lease of N + W of each request.
    cold_quota : int
        Pinned host bytes for the pages in its pools of suspended requests.
    """

    cached_slots: int
    host_pages: int
    window_slots: int | None = None
    arena_pages: int | None = None
    cold_quota: int = 0

    def manager_fields(
        self,
        geometry: ModelGeometry,
        kv_dtype: KvDtype,
        *,
        units_per_page: int,
        max_pages: int,
        max_requests: int,
    ) -> dict[str, Any]:
        """The fields of a `KvCacheManagerConfig` that these sizes decide, `cold_quota` too.

        Parameters
        ----------
        geometry : ModelGeometry
        kv_dtype : str
        units_per_page : int
            Units of a page of the arena.
        max_pages : int
            Pages of the longest request.
        max_requests : int
            That have a lease at a time.
        """
        window = units_per_page if self.window_slots is None else self.window_slots
        lease = min(math.ceil((self.cached_slots + window) / units_per_page), max_pages)
        layout, roles = geometry.unit_layout(kv_dtype), geometry.region_roles(kv_dtype)
        return {
            "groups": [
                SelectionGroupConfig(group, geometry.top_k, layout, roles)
                for group in geometry.groups
            ],
            "cached_slots": self.cached_slots,
            "window_slots": window,
            "arena_pages": self.arena_pages or max_requests * lease,
            "host_pages": self.host_pages,
            "max_leases": max_requests,
            "cold_quota": self.cold_quota,
        }


def check_sizes(function: str, sizes: OffloadSizes | None) -> None:
    """Refuse sizes that are no numbers of slots, pages and bytes."""
    if sizes is None:
        return
    if not isinstance(sizes, OffloadSizes):
        raise InvalidArgument(f"[{function}] offload must be OffloadSizes or None, got {sizes!r}")
    for field, least in (("cached_slots", 1), ("host_pages", 1), ("cold_quota", 0)):
        check_int(function, f"offload.{field}", getattr(sizes, field), least)
    for field in ("window_slots", "arena_pages"):
        if getattr(sizes, field) is not None:
            check_int(function, f"offload.{field}", getattr(sizes, field), 1)


def longest_request(max_seq_len: int) -> BatchDesc:
    """A batch that pools must hold whatever else they do: one request at its last token."""
    return BatchDesc([KvCacheDesc(max_seq_len, max_seq_len - 1)])
