"""The rules of storage, restated from their formulas in NumPy and plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

import sparse_kvcm as kvcm

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
GIB = 1 << 30


def stale(window: int | None, sinks: int, tokens: int, history: int) -> range:
    """n = ceil(h / tpb), a = min(n, ceil(S / tpb)), [a, max(a, floor((h + 1 - W) / tpb)))."""
    if window is None:
        return range(0)
    begin = min(-(-history // tokens), -(-sinks // tokens))
    return range(begin, max(begin, (history + 1 - window) // tokens))


def scratch(
    window: int | None, sinks: int, tokens: int, history: int, capacity: int, rewind: int
) -> list[int]:
    """Pages of stale(max(0, cap - rewind)) in [ceil(hist / tpb), ceil(cap / tpb))."""
    gone = stale(window, sinks, tokens, max(0, capacity - rewind))
    return [p for p in range(-(-history // tokens), -(-capacity // tokens)) if p in gone]


def convert(
    base: Ints, scale: int, expansion: int, position: int, mode: kvcm.PageIndexMode
) -> Ints:
    """i = b s (SHARED) or b s + L (PER_LAYER), then i E + u; -1 stays."""
    pages = base.astype(np.int64) * scale
    if mode == kvcm.PageIndexMode.PER_LAYER:
        pages += position
    indices = pages[:, None] * expansion + np.arange(expansion)
    return np.where(base[:, None] < 0, -1, indices).reshape(-1)


@dataclass(frozen=True)
class Coalesced:
    """Buffers of one size: bytes of one page, and whose."""

    buffer_bytes: int
    buffers: tuple[tuple[int, str], ...]

    @property
    def slot_bytes(self) -> int:
        return self.buffer_bytes * len(self.buffers)

    @property
    def most_of_one_layer(self) -> int:
        return max(len(list(g)) for _, g in groupby(self.buffers, key=lambda buffer: buffer[0]))


@dataclass(frozen=True)
class Group:
    """A layer group."""

    window: int | None
    sinks: int
    is_sparse: bool
    slot: tuple[Coalesced, ...]


def layer_groups(config: kvcm.StorageConfig) -> list[Group]:
    """By life cycle, then by bytes per page; largest coalesced buffer first."""
    by_life: dict[tuple[int | None, int, bool], dict[int, list[tuple[int, str]]]] = {}
    for layer in config.layers:
        life = (
            layer.sliding_window_size,
            layer.num_sink_tokens or 0,
            layer.buffers[0].is_sparse,
        )
        sizes = by_life.setdefault(life, {})
        for buffer in layer.buffers:
            override = buffer.tokens_per_block_override or config.tokens_per_block
            size = buffer.page_bytes * (config.tokens_per_block // override)
            sizes.setdefault(size, []).append((layer.layer_id, buffer.role))
    result = []
    for life, sizes in by_life.items():
        slot = [Coalesced(size, tuple(buffers)) for size, buffers in sizes.items()]
        slot.sort(key=lambda c: (c.slot_bytes, c.buffer_bytes), reverse=True)
        result.append(Group(*life, tuple(slot)))
    return result


def host_row_bytes(group: kvcm.SelectionGroupConfig) -> int:
    total = sum(group.layout.region_bytes) * len(group.layers)
    return -(-total // 16) * 16


@dataclass(frozen=True)
class Pools:
    """A pool group."""

    level: int
    is_sparse: bool
    is_cold: bool
    slot_bytes: tuple[int, ...]
    groups: tuple[int, ...]


def pool_groups(config: kvcm.StorageConfig) -> list[Pools]:
    """Dense homes, the sparse home, cold ones; each where layer groups have equal slots."""
    units = config.tokens_per_block // config.tokens_per_unit
    keys: dict[tuple[int, bool, bool, tuple[int, ...]], list[int]] = {}
    groups = layer_groups(config)
    for sparse in (False, True):
        for i, group in enumerate(groups):
            if group.is_sparse != sparse:
                continue
            sizes = tuple(c.slot_bytes for c in group.slot)
            if sparse:
                sizes = tuple(host_row_bytes(g) * units for g in config.selection_groups)
            keys.setdefault((int(sparse), sparse, False, sizes), []).append(i)
    if len(config.cache_tiers) > 1:
        for i, group in enumerate(groups):
            if not group.is_sparse:
                size = sum(c.slot_bytes for c in group.slot)
                keys.setdefault((1, False, True, (size,)), []).append(i)
    return [Pools(*key, tuple(members)) for key, members in keys.items()]


def scratch_slots(group: Group, num_pages: int) -> int:
    """Pages of one layer keep apart: floor(s / q) of them share a slot."""
    return max(-(-num_pages // (len(c.buffers) // c.most_of_one_layer)) for c in group.slot)


def count_pages(config: kvcm.StorageConfig, group: Group, batch: kvcm.BatchDesc) -> int:
    """Slots of a layer group: shared pages once, each request's own, scratch as it shares."""
    tokens = config.tokens_per_block
    shared_end = batch.system_prompt_length // tokens
    shared: set[int] = set()
    own = 0
    for request in batch.kv_caches:
        pages = set(range(-(-request.capacity // tokens)))
        pages -= set(stale(group.window, group.sinks, tokens, request.history_length))
        if config.swa_scratch_reuse is not None:
            shares = scratch(
                group.window,
                group.sinks,
                tokens,
                request.history_length,
                request.capacity,
                config.swa_scratch_reuse.max_rewind_len,
            )
            pages -= set(shares)
            own += scratch_slots(group, len(shares))
        shared |= {p for p in pages if p < shared_end}
        own += len([p for p in pages if p >= shared_end])
    return len(shared) + own


def floor_pages(config: kvcm.StorageConfig, group: Group) -> int:
    """Sink pages + floor((W + tpb - 2) / tpb) + 1; without a window the most of those."""
    tokens = config.tokens_per_block

    def with_window(g: Group) -> int:
        assert g.window is not None
        return -(-g.sinks // tokens) + (g.window + tokens - 2) // tokens + 1

    if group.window is not None:
        return with_window(group)
    windows = [g for g in layer_groups(config) if g.window is not None]
    return max([1, *(with_window(g) for g in windows)])


def min_slots(config: kvcm.StorageConfig) -> list[int]:
    """The larger of floors and constraints, at max_util_for_resume at most."""
    groups = layer_groups(config)
    result = []
    for pools in pool_groups(config):
        if pools.is_cold:
            result.append(1)
            continue
        slots = sum(floor_pages(config, groups[i]) for i in pools.groups)
        for batch in config.constraints:
            slots = max(slots, sum(count_pages(config, groups[i], batch) for i in pools.groups))
        total = slots
        while slots > total * config.max_util_for_resume:
            total += 1
        result.append(total)
    return result


def typical_batches(config: kvcm.StorageConfig) -> list[kvcm.BatchDesc]:
    """The typical step, else constraints, else 2,049 tokens."""
    if config.typical_step is not None:
        return [config.typical_step]
    return list(config.constraints) or [kvcm.BatchDesc([kvcm.KvCacheDesc(2049, 2048)])]


def suspended(config: kvcm.StorageConfig) -> kvcm.BatchDesc:
    """Who is said to be suspended, else one request as long as the longest typical one."""
    if config.suspended is not None:
        return config.suspended
    length = max(r.capacity for batch in typical_batches(config) for r in batch.kv_caches)
    return kvcm.BatchDesc([kvcm.KvCacheDesc(length, length)])


def cold_slots(config: kvcm.StorageConfig, batch: kvcm.BatchDesc) -> list[int]:
    """Pages that a batch has in each cold pool group; 0 in others."""
    groups = layer_groups(config)
    return [
        max(1, sum(count_pages(config, groups[i], batch) for i in p.groups)) if p.is_cold else 0
        for p in pool_groups(config)
    ]


def pool_ratio(config: kvcm.StorageConfig) -> Floats:
    """Bytes of the typical step and, in cold pools, of who is suspended, per level."""
    groups = layer_groups(config)
    batches = typical_batches(config)
    pages = [max([1, *(count_pages(config, g, b) for b in batches)]) for g in groups]
    cold = cold_slots(config, suspended(config))
    weights = [
        float(sum(pools.slot_bytes))
        * (cold[g] if pools.is_cold else sum(pages[i] for i in pools.groups))
        for g, pools in enumerate(pool_groups(config))
    ]
    levels = np.array([pools.level for pools in pool_groups(config)])
    sums = np.bincount(levels, weights=weights, minlength=2)
    return np.array(weights) / sums[levels]


def granule(quota: int) -> int:
    """2 MiB * 2^clamp(floor(log2(quota / 1 GiB)), 0, 4)."""
    doublings = 0 if quota < 2 * GIB else int(np.floor(np.log2(quota / GIB)))
    return (2 << 20) << min(4, doublings)


def granules_for(slot_bytes: tuple[int, ...], slots: int, size: int) -> int:
    return sum(max(1, -(-slots * b // size)) for b in slot_bytes)


def slots_for(slot_bytes: tuple[int, ...], granules: int, size: int) -> int:
    """The most slots that so many granules hold."""
    slots = granules * size // slot_bytes[0]
    while slots > 0 and granules_for(slot_bytes, slots, size) > granules:
        slots -= max(
            1, (granules_for(slot_bytes, slots, size) - granules) * size // (2 * sum(slot_bytes))
        )
    while granules_for(slot_bytes, slots + 1, size) <= granules:
        slots += 1
    return slots if granules >= len(slot_bytes) else 0


def slots_for_quota(
    config: kvcm.StorageConfig, ratio: list[float], level: int, quota: int
) -> list[int]:
    """Deal granules by weight; who gets no more than the least is set to it and leaves.

    `ratio` is given, since its last bit decides where a share is half a granule.
    """
    pools, least = pool_groups(config), min_slots(config)
    size = granule(config.cache_tiers[level].quota)
    homes = [g for g, p in enumerate(pools) if p.level == level]
    floor = {g: granules_for(pools[g].slot_bytes, least[g], size) for g in homes}
    left = max(sum(floor.values()), -(-quota // size))
    slots = [0] * len(pools)
    players = sorted(homes, key=lambda g: ratio[g])
    while players:
        shares: dict[int, int] = {}
        granules, weight = left, 0.0
        for g in players:
            weight += ratio[g]
        for g in players:
            shares[g] = min(granules, int(np.floor(granules * (ratio[g] / weight) + 0.5)))
            granules -= shares[g]
            weight -= ratio[g]
        dealt = {g: slots_for(pools[g].slot_bytes, shares[g], size) for g in players}
        poor = [g for g in players if dealt[g] <= least[g]]
        if not poor:
            for g in players:
                slots[g] = dealt[g]
            break
        for g in poor:
            slots[g] = slots_for(pools[g].slot_bytes, floor[g], size)
            left -= floor[g]
        players = [g for g in players if g not in poor]
    history = [g for g in homes if pools[g].is_sparse]
    if history:
        _leave_rest_to_history(config, slots, max(sum(floor.values()), -(-quota // size)), size)
    return slots


def _leave_rest_to_history(
    config: kvcm.StorageConfig, slots: list[int], granules: int, size: int
) -> None:
    """Cold pools: at most all, at least one of who is suspended if half of the tier holds it."""
    pools, least = pool_groups(config), min_slots(config)
    home = next(g for g, p in enumerate(pools) if p.is_sparse)
    cold = [g for g, p in enumerate(pools) if p.is_cold]
    batch = suspended(config)
    longest = max(batch.kv_caches, key=lambda r: r.capacity)
    most = cold_slots(config, batch)
    one = cold_slots(config, kvcm.BatchDesc([longest]))
    low = {g: min(slots[g], most[g]) for g in cold}
    high = {g: max(low[g], one[g]) for g in cold}
    taken = sum(granules_for(pools[g].slot_bytes, n, size) for g, n in high.items())
    floor = granules_for(pools[home].slot_bytes, least[home], size)
    if 2 * taken > granules or taken + floor > granules:
        high = low
    for g, n in high.items():
        share = granules_for(pools[g].slot_bytes, n, size)
        slots[g] = slots_for(pools[g].slot_bytes, share, size)
        granules -= share
    slots[home] = slots_for(pools[home].slot_bytes, granules, size)
