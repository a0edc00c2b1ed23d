"""DSA managers: version 1, 2 offloaded and 2 resident agree on every latent, key and mapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
import dsa_codec_oracle as oracle  # noqa: E402
from sparse_kvcm.dsa import DSACacheManager, DSACacheManagerV2, codecs  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402


class Twins:
    """All managers through the same steps, and what they must hold."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.all = cases.managers(**changes)
        self.model = self.all[0].config.geometry
        self.rng = np.random.default_rng(seed)
        self.requests: dict[int, StepRequest] = {}
        self.prompts: dict[int, int] = {}

    def add(self, request_id: int, prompt: int) -> None:
        for manager in self.all:
            manager.add_request(request_id, 200)
            cut = prompt // 2
            for begin, end in ((0, cut), (cut, prompt)):
                manager.import_history(
                    request_id, *cases.history(self.model, request_id, begin, end)
                )
        self.requests[request_id] = StepRequest(request_id, prompt)
        self.prompts[request_id] = prompt

    def free(self, request_id: int) -> None:
        for manager in self.all:
            manager.free_request(request_id)
        del self.requests[request_id]

    def selections(self, order: list[StepRequest], b: int) -> dict[int, Any]:
        """Per group distinct tokens of each request, the new one among them, -1 anywhere."""
        chosen = {}
        for group in range(len(self.model.groups)):
            rows = np.full((b, cases.TOP_K), -1, np.int32)
            for row, one in zip(rows, order, strict=False):
                count = min(cases.TOP_K - 2, one.length)
                tokens = self.rng.choice(one.length, count, replace=False)
                tokens[0] = one.length - 1
                tokens = np.unique(tokens)
                row[self.rng.permutation(cases.TOP_K)[: len(tokens)]] = tokens
            chosen[group] = torch.from_numpy(rows)
        return chosen

    def step(self, padded: int | None = None, fail: bool = False) -> None:
        requests = list(self.requests.values())
        self.rng.shuffle(requests)  # type: ignore[arg-type]
        steps = [manager.prepare_step(requests, padded_size=padded) for manager in self.all]
        order = list(steps[0].prepared.requests)
        assert all(order == list(step.prepared.requests) for step in steps)
        self.true_mappings(*steps)
        self.same_mappings(*steps)
        selections = self.selections(order, len(steps[0].rows))
        gathered = [cases.write_tokens(manager, selections) for manager in self.all]
        self.same_latents(gathered, order, selections)
        if fail:
            return  # no call: the next prepare_step finds the step open
        for manager in self.all:
            manager.end_step()
        for place, one in enumerate(order):
            one.history += 1
            one.batch_index = place

    def true_table(self, which: int, request_id: int) -> list[int]:
        """Page indices of a request's index keys, by the storage's own converter."""
        manager: Any = self.all[which]
        storage = manager.manager.storage if which else manager.storage
        shared = kvcm.PageIndexMode.SHARED
        converter = storage.get_page_index_converter(6, "INDEX_KEY", shared)
        slots = manager.store.page_indices(request_id, manager.index_keys.layer_group)
        return list(converter.convert(slots))

    def true_mappings(self, *steps: Any) -> None:
        for which, step in enumerate(steps):
            for place, one in enumerate(step.prepared.requests):
                table = self.true_table(which, one.request_id)
                got = step.page_tables["INDEX_KEY"][place].tolist()
                assert got == table + [-1] * (len(got) - len(table))

    def same_mappings(self, one: Any, *others: Any) -> None:
        for two in others:
            assert one.rows.tolist() == two.rows.tolist()
            assert one.lengths.tolist() == two.lengths.tolist()
            for role in two.slots:  # those on the GPU of both
                assert torch.equal(one.page_tables[role], two.page_tables[role])
                both = zip(one.slots[role].regions, two.slots[role].regions, strict=True)
                assert all(torch.equal(a, b) for a, b in both)
        assert set(one.slots) == set(others[-1].slots)  # both resident

    def same_latents(self, gathered: Any, order: Any, selections: Any) -> None:
        config = self.all[0].config
        for group, layers in enumerate(self.model.groups):
            for layer in layers:
                for other in gathered[1:]:
                    assert torch.equal(gathered[0][layer], other[layer]), layer
                for place, one in enumerate(order):
                    for j, token in enumerate(selections[group][place].tolist()):
                        if token < 0:
                            assert not gathered[0][layer][place, j].any()
                            continue
                        source = one.request_id + 1000 * (token >= self.prompts[one.request_id])
                        want = cases.latents(source, layer, [token])
                        record = codecs.encode_latents(want, config.kv_dtype, rank=cases.RANK)
                        back = codecs.decode_latents(
                            record, config.kv_dtype, rank=cases.RANK, rope=cases.ROPE
                        )
                        assert torch.equal(gathered[0][layer][place, j], back[0])

    def same_keys(self) -> None:
        """Every index key of every request, byte for byte what the NumPy codec says."""
        requests = list(self.requests.values())
        steps = [manager.prepare_step(requests) for manager in self.all]
        for one in requests:
            one.is_context = True  # for the mapping alone
        for group in self.model.groups:
            rows = []
            for manager, step in zip(self.all, steps, strict=True):
                mapping, starts = step.full_kv()
                rows.append(manager.gather_index_keys(group[0], mapping))
            assert all(torch.equal(rows[0], other) for other in rows[1:])
            for place, one in enumerate(steps[0].prepared.requests):
                for token in range(one.history):
                    source = one.request_id + 1000 * (token >= self.prompts[one.request_id])
                    key = cases.keys(source, group[0], [token]).numpy()[0]
                    codes = oracle.index_key(key, "fp8")
                    record = tuple(torch.from_numpy(c)[None] for c in codes)
                    want = codecs.decode_index_keys(record, "fp8")[0]
                    assert torch.equal(rows[0][int(starts[place]) + token], want), (one, token)
        for one in requests:
            one.is_context = False
        for manager in self.all:
            manager.abort_step()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"])
def test_both_versions_agree_while_requests_join_and_leave(kv_dtype: Any) -> None:
    twins = Twins(seed=1, kv_dtype=kv_dtype)
    twins.add(1, 70)
    twins.add(2, 9)
    for _ in range(3):
        twins.step()
    twins.add(3, 0)
    twins.step(padded=4)
    twins.free(2)
    twins.add(4, 64)
    twins.add(5, 129)
    for _ in range(10):
        twins.step()
    twins.same_keys()


@pytest.mark.parametrize("index_dtype", ["bf16", "mxfp4"])
def test_both_versions_agree_on_other_index_keys(index_dtype: Any) -> None:
    twins = Twins(seed=2, index_dtype=index_dtype)
    twins.add(1, 30)
    for _ in range(3):
        twins.step()


@pytest.mark.parametrize("padded", [None, 3])
def test_a_forward_that_failed_is_followed_by_a_good_step(padded: int | None) -> None:
    """Fails if a pending write or fetch mark survives: lengths, slots and bytes would be others."""
    twins = Twins(seed=3)
    twins.add(1, 63)
    twins.add(2, 40)
    twins.step(padded)
    for _ in range(3):
        twins.step(padded, fail=True)
        twins.step(padded)
    twins.same_keys()


def test_pages_that_a_failed_step_took_may_go_to_another_request() -> None:
    twins = Twins(seed=7)
    twins.add(1, 64)
    one = twins.all[0].storage
    for number in range(9, 12):
        free = one.get_storage_statistics(0)[0].free
        steps = [manager.prepare_step(twins.requests.values()) for manager in twins.all]
        twins.true_mappings(*steps)
        for manager in twins.all:
            manager.abort_step()
        assert one.get_storage_statistics(0)[0].free == free
        for manager in twins.all:
            manager.add_request(number, 20)
            manager.import_history(number, *cases.history(twins.model, number, 0, 10))


def test_a_row_shows_who_sits_there_now() -> None:
    """The next request in a row has as many pages as the last, but others."""
    twins = Twins(seed=8)
    twins.add(1, 60)
    twins.add(2, 60)
    twins.step()
    twins.free(2)
    for manager in twins.all:
        manager.add_request(9, 20)
        manager.import_history(9, *cases.history(twins.model, 9, 0, 10))
    twins.add(3, 60)
    twins.step()
    assert [r.request_id for r in twins.requests.values()] == [1, 3]


def test_a_request_that_leaves_in_a_step_stays_readable_until_its_end() -> None:
    twins = Twins(seed=4)
    twins.add(1, 60)
    twins.add(2, 60)
    twins.step()
    for manager in twins.all:
        manager.prepare_step(twins.requests.values())
        manager.free_request(2)
        manager.end_step()
    del twins.requests[2]
    twins.requests[1].history += 1
    twins.add(3, 90)  # takes what 2 had
    for _ in range(3):
        twins.step()


def test_a_request_that_is_suspended_goes_on_where_it_was() -> None:
    twins = Twins(seed=5)
    twins.add(1, 60)
    twins.add(2, 33)
    for _ in range(4):
        twins.step()
    parked = twins.requests.pop(1)
    for manager in twins.all:
        manager.suspend_request(1)
    for manager in twins.all:
        with pytest.raises(kvcm.InvalidState):
            manager.prepare_step([StepRequest(1, parked.history)])
    for _ in range(3):
        twins.step()
    for manager in twins.all:
        manager.resume_request(1)
    # Version 2's pages have come back elsewhere, so mappings need not be equal any more.
    twins.same_mappings = lambda *steps: None  # type: ignore[method-assign]
    twins.requests[1] = parked
    parked.batch_index = None
    for _ in range(4):
        twins.step()
    twins.same_keys()


@pytest.mark.parametrize("kind", [DSACacheManager, DSACacheManagerV2])
def test_prompts_in_steps_give_what_an_import_gives(kind: Any) -> None:
    """Resident managers compute prompts in chunks; all keys are mapped, cached context too."""
    manager = kind(cases.cache_config())
    model, page = manager.config.geometry, 8
    manager.add_request(7, 60)
    manager.import_history(7, *cases.history(model, 7, 0, 10))
    for begin, end in ((10, 17), (17, 18), (18, 50)):
        request = StepRequest(7, begin, end - begin, is_context=True)
        step = manager.prepare_step([request])
        assert step.lengths.tolist() == [end]
        mapping, starts = step.full_kv()
        assert starts.tolist() == [0, end]
        table = step.page_tables["INDEX_KEY"][0].tolist()
        want = [table[p // page] * page * 132 + p % page * 128 for p in range(end)]
        assert mapping.data.tolist() == want
        assert step.slots["INDEX_KEY"].data.tolist() == want[begin:]
        for layer in model.history_layers:
            manager.write_latents(layer, cases.latents(7, layer, range(begin, end)))
        for group in model.groups:
            manager.write_index_keys(group[0], cases.keys(7, group[0], range(begin, end)))
        manager.end_step()

    twin = kind(cases.cache_config())
    twin.add_request(7, 60)
    twin.import_history(7, *cases.history(model, 7, 0, 50))
    for layer in model.history_layers:
        assert torch.equal(manager.get_buffers(layer), twin.get_buffers(layer))
    for group in model.groups:
        both = [m.get_indexer_k_cache_buffers(group[0]) for m in (manager, twin)]
        assert torch.equal(*both)


def test_tensors_of_steps_lie_at_fixed_addresses() -> None:
    twins = Twins(seed=6)
    twins.add(1, 20)
    addresses = set()
    for _ in range(2):
        for manager in twins.all:
            step = manager.prepare_step(twins.requests.values(), padded_size=4)
            tensors = [step.rows, step.lengths, step.page_tables["INDEX_KEY"]]
            tensors += step.slots["INDEX_KEY"].regions
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
            padding = 4 - len(twins.requests)
            assert step.slots["INDEX_KEY"].data[-padding:].tolist() == [-1] * padding
            manager.abort_step()
        if 2 not in twins.requests:
            twins.add(2, 50)
    assert len(addresses) == 3  # one set per manager


def test_padding_has_neither_lengths_nor_places_whoever_was_there_before() -> None:
    twins = Twins(seed=10)
    for request, prompt in ((1, 20), (2, 70), (3, 9)):
        twins.add(request, prompt)
    twins.step(padded=4)
    for manager in twins.all:
        step = manager.prepare_step([StepRequest(2, 71)], padded_size=4)
        assert step.lengths.tolist() == [72, 0, 0, 0]
        assert step.rows.tolist()[1:] == [-1] * 3
        for role, mapping in step.slots.items():
            assert (step.page_tables[role][1:] == -1).all()
            assert [part[1:].tolist() for part in mapping.regions] == [[-1] * 3] * len(
                mapping.regions
            )
        manager.abort_step()


def test_without_pages_a_step_is_refused_by_request_and_others_can_go_on() -> None:
    config = cases.cache_config(gpu_quota=1)
    room = DSACacheManager(config).storage.get_storage_statistics(0)[0].free
    requests = [StepRequest(i, 0) for i in range(2)]
    manager = DSACacheManager(config)
    for one in requests:
        manager.add_request(one.request_id, 200)
    full = cases.history(config.geometry, 0, 0, 200)
    manager.import_history(0, *full)
    taken = manager.storage.create_request_pages()
    assert taken.resize((room - 25) * 8, 0)
    with pytest.raises(kvcm.OutOfPages, match=r"request 1 \(OUT_OF_PAGES\)"):
        manager.prepare_step([requests[1]])
    taken.close()
    assert manager.prepare_step([requests[1]]).rows.tolist() == [0]
    manager.end_step()
    with pytest.raises(kvcm.OutOfPages, match=r"request 0 \(at most 200 tokens\)"):
        manager.prepare_step([StepRequest(0, 200), StepRequest(1, 1)])
    # Nothing that was computed has gone.
    for request_id, pages in ((0, 25), (1, 1)):
        assert (manager.store.page_indices(request_id, 0) >= 0).sum() == pages
        assert manager.frontier(request_id) == manager.store._requests[request_id].pages.capacity


def test_an_import_that_host_history_has_no_room_for_changes_nothing() -> None:
    config = cases.cache_config()
    sizes = cases.offload_sizes(config, host_pages=10)
    manager = cases.DSACacheManagerV2(cases.cache_config(offload=sizes))
    model, group = config.geometry, manager.index_keys.pool_group
    manager.add_request(1, 200)
    manager.import_history(1, *cases.history(model, 1, 0, 30))
    free = manager.manager.storage.get_storage_statistics(0)[group].free
    with pytest.raises(kvcm.OutOfPages):
        manager.import_history(1, *cases.history(model, 1, 30, 100))
    assert manager.manager.storage.get_storage_statistics(0)[group].free == free
    assert manager.frontier(1) == 30
    manager.import_history(1, *cases.history(model, 1, 30, 60))
    assert manager.prepare_step([StepRequest(1, 60)]).lengths.tolist() == [61]
    manager.abort_step()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_tensors_that_cannot_be_made_leave_no_step(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(seed=9)
    twins.add(1, 64)
    manager: Any = twins.all[which]
    storage = manager.manager.storage if which else manager.storage
    free = storage.get_storage_statistics(0)[0].free

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(manager._tensors, "make", fail)
        for _ in range(2):
            with pytest.raises(MemoryError):
                manager.prepare_step(twins.requests.values())
            assert manager.step is None
    if which == 0:
        assert storage.get_storage_statistics(0)[0].free == free
    twins.step()
