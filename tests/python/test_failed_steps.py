"""A step that cannot be opened is as if it had not been asked for: the next one is no other.

Each case runs two managers alike, of which one fails on the way, and compares every index tensor
of the steps that follow and all that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases  # noqa: E402
import v4_cases  # noqa: E402
from sparse_kvcm.adapter.forward_table import ForwardTable  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402


class DeviceError(Exception):
    """What a device that fails raises."""


class Failing:
    """A Batch of which one call fails."""

    def __init__(self, batch: Any, call: str, done: bool) -> None:
        self._batch, self._call, self._done = batch, call, done

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(self._batch, name)

        def fail(*args: Any) -> None:
            if self._done:  # the host learns of it behind the call
                getattr(self._batch, name)(*args)
            raise DeviceError

        return fail


def fails_in(call: str, done: bool = False) -> Callable[[Any, Any], None]:
    def set_up(manager: Any, patch: Any) -> None:
        patch.setattr(manager.store, "batch", Failing(manager.store.batch, call, done))

    return set_up


def fails_in_table(number: int) -> Callable[[Any, Any], None]:
    """Those before it are written."""

    def set_up(manager: Any, patch: Any) -> None:
        refresh, calls = ForwardTable.refresh, []

        def fail(self: ForwardTable, *args: Any) -> Any:
            if len(calls) == number:
                raise DeviceError
            calls.append(self)
            return refresh(self, *args)

        patch.setattr(ForwardTable, "refresh", fail)

    return set_up


class Dsa:
    """A DSA manager's requests; tables come one for each role."""

    def __init__(self, **changes: Any) -> None:
        config = dsa_cases.cache_config(**changes)
        if "cold_quota" not in changes:
            offload = dsa_cases.offload_sizes(config)
            config = dsa_cases.cache_config(**changes, offload=offload)
        self.manager = dsa_cases.DSACacheManagerV2(config)
        self.lengths: dict[int, int] = {}
        self.read: list[torch.Tensor] = []

    def add(self, request: int, prompt: int) -> None:
        self.manager.add_request(request, 200)
        model = self.manager.config.geometry
        self.manager.import_history(request, *dsa_cases.history(model, request, 0, prompt))
        self.lengths[request] = prompt

    def open(self) -> Any:
        order = [StepRequest(one, n, batch_index=one) for one, n in self.lengths.items()]
        return self.manager.prepare_step(order, padded_size=4)

    def step(self) -> dict[str, torch.Tensor]:
        step = self.open()
        tensors = {"rows": step.rows, "lengths": step.lengths, **step.page_tables}
        tensors |= {f"slots of {role}": one.data for role, one in step.slots.items()}
        found = {name: one.clone() for name, one in tensors.items()}
        rng = np.random.default_rng(sum(self.lengths.values()))
        chosen = np.full((4, dsa_cases.TOP_K), -1, np.int32)
        for row, one in zip(chosen, step.prepared.requests, strict=False):
            count = min(dsa_cases.TOP_K, one.length)
            row[:count] = rng.choice(one.length, count, replace=False)
        selections = dict.fromkeys(
            range(len(self.manager.config.geometry.groups)), torch.from_numpy(chosen)
        )
        read = dsa_cases.write_tokens(self.manager, selections)
        b = len(self.lengths)
        found |= {f"layer {layer}": rows[:b] for layer, rows in read.items()}
        self.manager.end_step()
        self.lengths = {one: n + 1 for one, n in self.lengths.items()}
        return found


class V4:
    """A DeepSeek-V4 manager's requests; the reader compares what it reads by itself."""

    def __init__(self, offload: bool) -> None:
        self.run = v4_cases.Run(offload, seed=5)
        self.manager, self.lengths = self.run.manager, self.run.lengths

    def add(self, request: int, prompt: int) -> None:
        self.run.add(request, prompt)

    def open(self) -> Any:
        self.run.open(padded=3)

    def step(self) -> dict[str, torch.Tensor]:
        self.run.open(padded=3)
        step = self.manager.step
        assert step is not None
        found = {"rows": step.rows.clone(), "lengths": step.lengths.clone()}
        found |= {f"table {group}": one.clone() for group, one in step.tables.items()}
        self.run.reader.run()
        self.manager.end_step()
        for request in self.lengths:
            self.lengths[request] += 1
        return found


MANAGERS = {
    "dsa-offload": Dsa,
    "dsa-resident": lambda: Dsa(cold_quota=8 << 20),
    "v4-offload": lambda: V4(True),
    "v4-resident": lambda: V4(False),
}
FAULTS = {
    "publish": fails_in("publish"),
    "wait_ready": fails_in("wait_ready"),
    "wait_ready-late": fails_in("wait_ready", done=True),
    "table": fails_in_table(0),
    "second-table": fails_in_table(1),
}
IMPOSSIBLE = {("dsa-offload", "second-table")}  # it has one; and here there is no Batch:
IMPOSSIBLE |= {("v4-resident", call) for call in FAULTS if "table" not in call}
CASES = [
    pytest.param(MANAGERS[name], FAULTS[call], id=f"{name}-{call}")
    for name in MANAGERS
    for call in FAULTS
    if (name, call) not in IMPOSSIBLE
]
# Prompts whose next page begins within the steps: tables change in the step that fails.
PROMPTS = {1: 128, 2: 40, 3: 125}


def fail(run: Any, fault: Callable[[Any, Any], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(run.manager, patch)
        with pytest.raises(DeviceError):
            run.open()
    assert run.manager.step is None


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("make", "fault"), CASES)
def test_the_step_after_a_failed_one_is_no_other(make: Any, fault: Any) -> None:
    good, bad = make(), make()
    for run in (good, bad):
        run.add(1, PROMPTS[1])
        run.add(2, PROMPTS[2])
        run.step()
        run.add(3, PROMPTS[3])  # comes in the step that fails
    for _ in range(2):
        fail(bad, fault)
    same(good.step(), bad.step())
    for _ in range(8):
        fail(bad, fault)
        same(good.step(), bad.step())


@pytest.mark.parametrize(("make", "fault"), CASES)
def test_who_was_in_a_failed_step_may_come_later(make: Any, fault: Any) -> None:
    """Their tables were written in a step that nobody saw; the next one is without them."""
    good, bad = make(), make()
    for run in (good, bad):
        for request, prompt in PROMPTS.items():
            run.add(request, prompt)
        run.step()
    fail(bad, fault)
    away = {}
    for run in (good, bad):
        away = {request: run.lengths.pop(request) for request in (1, 3)}
        run.step()
    fail(bad, fault)
    for run in (good, bad):
        run.lengths.update(away)
    for _ in range(4):
        same(good.step(), bad.step())


@pytest.mark.parametrize(("make", "fault"), CASES)
def test_who_was_in_a_failed_step_may_leave(make: Any, fault: Any) -> None:
    good, bad = make(), make()
    for run in (good, bad):
        run.add(1, PROMPTS[1])
        run.add(2, PROMPTS[2])
        run.step()
    fail(bad, fault)
    for run in (good, bad):
        run.manager.suspend_request(2)
        run.manager.free_request(1)
        del run.lengths[1]
        run.manager.resume_request(2)
        run.add(3, PROMPTS[3])
    for _ in range(4):
        same(good.step(), bad.step())


@pytest.mark.parametrize(
    "make", [dsa_cases.managers, lambda: [V4(False).manager, V4(True).manager]]
)
def test_rows_that_others_keep_are_named_and_can_be_had(make: Any) -> None:
    for manager in make():
        if manager.store.decodes_only:  # as many leases as rows
            continue
        rows = manager.config.max_batch_size
        requests = [StepRequest(request, 0) for request in range(rows + 1)]
        for one in requests:
            manager.add_request(one.request_id, 20)
        manager.prepare_step(requests[:rows])
        manager.abort_step()
        with pytest.raises(kvcm.InvalidState, match=rf"no row is free for request {rows}: {rows} "):
            manager.prepare_step(requests[rows:])
        assert manager.step is None
        manager.suspend_request(0)
        assert manager.prepare_step(requests[rows:]).rows.tolist() == [0]
        manager.end_step()


@pytest.mark.parametrize(
    "make", [dsa_cases.managers, lambda: [V4(False).manager, V4(True).manager]]
)
def test_an_id_that_is_freed_in_an_open_step_may_be_used_again_in_it(make: Any) -> None:
    """The step counts for who was in it, and what it reads goes back when it ends."""
    for manager in make():
        free = [one.free for one in manager.store.storage.get_storage_statistics(0)]
        manager.add_request(1, 20)
        manager.prepare_step([StepRequest(1, 0)])
        manager.free_request(1)
        assert manager.frontier(1) is None
        manager.add_request(1, 30)
        manager.abort_step()
        assert manager.frontier(1) == 0
        manager.prepare_step([StepRequest(1, 0)])
        manager.free_request(1)
        manager.add_request(1, 30)
        manager.end_step()
        assert manager.frontier(1) == 0
        manager.free_request(1)
        assert [one.free for one in manager.store.storage.get_storage_statistics(0)] == free
