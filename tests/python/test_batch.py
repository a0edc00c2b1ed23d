"""Steps of a Batch on the CPU: growth, launches, bytes, errors, abort, suspend."""

from __future__ import annotations

import numpy as np
import pytest

import sparse_kvcm as kvcm
from factories import active, int32, make_config, read_slot, take_step, unit_bytes, write_slot
from resolve_program import poisoned_outputs
from sparse_kvcm import KvCacheState, ResizeResult


@pytest.fixture
def manager() -> kvcm.KvCacheManager:
    return kvcm.KvCacheManager(make_config())


def test_decoded_units_are_read_back_from_slots_after_many_steps(
    manager: kvcm.KvCacheManager,
) -> None:
    """Growth, flush, fetch: every selected unit has its own bytes, whichever step wrote it."""
    rng = np.random.default_rng(3)
    batch, cache = manager.create_batch(2, 200), active(manager, 200, 30)
    batch.add(cache, 1)
    for length in range(31, 120):
        assert take_step(batch, row1=length) == {1: ResizeResult.OK}
        for group, k in [(0, 6), (1, 4)]:
            selection = rng.choice(length, (1, k), replace=False).astype(np.int32)
            resolved = batch.resolve(group, int32(1), selection)
            layers = manager.config.groups[group].layers
            for part in [None] if length % 2 else [layers[:1], layers[1:]]:
                if part != []:
                    batch.fetch(group, int32(1), resolved, layers=part)
            for layer in layers:
                size = manager.config.groups[group].layout.unit_bytes
                new = unit_bytes(1, layer, length - 1, size)[0]
                write_slot(manager, layer, int(resolved.write_slots[0, 0]), new)
                for ordinal, slot in zip(selection[0], resolved.slots[0], strict=True):
                    expected = unit_bytes(1, layer, ordinal, size)[0]
                    assert (read_slot(manager, layer, slot) == expected).all()
        batch.record_read([1])
    assert (cache.length, cache.committed_length, cache.watermark) == (119, 119, 118)
    assert batch.take_errors().rows == []


def test_own_and_given_outputs_get_the_same_result() -> None:
    results = []
    for given in (False, True):
        manager = kvcm.KvCacheManager(make_config())
        batch, cache = manager.create_batch(2, 100), active(manager, 100, 30)
        batch.add(cache)
        take_step(batch, row0=31)
        out = poisoned_outputs(1, 3, 2) if given else None
        resolved = batch.resolve(0, int32(0), int32([1, 30, 7]), out)
        assert (resolved is out) == given
        count = int(resolved.miss_counts[0])
        results.append(
            [
                a.tolist()
                for a in (
                    resolved.slots,
                    resolved.write_slots,
                    resolved.hit_counts,
                    resolved.errors,
                    resolved.miss_ordinals[:, :count],
                )
            ]
        )
    assert results[0] == results[1]


def test_own_outputs_stay_at_their_address(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(2, 100), active(manager, 100, 30)
    batch.add(cache)
    addresses = set()
    for length in (31, 32):
        take_step(batch, row0=length)
        addresses.add(batch.resolve(0, int32(0), int32([1, 2])).slots.ctypes.data)
        batch.record_read([0])
    assert len(addresses) == 1


def test_torch_tensors_launch_and_receive_results(manager: kvcm.KvCacheManager) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    batch, cache = manager.create_batch(2, 100), active(manager, 100, 30)
    batch.add(cache)
    take_step(batch, row0=31)
    rows, selection = torch.tensor([0]).int(), torch.tensor([[3, 30]]).int()
    out = kvcm.ResolveOutputs.empty(1, 2, 2, like=selection)
    batch.fetch(0, rows, batch.resolve(0, rows, selection, out))
    slot = int(out.slots[0, 0])
    assert (read_slot(manager, 2, slot) == unit_bytes(1, 2, 3, 32)[0]).all()


def test_resize_says_per_row_why_not(manager: kvcm.KvCacheManager) -> None:
    batch = manager.create_batch(3, 100)
    caches = [active(manager, *units) for units in ((100, 30), (31, 31), (100, 40))]
    for row, cache in enumerate(caches):
        batch.add(cache, row)
    results = batch.resize({0: 31, 1: 32, 2: 43})
    assert results == {
        0: ResizeResult.OK,
        1: ResizeResult.PAST_NEED,
        2: ResizeResult.PAST_NEW_UNITS,
    }


def test_resize_past_the_window_is_refused_when_the_host_is_full() -> None:
    manager = kvcm.KvCacheManager(make_config(host_pages=3))
    batch, cache = manager.create_batch(1, 100), active(manager, 100, 12)
    batch.add(cache)
    for length in range(13, 17):
        assert take_step(batch, row0=length) == {0: ResizeResult.OK}
        batch.record_read([0])
    assert batch.resize({0: 17}) == {0: ResizeResult.PAST_WINDOW}
    assert (cache.length, cache.watermark) == (16, 12)
    with pytest.raises(kvcm.OutOfPages):
        cache.suspend()


def test_publish_returns_the_rows_it_uploaded(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(3, 100), active(manager, 100, 8)
    batch.add(cache, 1)
    assert batch.dirty_rows == [0, 1, 2]
    assert batch.publish() == [0, 1, 2]
    batch.record_read([1])
    assert batch.publish() == []
    assert (batch.clock, batch.step_open, batch.max_rows) == (2, True, 3)


def test_abort_gives_lengths_back_and_empties_entries(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(1, 100), active(manager, 100, 30)
    batch.add(cache)
    take_step(batch, row0=32)
    batch.resolve(0, int32(0), int32([1, 2, 3]))
    assert not all(entry.empty for entry in cache.decode_entries(0))
    batch.abort_step()
    assert (cache.length, cache.committed_length) == (30, 30)
    assert all(entry.empty for entry in cache.decode_entries(0))
    assert batch.step_open is False


def test_errors_of_a_step_arrive_when_it_closes(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(2, 100), active(manager, 100, 30)
    batch.add(cache, 1)
    take_step(batch)
    batch.resolve(1, int32(1, 7), int32([30, 1], [0, 0]))
    assert batch.take_errors().rows == []
    batch.record_read([1])
    errors = batch.take_errors()
    assert len(errors.rows) == 1
    error = errors.rows[0]
    assert (error.row, error.group, error.clock) == (1, 1, 1)
    assert error.bits == kvcm.ErrorBits.RANGE
    assert errors.batch == kvcm.BatchErrorBits.ROW
    assert batch.take_errors().batch == 0


def test_launch_before_wait_ready_is_stale(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(1, 100), active(manager, 100, 30)
    batch.add(cache)
    batch.publish()
    resolved = batch.resolve(0, int32(0), int32([1]))
    assert resolved.errors.tolist() == [kvcm.ErrorBits.STALE]
    assert resolved.slots.tolist() == [[-1]]


def test_suspended_request_goes_on_where_it_was(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(1, 100), active(manager, 100, 30)
    batch.add(cache)
    take_step(batch, row0=31)
    resolved = batch.resolve(0, int32(0), int32([30]))
    for layer in (0, 2):
        new = unit_bytes(1, layer, 30, 32)[0]
        write_slot(manager, layer, int(resolved.write_slots[0, 0]), new)
    batch.record_read([0])
    cache.suspend()
    assert (cache.state, cache.row, cache.lease) == (KvCacheState.SUSPENDED, None, None)
    assert (cache.length, cache.watermark) == (31, 31)
    assert cache.resume()
    batch.add(cache)
    take_step(batch)
    resolved = batch.resolve(0, int32(0), int32([30]))
    batch.fetch(0, int32(0), resolved)
    for layer in (0, 2):
        got = read_slot(manager, layer, int(resolved.slots[0, 0]))
        assert (got == unit_bytes(1, layer, 30, 32)[0]).all()


def test_closed_batch_refuses_and_frees_its_requests(manager: kvcm.KvCacheManager) -> None:
    batch, cache = manager.create_batch(1, 100), active(manager, 100, 30)
    batch.add(cache)
    take_step(batch, row0=31)
    batch.close()
    batch.close()  # a no-op
    assert (cache.row, cache.length) == (None, 30)
    with pytest.raises(kvcm.InvalidState):
        batch.publish()
    assert manager.create_batch(1, 100).add(cache) == 0
