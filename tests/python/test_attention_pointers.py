"""Where attention begins to read: the arena where there is one, else the mapped pool."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases  # noqa: E402
import v4_cases  # noqa: E402
from sparse_kvcm.attention import (  # noqa: E402
    AttentionImplementation,
    AttentionRegistry,
    PointerTable,
    attention_base,
    pointer_table,
)
from sparse_kvcm.deepseek_v4 import AttentionType  # noqa: E402

KV_DTYPES = ["bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"]
WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def storage_address(storage: Any, layer: int, role: str) -> int:
    return int(storage.get_mem_pool_base_address(layer, role, kvcm.PageIndexMode.SHARED))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_dsa_reads_the_arena_if_offloaded_and_else_the_pool(kv_dtype: Any) -> None:
    first, offloaded, resident = dsa_cases.managers(kv_dtype=kv_dtype)
    roles = first.config.key_roles
    for layer in range(6):
        arena = torch.from_dlpack(offloaded.manager.arena(layer))
        base = attention_base(offloaded, layer)
        assert base.is_arena
        offsets = [begin for begin, _ in base.layout.page.regions]
        assert base.addresses == tuple(arena.data_ptr() + offset for offset in offsets)
        for manager, storage in ((first, first.storage), (resident, resident.manager.storage)):
            base = attention_base(manager, layer)
            assert not base.is_arena
            wanted = tuple(storage_address(storage, layer, role) for role in roles)
            assert base.addresses == wanted
            assert base.layout.name == f"dsa/{kv_dtype}"


@pytest.mark.parametrize("kv_dtype", ["bf16", "nvfp4"])
@pytest.mark.parametrize("entries", ["layer", "pool"])
def test_both_tables_of_pointers_give_the_same_bases(entries: Any, kv_dtype: Any) -> None:
    for manager in dsa_cases.managers(kv_dtype=kv_dtype):
        for region in range(len(manager.config.key_roles)):
            table = pointer_table(manager, entries, region)
            for layer in range(6):
                assert table.base(layer) == attention_base(manager, layer).addresses[region]
        if manager.config.offload is None:
            assert len(table.primary) == (6 if entries == "layer" else 1)
            assert not any(table.auxiliary)
        else:
            assert not any(table.primary)  # host history is no pool of attention


@pytest.mark.parametrize("by_pool", [False, True])
def test_dynamic_sparse_attention_reads_the_auxiliary_pool_where_there_is_one(
    by_pool: bool,
) -> None:
    """Of four layers, whose primary pools are mapped, two have one."""
    size, auxiliary = 4096, [0, 0x7000, 0, 0x9000]
    if by_pool:
        mapping = [(0, 0), (0, 1), (1, 0), (1, 2)]
        table = PointerTable([0x100000, 0x200000], mapping, size, auxiliary)
    else:
        addresses = [0x100000, 0x101000, 0x200000, 0x202000]
        table = PointerTable(addresses, [(i, 0) for i in range(4)], size, auxiliary)
    assert [table.base(i) for i in range(4)] == [0x100000, 0x7000, 0x200000, 0x9000]
    assert [table.window(i) for i in range(4)] == [0x100000, 0x101000, 0x200000, 0x202000]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("entries", ["layer", "pool"])
def test_windows_of_v4_keep_their_pool_whatever_becomes_of_entries(
    entries: Any, kv_dtype: Any
) -> None:
    for offloads in (False, True):
        made = v4_cases.manager(offloads, geometry=v4_cases.geometry(**WIDE), kv_dtype=kv_dtype,
                                index_dtype="fp8", gpu_quota=64 << 20)  # fmt: skip
        storage, model = made.store.storage, made.config.geometry
        table = pointer_table(made, entries)
        for layer, ratio in enumerate(model.compress_ratios):
            window = attention_base(made, layer, AttentionType.SWA)
            home = model.storage_layer_of(AttentionType.SWA, layer)
            place = storage.get_mem_pool_base_address(
                home, AttentionType.SWA.role, kvcm.PageIndexMode.PER_LAYER
            )
            assert (window.addresses[0], window.is_arena) == (place, False)
            assert table.window(layer) == place
            if not ratio:
                assert table.base(layer) == place
                continue
            selected = attention_base(made, layer)
            assert selected.is_arena == (offloads and ratio == 4)
            assert table.base(layer) == selected.addresses[0] != place
            if selected.is_arena:
                arena = torch.from_dlpack(made.store.manager.arena(layer))
                assert selected.addresses[0] == arena.data_ptr()
            else:
                home = model.storage_layer_of(AttentionType.COMPRESS, layer)
                role = AttentionType.COMPRESS.role
                assert selected.addresses[0] == storage_address(storage, home, role)


def test_a_layer_without_such_a_cache_is_refused() -> None:
    wrong: Any
    made = dsa_cases.managers()[1]
    with pytest.raises(kvcm.InvalidArgument, match="layer must be one of .*got 6"):
        attention_base(made, 6)
    with pytest.raises(kvcm.InvalidArgument, match="kind must be None with DSA, got SWA"):
        attention_base(made, 0, AttentionType.SWA)
    v4, wrong = v4_cases.manager(True), "page"
    with pytest.raises(kvcm.InvalidArgument, match="COMPRESS.*got 0"):
        attention_base(v4, 0)
    with pytest.raises(kvcm.InvalidArgument, match="COMPRESS or SWA.*got INDEXER_COMPRESS"):
        attention_base(v4, 1, AttentionType.INDEXER_COMPRESS)
    with pytest.raises(kvcm.InvalidArgument, match="layer or pool, got 'page'"):
        pointer_table(made, wrong)
    for layer in (-1, 6):
        with pytest.raises(kvcm.InvalidArgument, match=r"layer must be in \[0, 6\), got"):
            pointer_table(made).base(layer)
    with pytest.raises(kvcm.InvalidArgument, match="layer 0 must have a pool on the GPU"):
        pointer_table(made).window(0)


@pytest.mark.parametrize(
    ("mapping", "auxiliary", "message"),
    [
        ([(0, 0), (1, 0)], [0, 0], "mapping of layer 1 must be an entry"),
        ([(0, -1), (0, 0)], [0, 0], "mapping of layer 0 must be an entry"),
        ([(0, 0)], [0, 0], "auxiliary must have 1 layers"),
    ],
)
def test_tables_that_do_not_fit_are_refused(mapping: Any, auxiliary: Any, message: str) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=message):
        PointerTable([4096], mapping, 64, auxiliary)


# --- dispatch ---


def implementation(name: str, reads: Any, layouts: Any = None) -> AttentionImplementation:
    return AttentionImplementation(name, lambda base, rows: (name, rows), reads, layouts)


def test_an_implementation_that_reads_no_arena_is_never_chosen_for_one() -> None:
    """Though it is preferred; and asked for by name, it is refused, not replaced."""
    _, offloaded, resident = dsa_cases.managers(kv_dtype="fp8")
    registry = AttentionRegistry(
        [implementation("pools", False), implementation("both", True), implementation("late", True)]
    )
    arena, pool = attention_base(offloaded, 3), attention_base(resident, 3)
    assert (registry.choose(arena).name, registry.choose(pool).name) == ("both", "pools")
    assert registry.choose(arena, "late").name == "late"
    with pytest.raises(kvcm.InvalidArgument, match="pools does not read arena rows"):
        registry.choose(arena, "pools")
    with pytest.raises(kvcm.InvalidArgument, match="pools does not read arena rows"):
        AttentionRegistry([implementation("pools", False)]).choose(arena)
    with pytest.raises(kvcm.InvalidArgument, match="none known"):
        AttentionRegistry().choose(pool)


def test_an_implementation_that_reads_no_arena_refuses_its_rows() -> None:
    _, offloaded, resident = dsa_cases.managers()
    pools = implementation("pools", False)
    with pytest.raises(kvcm.InvalidArgument, match=r"\[pools\] .*does not read arena rows"):
        pools(attention_base(offloaded, 0), rows=[1])
    assert pools(attention_base(resident, 0), rows=[1]) == ("pools", [1])
    assert implementation("both", True)(attention_base(offloaded, 0), [2]) == ("both", [2])


def test_an_implementation_is_chosen_for_records_that_it_reads() -> None:
    base = attention_base(dsa_cases.managers(kv_dtype="nvfp4")[1], 0)
    registry = AttentionRegistry(
        [implementation("fp8", True, frozenset({"dsa/fp8"})), implementation("any", True)]
    )
    assert registry.choose(base).name == "any"
    with pytest.raises(kvcm.InvalidArgument, match="fp8 reads dsa/fp8, not dsa/nvfp4"):
        registry.choose(base, "fp8")


def test_the_registry_refuses_what_it_cannot_keep() -> None:
    registry = AttentionRegistry([implementation("one", True)])
    with pytest.raises(kvcm.InvalidArgument, match="name must be a new one, got 'one'"):
        registry.register(implementation("one", False))
    with pytest.raises(kvcm.InvalidArgument, match="reads_arena_rows of two must be a bool"):
        registry.register(implementation("two", None))
    assert registry.names == ("one",)
    base = attention_base(dsa_cases.managers()[0], 0)
    with pytest.raises(kvcm.InvalidArgument, match="name must be one of one, got 'other'"):
        registry.choose(base, "other")
