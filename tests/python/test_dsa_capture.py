"""What a forward calls between prepare_step and end_step can be captured in a CUDA graph.

On the CPU: no shape depends on data, since nothing asks for a value. On a GPU: it is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from no_sync import NoSync  # noqa: E402
from sparse_kvcm.adapter import slot_mapping as maps  # noqa: E402
from sparse_kvcm.adapter.scatter import gather, scatter  # noqa: E402
from sparse_kvcm.dsa import codecs  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

KV_DTYPES = ["bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"]


@pytest.mark.parametrize(
    "wrong", ["x[x > 0]", "x[x > 0] = 1", "x.sum().item()", "bool(x.any())", "torch.tensor([1])"]
)
def test_what_waits_is_caught(wrong: str) -> None:
    x = torch.arange(3)
    with pytest.raises(AssertionError), NoSync():
        exec(wrong, {"x": x, "torch": torch})


def forward(manager: Any, selection: Any, keys: Any, latents: Any) -> Callable[[], dict[int, Any]]:
    def run() -> dict[int, Any]:
        gathered = {}
        for group in manager.config.geometry.groups:
            manager.write_index_keys(group[0], keys)
            slots = manager.select(group[0], selection)
            for layer in group:
                manager.write_latents(layer, latents)
                gathered[layer] = manager.gather_latents(layer, slots)
        return gathered

    return run


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_forward_asks_for_no_value(which: int, kv_dtype: Any) -> None:
    manager = cases.managers(kv_dtype=kv_dtype)[which]
    model = manager.config.geometry
    manager.add_request(1, 100)
    manager.import_history(1, *cases.history(model, 1, 0, 40))
    manager.prepare_step([StepRequest(1, 40)], padded_size=3)
    selection = torch.full((3, cases.TOP_K), -1, dtype=torch.int32)
    selection[0, :3] = torch.tensor([40, 2, 17])
    run = forward(manager, selection, torch.zeros(3, 128), torch.zeros(3, cases.RANK + cases.ROPE))
    with NoSync():
        run()
    manager.end_step()


@pytest.mark.parametrize("index_dtype", ["bf16", "fp8", "mxfp4"])
def test_shapes_are_known_without_data(index_dtype: Any) -> None:
    """On the meta device there is none, so that asking for it raises."""
    config = cases.cache_config(index_dtype=index_dtype)
    page = config.index_page
    with torch.device("meta"):
        table = torch.zeros(4, 5, dtype=torch.int32)
        rows, positions = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        pool = torch.zeros(7, page.page_bytes, dtype=torch.uint8)
        record = codecs.encode_index_keys(torch.zeros(4, 128), index_dtype)
        mapping = maps.map_tokens(table, rows, positions, page)
        scatter(pool, mapping, record)
        shapes = [tuple(part.shape) for part in gather(pool, mapping)]
    assert shapes == [(4, size) for _, size in page.regions]


@pytest.mark.parametrize("missing", [[], [0], [3], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("regions", [[8], [8, 4]])
def test_tokens_without_a_place_write_nothing(missing: list[int], regions: list[int]) -> None:
    """Also where the first page and token belong to another, or to one of these."""
    page = maps.PageGeometry(kvcm.UnitLayout(regions), 4)
    rng = np.random.default_rng(len(missing))
    for places in ([5, 0, 11, 2], [5, 1, 11, 2]):
        slots = [-1 if i in missing else slot for i, slot in enumerate(places)]
        before = rng.integers(0, 256, (3, page.page_bytes), dtype=np.uint8)
        record = [rng.integers(0, 256, (4, size), dtype=np.uint8) for size in regions]
        want = before.copy()
        for token, slot in enumerate(slots):
            if slot >= 0:
                for part, (begin, size) in zip(record, page.regions, strict=True):
                    at = begin + slot % 4 * size
                    want[slot // 4, at : at + size] = part[token]
        pool = torch.from_numpy(before.copy())
        mapping = maps.map_slots(torch.tensor(slots), page)
        scatter(pool, mapping, tuple(map(torch.from_numpy, record)))
        np.testing.assert_array_equal(pool.numpy(), want)


def test_no_tokens_write_nothing() -> None:
    page = maps.PageGeometry(kvcm.UnitLayout([8]), 4)
    mapping = maps.map_slots(torch.zeros(0, dtype=torch.int32), page)
    scatter(torch.zeros(0, 32, dtype=torch.uint8), mapping, (torch.zeros(0, 8).byte(),))


# --- on a GPU ---


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_captured_forward_replays_like_an_eager_one(which: int, gpu: str) -> None:
    """Two managers of a kind through the same steps, one of which replays a graph."""
    eager, graphed = (cases.managers(device=gpu)[which] for _ in range(2))
    model = eager.config.geometry
    for manager in (eager, graphed):
        for request, prompt in ((1, 40), (2, 63)):
            manager.add_request(request, 100)
            keys = cases.history(model, request, 0, prompt)
            manager.import_history(
                request, *({i: part.to(gpu) for i, part in one.items()} for one in keys)
            )
    selection = torch.full((4, cases.TOP_K), -1, dtype=torch.int32, device=gpu)
    keys = torch.zeros(4, 128, device=gpu)
    latents = torch.zeros(4, cases.RANK + cases.ROPE, device=gpu)
    runs = [forward(m, selection, keys, latents) for m in (eager, graphed)]
    graph, lengths, captured = None, {1: 40, 2: 63}, {}
    for step in range(6):
        rng = np.random.default_rng(step)
        requests = [StepRequest(i, n) for i, n in lengths.items()]
        for manager in (eager, graphed):
            manager.prepare_step(requests, padded_size=4)
        chosen = np.full((4, cases.TOP_K), -1, np.int32)
        for row, n in enumerate(lengths.values()):
            chosen[row, : cases.TOP_K - 1] = rng.choice(n + 1, cases.TOP_K - 1, replace=False)
        selection.copy_(torch.from_numpy(chosen))
        keys.copy_(torch.from_numpy(rng.standard_normal((4, 128), np.float32)))
        latents.copy_(torch.from_numpy(rng.standard_normal(tuple(latents.shape), np.float32)))
        expected = runs[0]()
        if step == 1:  # after a warm-up, as graphs want
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = runs[1]()
        if graph is None:
            got = runs[1]()
        else:
            graph.replay()
            got = captured
        for layer in model.history_layers:
            assert torch.equal(got[layer][:2], expected[layer][:2]), (step, layer)
        for manager in (eager, graphed):
            manager.end_step()
        lengths = {i: n + 1 for i, n in lengths.items()}
    for group in model.groups:
        views = [m.get_indexer_k_cache_buffers(group[0]) for m in (eager, graphed)]
        table = eager.store.base_tables(eager.index_keys.layer_group)[:2]
        pages = maps.kernel_page_indices(table, eager.index_keys.scale)
        pages = pages[pages >= 0].long().to(gpu)
        assert torch.equal(views[0][pages], views[1][pages])


def test_all_tokens_are_mapped_of_those_alone_that_compute_a_prompt() -> None:
    manager = cases.DSACacheManager(cases.cache_config())
    for request in (1, 2):
        manager.add_request(request, 60)
    manager.import_history(2, *cases.history(manager.config.geometry, 2, 0, 9))
    step = manager.prepare_step([StepRequest(2, 9), StepRequest(1, 0, 5, is_context=True)])
    mapping, starts = step.full_kv()
    assert starts.tolist() == [0, 5]
    assert mapping.data.tolist() == step.slots["INDEX_KEY"].data.tolist()[1:]
