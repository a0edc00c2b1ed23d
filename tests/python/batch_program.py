"""A random life of requests in one Batch, beside a model of it.

The model has the lengths of every request, an `Oracle` per selection group, and knows which bytes
every unit must have. Host pages suffice, so each publish brings every seated watermark up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

import sparse_kvcm as kvcm
from factories import history, layout_of, make_config, read_slot, unit_bytes, write_slot
from resolve_oracle import EMPTY, Oracle, Row
from resolve_program import check_outputs, poisoned_outputs

MAX_ROWS = 4


@dataclass
class Request:
    """What one request must look like."""

    cache: kvcm.KvCache
    number: int
    need: int
    cached_slots: int  # N; 0 if it fits its lease as a whole
    window_slots: int
    committed: int = 0
    length: int = 0
    watermark: int = 0
    window_begin: int = 0
    row: int | None = None
    empty: bool = True  # the lease has not been published yet

    def row_state(self) -> Row:
        lease = self.cache.lease
        assert lease is not None
        return Row(
            lease.id,
            lease.base,
            self.cached_slots,
            self.window_slots,
            self.length,
            self.committed,
            self.window_begin,
            self.watermark,
        )

    def check(self) -> None:
        cache = self.cache
        assert cache.row == self.row
        assert (cache.committed_length, cache.length) == (self.committed, self.length)
        assert (cache.watermark, cache.window_begin) == (self.watermark, self.window_begin)
        assert len(cache.host_pages) >= (self.watermark + 3) // 4


class BatchProgram:
    """Takes random steps; every check that fails names what differs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.manager = kvcm.KvCacheManager(make_config(arena_pages=14, host_pages=400))
        self.config = self.manager.config
        slots = self.manager.trash_slot
        no_write_slot = self.rng.choice([-1, slots])
        self.batch = self.manager.create_batch(MAX_ROWS, 400, no_write_slot)
        self.oracles = [
            Oracle(slots, self.config.max_leases, self.config.max_new_units, no_write_slot)
            for _ in self.config.groups
        ]
        self.requests: list[Request] = []
        self.row_states = [Row()] * MAX_ROWS
        self.created = 0
        self.clock = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.rng.randint(0, 3)):
                self._between_steps()
            self._step()
            for request in self.requests:
                request.check()
            self._check_entries()

    # --- between steps ---
    def _between_steps(self) -> None:
        often = [self._create, self._join, self._join, self._import, self._launch_while_closed]
        seldom = [self._leave, self._suspend, self._close, self._idle]
        self.rng.choice(often * 2 + seldom)()

    def _pick(self) -> Request | None:
        return self.rng.choice(self.requests) if self.requests else None

    def _create(self) -> None:
        if len(self.requests) >= 6:
            return
        need = self.rng.choice([3, 12, 13, 60, 200, 400])
        cached_slots = self.rng.choice([None, 8, 12])
        cache = self.manager.create_kv_cache(need, cached_slots)
        cached = cached_slots or self.config.cached_slots
        window = self.config.window_slots
        if need <= cached + window:
            cached, window = 0, (need + 3) // 4 * 4
        self.created += 1
        request = Request(cache, self.created, need, cached, window)
        self.requests.append(request)
        self._import_into(request, self.rng.randint(0, need))

    def _import(self) -> None:
        request = self._pick()
        if request is None:
            return
        count = self.rng.randint(0, min(20, request.need - request.committed))
        if request.length != request.committed or request.watermark < request.committed:
            with pytest.raises(kvcm.InvalidState):
                self._import_into(request, count)
        else:
            self._import_into(request, count)

    def _import_into(self, request: Request, count: int) -> None:
        end = request.committed + count
        request.cache.import_history(history(self.manager, request.number, request.committed, end))
        request.committed = request.length = request.watermark = end
        if request.cache.state == kvcm.KvCacheState.ACTIVE:
            request.window_begin = end if request.cached_slots else 0
        else:
            request.window_begin = request.cache.window_begin

    def _join(self) -> None:
        request = self._pick()
        if request is None or request.row is not None:
            return
        if request.cache.state == kvcm.KvCacheState.SUSPENDED:
            if not request.cache.resume():
                return
            request.window_begin = request.committed if request.cached_slots else 0
            request.empty = True
        seated = {r.row for r in self.requests}
        free = [row for row in range(MAX_ROWS) if row not in seated]
        if not free:
            return
        row = self.rng.choice([None, self.rng.choice(free)])
        request.row = self.batch.add(request.cache, row)
        assert request.row == (free[0] if row is None else row)

    def _leave(self) -> None:
        request = self._pick()
        if request is not None and request.row is not None:
            self.batch.remove(request.cache)
            request.row = None

    def _suspend(self) -> None:
        request = self._pick()
        if request is None or request.cache.state != kvcm.KvCacheState.ACTIVE:
            return
        request.cache.suspend()
        request.row = None
        request.length = request.watermark = request.window_begin = request.committed

    def _close(self) -> None:
        if self.requests and self.rng.random() < 0.4:
            self.requests.pop(self.rng.randrange(len(self.requests))).cache.close()

    def _launch_while_closed(self) -> None:
        self._launch([r for r in self._seated() if not r.empty], step_open=False)

    def _idle(self) -> None:
        """Steps in which nobody is launched: entries age."""
        for _ in range(self.rng.choice([1, 125, 126, 127, 128, 129, 1000])):
            self.batch.publish()
            self._model_publish()
            self.batch.wait_ready()
            self.batch.record_read([])
            for request in self._seated():
                request.length = request.committed
            self._check_errors()

    # --- one step ---
    def _seated(self) -> list[Request]:
        return [request for request in self.requests if request.row is not None]

    def _step(self) -> None:
        self._grow()
        self.batch.publish()
        self._model_publish()
        self.batch.wait_ready()
        seated = self._seated()
        launched = self.rng.sample(seated, max(self.rng.randint(0, len(seated)) for _ in range(3)))
        self._launch(launched, step_open=True)
        if self.rng.random() < 0.1:
            self._launch(launched, step_open=True)  # a replay without a publish
        if self.rng.random() < 0.1:
            self.batch.abort_step()
            for request in seated:
                request.length = request.committed
                self._reset(request, self.clock)
        else:
            self.batch.record_read([r.row for r in launched if r.row is not None])
            for request in seated:
                if request in launched:
                    request.committed = request.length
                request.length = request.committed
        self._check_errors()

    def _grow(self) -> None:
        wanted = {}
        for request in self._seated():
            if self.rng.random() < 0.8:
                wanted[request.row] = request.committed + self.rng.randint(0, 3)
        results = self.batch.resize(wanted)
        assert results.keys() == wanted.keys()
        for request in self._seated():
            if request.row not in wanted:
                continue
            length = wanted[request.row]
            expected = kvcm.ResizeResult.OK
            if length > request.need:
                expected = kvcm.ResizeResult.PAST_NEED
            elif length > request.committed + self.config.max_new_units:
                expected = kvcm.ResizeResult.PAST_NEW_UNITS
            assert results[request.row] == expected
            if expected == kvcm.ResizeResult.OK:
                request.length = length

    def _model_publish(self) -> None:
        for request in self._seated():
            if request.empty:
                self._reset(request, self.clock)
                request.empty = False
            request.watermark = request.committed
            if request.cached_slots:
                request.window_begin = max(
                    request.window_begin, request.length - request.window_slots
                )
        self.clock += 1
        assert self.batch.clock == self.clock
        states = [Row()] * MAX_ROWS
        for request in self._seated():
            states[request.row or 0] = request.row_state()
        got = [Row(*line) for line in self.batch.row_states.tolist()]
        assert [s.lease_id < 0 for s in got] == [s.lease_id < 0 for s in states]
        assert [s for s in got if s.lease_id >= 0] == [s for s in states if s.lease_id >= 0]
        self.row_states = states

    def _reset(self, request: Request, clock: int) -> None:
        state = request.row_state()
        for oracle in self.oracles:
            oracle.reset(state.lease_id, state.base, state.cached_slots, clock)

    def _launch(self, requests: list[Request], step_open: bool) -> None:
        rows = [r.row if r.row is not None else -1 for r in requests]
        by_row: list[Request | None] = list(requests)
        while len(rows) < MAX_ROWS and self.rng.random() < 0.3:
            place = self.rng.randint(0, len(rows))
            rows.insert(place, self.rng.choice([-1, -1, -5, MAX_ROWS]))
            by_row.insert(place, None)
        if not rows:
            return
        for group, config in enumerate(self.config.groups):
            k = self.rng.randint(1, config.top_k)
            selection = [[self._ordinal(request) for _ in range(k)] for request in by_row]
            b = len(rows)
            array = np.array(rows, np.int32)
            out = None
            if self.rng.random() < 0.5:
                out = poisoned_outputs(b, k, self.config.max_new_units)
            out = self.batch.resolve(group, array, np.array(selection, np.int32), out)
            expected = self.oracles[group].launch(
                rows, self.row_states, selection, self.clock, step_open
            )
            check_outputs(out, expected)
            self.batch.fetch(group, array, out)
            if step_open:
                self._write_and_read(group, by_row, selection, out)

    def _ordinal(self, request: Request | None) -> int:
        end = request.length if request is not None else 30
        choices = [self.rng.randint(0, min(9, end)) for _ in range(5)]  # few enough to hit
        choices += [-1, self.rng.randint(0, max(0, end - 1)), max(0, end - self.rng.randint(1, 4))]
        if self.rng.random() < 0.02:
            choices = [end, -3, 2**31 - 1]
        return self.rng.choice(choices)

    def _write_and_read(
        self,
        group: int,
        by_row: list[Request | None],
        selection: list[list[int]],
        out: kvcm.ResolveOutputs,
    ) -> None:
        for layer in self.config.groups[group].layers:
            size = layout_of(self.manager, layer).unit_bytes
            for i, request in enumerate(by_row):
                if request is None:
                    continue
                if not out.errors[i] & kvcm.ErrorBits.STALE:
                    for j, ordinal in enumerate(range(request.committed, request.length)):
                        unit = unit_bytes(request.number, layer, ordinal, size)[0]
                        write_slot(self.manager, layer, int(out.write_slots[i, j]), unit)
                for ordinal, slot in zip(selection[i], out.slots[i].tolist(), strict=True):
                    if slot >= 0:
                        unit = unit_bytes(request.number, layer, ordinal, size)[0]
                        got = read_slot(self.manager, layer, slot)
                        assert (got == unit).all(), f"row {i} unit {ordinal} slot {slot}"

    # --- what must hold after a step ---
    def _check_errors(self) -> None:
        errors = self.batch.take_errors()
        expected = {
            (row, group): bits
            for group, oracle in enumerate(self.oracles)
            for row, bits in oracle.row_errors.items()
        }
        assert {(e.row, e.group): int(e.bits) for e in errors.rows} == expected
        assert all(error.clock == self.clock for error in errors.rows)
        assert int(errors.batch) == max(oracle.batch_error for oracle in self.oracles)
        for oracle in self.oracles:
            oracle.row_errors.clear()
            oracle.batch_error = 0

    def _check_entries(self) -> None:
        for request in self.requests:
            if request.cache.state != kvcm.KvCacheState.ACTIVE:
                continue
            state = request.row_state()
            for group, oracle in enumerate(self.oracles):
                words = oracle.entries[state.base : state.base + state.cached_slots]
                if request.empty:
                    words = [EMPTY] * state.cached_slots
                got = [
                    EMPTY if e.empty else e.stamp << 25 | e.resident << 24 | e.ordinal
                    for e in request.cache.decode_entries(group)
                ]
                assert got == words
