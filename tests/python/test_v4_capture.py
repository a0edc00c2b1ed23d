"""A DeepSeek-V4 step can be captured in a CUDA graph and replayed, whoever comes and goes.

On the CPU the same program runs without a graph: each forward is given the step object of the
first one, as a graph is given its addresses, and nothing between prepare_step and end_step asks a
tensor for a value. On a GPU it is captured. Expected values are made from names, not by a manager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import v4_cases as cases  # noqa: E402
from no_sync import NoSync  # noqa: E402
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager  # noqa: E402
from v4_cases import Inputs, Run  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])
ROWS = 4
WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
Launch = Callable[[Inputs], Inputs]


def manager(offload: bool, device: str = "cpu", **changes: Any) -> DeepseekV4CacheManager:
    return cases.manager(offload, max_batch_size=ROWS, gpu_quota=64 << 20, device=device, **changes)


def play(made: DeepseekV4CacheManager, launch: Launch) -> None:
    """Requests join, leave, suspend and resume; inputs lie in one place throughout."""
    run, kept = Run.of(made), {}
    suspended: dict[int, int] = {}

    def leave(request: int) -> None:
        made.free_request(request)
        del run.lengths[request]

    def suspend(request: int) -> None:
        made.suspend_request(request)
        suspended[request] = run.lengths.pop(request)

    def resume(request: int) -> None:
        made.resume_request(request)
        run.lengths[request] = suspended.pop(request)

    program: dict[int, list[Callable[[], None]]] = {
        0: [lambda: run.add(5, 126), lambda: run.add(2, 39)],
        3: [lambda: run.add(3, 251)],  # joins between the others
        5: [lambda: leave(2)],  # places of a forward move up
        6: [lambda: run.add(1, 2), lambda: run.add(7, 383)],  # no entry at first; all rows taken
        8: [lambda: suspend(3)],
        10: [lambda: leave(7), lambda: run.add(8, 600)],
        11: [lambda: resume(3)],
    }
    for number in range(16):
        for action in program.get(number, []):
            action()
        run.open(padded=ROWS)
        inputs = run.reader.inputs()
        for key, rows in inputs.items():
            if key not in kept:
                kept[key] = rows.to(made.config.device).clone()
            kept[key].copy_(rows)
        found = {key: rows.cpu() for key, rows in launch(kept).items()}
        run.reader.check_all(inputs, found)
        made.end_step()
        run.lengths = {request: n + 1 for request, n in run.lengths.items()}


class Frozen:
    """Launches on the step object of the first launch, as a graph does."""

    def __init__(self, made: DeepseekV4CacheManager) -> None:
        self.made = made
        self.first: Any = None
        self.addresses: set[tuple[int, ...]] = set()

    def __call__(self, inputs: Inputs) -> Inputs:
        step = self.made.step
        assert step is not None
        self.first = self.first or step
        self.made._step = self.first
        with NoSync():
            found = cases.forward(self.made, inputs)
        self.made._step = step
        tensors = [step.rows, step.lengths, step.query_places, step.query_lengths]
        tensors += step.tables.values()
        self.addresses.add(tuple(one.data_ptr() for one in tensors))
        if self.made.config.offload is not None:
            outs = [self.made.resolved(layer) for layer in self.made.access.arenas]
            arrays = [a for out in outs for a in (out.slots, out.write_slots)]
            self.addresses.add(tuple(np.asarray(one).ctypes.data for one in arrays))
        return found


@MODES
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_ds_mla"])
def test_one_step_object_serves_every_step(offload: bool, kv_dtype: Any) -> None:
    model = cases.geometry(**(WIDE if kv_dtype == "fp8_ds_mla" else {}))
    made = manager(offload, geometry=model, kv_dtype=kv_dtype)
    if kv_dtype != "bf16":  # records round; the program is what is tested, its values above
        launch = Frozen(made)
        run = Run.of(made)
        run.add(1, 126)
        for _ in range(4):
            run.open(padded=ROWS)
            launch(run.reader.inputs())
            made.end_step()
            run.lengths[1] += 1
    else:
        launch = Frozen(made)
        play(made, launch)
    assert len(launch.addresses) == 1 + offload


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])
def test_a_captured_forward_replays_over_requests_that_join_and_leave(
    offload: bool, gpu: str
) -> None:
    made = manager(offload, gpu)
    graph: Any = None
    captured: Inputs = {}
    launches = 0

    def launch(inputs: Inputs) -> Inputs:
        nonlocal graph, captured, launches
        launches += 1
        if launches == 1:  # a warm-up, as graphs want
            return cases.forward(made, inputs)
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = cases.forward(made, inputs)
        graph.replay()
        return captured

    play(made, launch)
    assert launches > 2
