"""Tables of what managers and storages have, and a history that goes from one to another."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.transfer.copier import HostCopier
from sparse_kvcm.transfer.history import history_table
from sparse_kvcm.transfer.page_table import PeerDataError, Pool, decode_table, encode_table
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.transport import Route
from sparse_kvcm.transfer.wire import PageList

SPLIT = kvcm.UnitLayout([576, 8])
PLAIN = kvcm.UnitLayout([656])


def make_manager(layouts: list[kvcm.UnitLayout], tokens_per_block: int = 64) -> kvcm.KvCacheManager:
    groups = [
        kvcm.SelectionGroupConfig([3 * i, 3 * i + 1, 3 * i + 2], top_k=64, layout=layout)
        for i, layout in enumerate(layouts)
    ]
    return kvcm.KvCacheManager(
        kvcm.KvCacheManagerConfig(
            groups=groups,
            cached_slots=128,
            window_slots=128,
            arena_pages=2 * 256 // tokens_per_block,
            host_pages=2048 // tokens_per_block,
            max_leases=2,
            tokens_per_block=tokens_per_block,
        )
    )


def filled(manager: kvcm.KvCacheManager, units: int) -> kvcm.KvCache:
    cache = manager.create_kv_cache(1500)
    assert cache.resume()
    rng = np.random.default_rng(7)
    layout = {layer: one.layout for one in manager.config.groups for layer in one.layers}
    cache.import_history(
        {
            layer: rng.integers(0, 256, (units, layout[layer].unit_bytes), np.uint8)
            for layer in manager.layers
        }
    )
    return cache


@pytest.mark.parametrize("pages", [(64, 64), (64, 128), (128, 64)])
def test_a_history_goes_to_another_manager_as_it_lies(pages: tuple[int, int]) -> None:
    source, target = (make_manager([SPLIT, PLAIN], size) for size in pages)
    here, there = filled(source, 700), filled(target, 700)
    for group in range(2):
        target.host_history(group)[:] = 0
    own = PageList.of(0, 0, here.host_pages)
    wanted = PageList.of(0, 0, there.host_pages)
    projection = Projection(
        history_table(source), decode_table(encode_table(history_table(target)))
    )
    found = projection.ranges({0: own}, [wanted], (0, 700), 700)
    assert set(found) == {Route("DRAM", "DRAM")}
    assert len(found[Route("DRAM", "DRAM")]) <= 2 * 12  # pages at most, never units
    HostCopier().start(found[Route("DRAM", "DRAM")])
    for group in range(2):
        rows = [
            manager.host_history(group)[cache.host_pages].reshape(-1, row_bytes)[:700]
            for manager, cache, row_bytes in (
                (source, here, source.host_history(group).shape[2]),
                (target, there, target.host_history(group).shape[2]),
            )
        ]
        assert rows[0].any()
        assert (rows[0] == rows[1]).all()


def test_histories_with_other_rows_do_not_mix() -> None:
    # 3 x (576 + 8) and 3 x 584 are rows of equal length, with their pieces in another order.
    source, target = make_manager([SPLIT]), make_manager([kvcm.UnitLayout([584])])
    with pytest.raises(PeerDataError, match="units of"):
        Projection(history_table(source), history_table(target))


def test_a_resident_manager_has_no_history_to_describe() -> None:
    layer = kvcm.LayerConfig(0, [kvcm.BufferConfig("KEY", 4096)])
    manager = kvcm.KvCacheManager(
        kvcm.KvCacheManagerConfig(dense_layers=[layer], gpu_quota=8 << 20)
    )
    with pytest.raises(kvcm.InvalidArgument, match="resident"):
        history_table(manager)


@dataclass
class Desc:
    """What a storage on a GPU would say of a pool."""

    storage_medium: kvcm.CacheTier
    base_address: int = 4096
    slot_bytes: int = 512
    num_slots: int = 8


@pytest.mark.parametrize(
    ("medium", "device", "memory", "index"),
    [
        (kvcm.CacheTier.GPU_MEM, "cuda:1", "VRAM", 1),
        (kvcm.CacheTier.GPU_MEM, "cuda", "VRAM", 0),
        (kvcm.CacheTier.HOST_MEM, "cuda:1", "DRAM", 0),
        (kvcm.CacheTier.GPU_MEM, "cpu", "DRAM", 0),
    ],
)
def test_the_memory_type_is_the_medium_of_the_storage(
    medium: kvcm.CacheTier, device: str, memory: str, index: int
) -> None:
    pool = Pool.of(Desc(medium), device)  # type: ignore[arg-type]
    assert (pool.memory, pool.device) == (memory, index)
    assert pool.region.size == 4096


def test_pools_of_a_storage_are_described_as_they_are() -> None:
    layers = [kvcm.LayerConfig(i, [kvcm.BufferConfig("KEY", 4096)]) for i in range(3)]
    tiers = [kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, 4 << 20)]
    storage = kvcm.Storage(kvcm.StorageConfig(cache_tiers=tiers, layers=layers))
    [[desc]] = storage.pool_group_descs()
    pool = Pool.of(desc, storage.config.device)
    memory = storage.pool_memory(0, 0)
    assert (pool.base_address, pool.num_slots, pool.slot_bytes) == (
        memory.ctypes.data,
        *memory.shape,
    )


def test_without_msgspec_the_extra_is_named() -> None:
    code = "import sys; sys.modules['msgspec'] = None; import sparse_kvcm, sparse_kvcm.transfer"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install sparse_kvcm[transfer]" in run.stderr.splitlines()[-1]
