"""Runs one program of resolve launches on `ops` and on the oracle, and compares everything."""

from __future__ import annotations

import numpy as np

from resolve_oracle import Oracle, Result, Row
from sparse_kvcm import ops

POISON = 0x5A5A5A5A


def poisoned_outputs(b: int, k: int, max_new_units: int) -> ops.ResolveOutputs:
    outputs = ops.ResolveOutputs.empty(b, k, max_new_units)
    for array in vars(outputs).values():
        array[...] = POISON
    return outputs


def check_outputs(outputs: ops.ResolveOutputs, expected: list[Result]) -> None:
    """Every cell that the contract defines, named when it differs."""
    k = outputs.slots.shape[1]
    for i, result in enumerate(expected):
        count = len(result.misses)
        where = f"launch position {i}"
        assert outputs.slots[i].tolist() == result.slots, where
        assert outputs.write_slots[i].tolist() == result.write_slots, where
        assert outputs.miss_counts[i] == count, where
        assert outputs.hit_counts[i] == result.hits, where
        assert outputs.errors[i] == result.error, where
        assert outputs.miss_ordinals[i, :count].tolist() == [m[0] for m in result.misses], where
        assert outputs.miss_slots[i, :count].tolist() == [m[1] for m in result.misses], where
        assert count <= k


class ResolveProgram:
    """Device arrays of one selection group beside an oracle of the same shape."""

    def __init__(
        self,
        num_slots: int,
        num_leases: int,
        num_rows: int,
        max_new_units: int,
        no_write_slot: int = -1,
    ) -> None:
        self.oracle = Oracle(num_slots, num_leases, max_new_units, no_write_slot)
        self.row_states = [Row()] * num_rows
        self.entries = np.full(num_slots, 0xFFFFFFFF, np.uint32)
        self.last = np.zeros(num_leases, np.uint32)
        self.row_errors = np.zeros(num_rows, np.uint32)
        self.batch_error = np.zeros(1, np.uint32)

    def reset(self, lease_id: int, base: int, cached_slots: int, clock: int) -> None:
        self.oracle.reset(lease_id, base, cached_slots, clock)
        ops.reset_leases([(lease_id, base, cached_slots)], [self.entries], [self.last], clock)

    def launch(
        self, rows: list[int], selection: list[list[int]], clock: int, step_open: bool = True
    ) -> ops.ResolveOutputs:
        b, k = len(rows), len(selection[0])
        outputs = poisoned_outputs(b, k, self.oracle.max_new_units)
        ops.resolve(
            np.array(selection, np.int32).reshape(b, k),
            np.array(rows, np.int32),
            np.array(self.row_states, np.int32),
            np.array([clock, step_open], np.uint32),
            self.entries,
            self.last,
            out=outputs,
            no_write_slot=self.oracle.no_write_slot,
            row_errors=self.row_errors,
            batch_error=self.batch_error,
        )
        expected = self.oracle.launch(rows, self.row_states, selection, clock, step_open)
        check_outputs(outputs, expected)
        self.check_state()
        return outputs

    def check_state(self) -> None:
        assert self.entries.tolist() == self.oracle.entries
        assert self.last.tolist() == self.oracle.last
        errors = [self.oracle.row_errors.get(row, 0) for row in range(len(self.row_states))]
        assert self.row_errors.tolist() == errors
        assert self.batch_error[0] == self.oracle.batch_error
