"""A resident prefill and an offloading worker in one process, for both kinds of model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

import dsa_cases
import v4_cases
from sparse_kvcm.adapter.slot_mapping import map_full_kv
from sparse_kvcm.dsa import DSACacheManagerV2, codecs
from sparse_kvcm.step import StepRequest
from sparse_kvcm.transfer.attempts import Received, ReceiverOptions, ReceiverUse
from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.copier import Copier, HostCopier
from sparse_kvcm.transfer.in_process import InProcessTransport, Network
from sparse_kvcm.transfer.page_table import PageTable, PoolGroup
from sparse_kvcm.transfer.receiver import Receiver
from sparse_kvcm.transfer.sender import Outcome, Sender
from sparse_kvcm.transfer.source import ResidentSource
from sparse_kvcm.transfer.target import OffloadTarget
from sparse_kvcm.transfer.transport import MemoryType, Region

STAGING_SLOTS = 5
BOUNCE_BYTES = 1 << 20


class LabelledTarget(OffloadTarget):
    """Its pools play VRAM; staging is what it is."""

    @property
    def table(self) -> PageTable:
        return labelled(super().table, "VRAM", self._tables.staging)


class LabelledSource(ResidentSource):
    """Its pools play memory of `memory`."""

    memory: MemoryType = "VRAM"

    @property
    def table(self) -> PageTable:
        return labelled(super().table, self.memory)


def labelled(table: PageTable, memory: MemoryType, staging: int | None = None) -> PageTable:
    """A table whose pools say that they are of a type, except those of a layer group."""
    kept = -1 if staging is None else table.layer_groups[staging].pool_group
    groups = tuple(
        group
        if index == kept
        else PoolGroup(tuple(msgspec.structs.replace(pool, memory=memory) for pool in group.pools))
        for index, group in enumerate(table.pool_groups)
    )
    return msgspec.structs.replace(table, pool_groups=groups)


def make_bounce(copier: Copier | None = None, num_bytes: int = BOUNCE_BYTES) -> Bounce:
    """A region that plays VRAM."""
    memory = np.zeros(num_bytes, np.uint8)
    region = Region(memory.ctypes.data, num_bytes, "VRAM")
    return Bounce(region, copier or HostCopier(), min_bytes=1, memory=memory)


MAX_POLLS = 2000


class DsaModel:
    """DSA managers, and what a request must look like."""

    page = 8
    max_tokens = 200

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def source(self, page: int) -> DSACacheManagerV2:
        config = dsa_cases.cache_config(**{"tokens_per_block": page} | self.changes)
        return DSACacheManagerV2(config)

    def target(self, page: int, **offload: Any) -> DSACacheManagerV2:
        changes = {"tokens_per_block": page} | self.changes
        offload = {"cached_slots": -(-24 // page) * page} | offload
        sizes = dsa_cases.offload_sizes(dsa_cases.cache_config(**changes), **offload)
        return DSACacheManagerV2(dsa_cases.cache_config(**changes, offload=sizes))

    def fill(self, manager: Any, request: int, tokens: int) -> None:
        manager.add_request(request, max(tokens, 1))
        manager.import_history(
            request, *dsa_cases.history(dsa_cases.geometry(), request, 0, tokens)
        )

    def check(self, manager: Any, lengths: dict[int, int], keys_of: dict[int, int]) -> None:
        """Decode a token of each request, and compare all that a layer may read.

        `keys_of`: the request of `fill` by the target's key.
        """
        step = manager.prepare_step([StepRequest(key, n) for key, n in lengths.items()])
        model = manager.config.geometry
        rng = np.random.default_rng(5)
        selections = {}
        for number in range(len(model.groups)):
            rows = np.full((len(step.rows), dsa_cases.TOP_K), -1, np.int32)
            for row, one in zip(rows, step.prepared.requests, strict=True):
                newest = range(max(0, one.history - 4), one.history)
                chosen = {*newest, *rng.integers(0, one.history, dsa_cases.TOP_K - 4).tolist()}
                row[: len(chosen)] = sorted(chosen)
            selections[number] = torch.from_numpy(rows)
        gathered = dsa_cases.write_tokens(manager, selections)
        for layer, found in gathered.items():
            group = model.selection_group_of[layer]
            for row, one in enumerate(step.prepared.requests):
                chosen = selections[group][row]
                wanted = dsa_cases.latents(keys_of[one.request_id], layer, chosen[chosen >= 0])
                wanted = decoded_latents(manager, wanted)
                torch.testing.assert_close(found[row][chosen >= 0], wanted, rtol=0, atol=0)
        for layer, *_ in model.groups:
            self.check_index_keys(manager, layer, keys_of)
        manager.end_step()

    def check_index_keys(self, manager: Any, layer: int, keys_of: dict[int, int]) -> None:
        """All of a layer's but the step's own."""
        step = manager.step
        mapping, begins = map_full_kv(
            step.page_tables["INDEX_KEY"], step.lengths, manager.index_keys.page
        )
        found = manager.gather_index_keys(layer, mapping)
        for one, begin in zip(step.prepared.requests, begins.tolist(), strict=False):
            wanted = dsa_cases.keys(keys_of[one.request_id], layer, range(one.history))
            record = codecs.encode_index_keys(
                wanted, manager.config.index_dtype, index_scale=manager.config.index_scale
            )
            wanted = codecs.decode_index_keys(record, manager.config.index_dtype)
            torch.testing.assert_close(found[begin : begin + one.history], wanted, rtol=0, atol=0)


def decoded_latents(manager: Any, values: torch.Tensor) -> torch.Tensor:
    """What is left of latents in a manager's records."""
    model, dtype, scale = manager.config.geometry, manager.config.kv_dtype, manager.config.kv_scale
    record = codecs.encode_latents(values, dtype, rank=model.kv_lora_rank, scale=scale)
    return codecs.decode_latents(
        record, dtype, rank=model.kv_lora_rank, rope=model.qk_rope_head_dim, scale=scale
    )


class V4Model:
    """DeepSeek-V4 managers."""

    page = 128
    max_tokens = 900

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def source(self, page: int) -> Any:
        return v4_cases.manager(False, tokens_per_block=page, **self.changes)

    def target(self, page: int, **offload: Any) -> Any:
        config = v4_cases.cache_config(True, tokens_per_block=page, **self.changes)
        assert config.offload is not None
        changed = replace(config, offload=replace(config.offload, **offload))
        return v4_cases.DeepseekV4CacheManager(changed)

    def fill(self, manager: Any, request: int, tokens: int) -> None:
        manager.add_request(request, tokens)
        history = v4_cases.history(manager.config.geometry, request, tokens)
        manager.import_history(request, history)

    def check(self, manager: Any, lengths: dict[int, int], keys_of: dict[int, int]) -> None:
        assert all(key == value for key, value in keys_of.items()), "items tell their request"
        manager.prepare_step(v4_cases.requests_of(lengths))
        v4_cases.Reader(manager, np.random.default_rng(5)).run()
        manager.end_step()


class Pair:
    """A sender and a receiver in one network, with a clock that stands still."""

    def __init__(
        self,
        model: Any,
        *,
        pages: tuple[int, int] | None = None,
        options: ReceiverOptions | None = None,
        staging: int = STAGING_SLOTS,
        staging_tokens: int | None = None,
        num_senders: int = 1,
        bounce: Bounce | None = None,
        source_memory: MemoryType = "DRAM",
        **offload: Any,
    ) -> None:
        here, there = pages or (model.page, model.page)
        self.model = model
        self.now = 0.0
        self.network = Network()
        self.target_manager = model.target(there, **offload)
        self.fresh = self.occupancy()
        make_target = LabelledTarget if bounce else OffloadTarget
        self.target = make_target(self.target_manager, staging, staging_tokens)
        self.receiver = Receiver(
            InProcessTransport(self.network, "decode"),
            self.target,
            options=options or ReceiverOptions(slice_pages=2),
            bounce=bounce,
            clock=self.clock,
        )
        self.sources: list[Any] = []
        self.senders: list[Sender] = []
        self.results: list[Received] = []
        self.outcomes: list[Outcome] = []
        for number in range(num_senders):
            manager = model.source(here)
            source = LabelledSource(manager)
            source.memory = source_memory
            transport = InProcessTransport(self.network, f"prefill{number}")
            own = make_bounce() if bounce else None
            sender = Sender(transport, source.table, bounce=own, clock=self.clock)
            sender.add_peer(self.receiver.card())
            self.receiver.add_peer(sender.card())
            self.sources.append((manager, source))
            self.senders.append(sender)

    def clock(self) -> float:
        return self.now

    def occupancy(self) -> list[Any]:
        """All that a request can take of the target."""
        engine = getattr(self.target_manager, "manager", None)
        engine = engine or self.target_manager.store.manager
        room = engine.occupancy()
        free = [one.slots.free for one in engine.pool_group_use()]
        return [room.free_host_pages, room.free_arena_slots, room.free_leases, free]

    def prefill(self, request: int, tokens: int, number: int = 0) -> None:
        """Compute a request and offer it."""
        manager, source = self.sources[number]
        self.model.fill(manager, request, tokens)
        self.senders[number].offer(str(request), tokens, source.pages(request))

    def ask(self, request: int, tokens: int, number: int = 0, max_tokens: int = 0) -> None:
        most = max_tokens or min(self.model.max_tokens, tokens + 8)
        self.receiver.request(f"prefill{number}", str(request), request, tokens, most)

    def run(self, senders: Iterable[int] | None = None) -> None:
        """One turn of everybody."""
        for number in range(len(self.senders)) if senders is None else senders:
            self.outcomes += self.senders[number].progress()
        self.results += self.receiver.poll()

    def run_until(self, condition: Callable[[], bool], **arguments: Any) -> None:
        for _ in range(MAX_POLLS):
            if condition():
                return
            self.run(**arguments)
            _yield()
        raise AssertionError(f"it does not end: {self.receiver.use}, {self.results}")

    def run_to_the_end(self, **arguments: Any) -> None:
        self.run_until(lambda: self.receiver.use == ReceiverUse(), **arguments)
        self.results += self.receiver.poll()

    def result(self, request: int) -> Received:
        (found,) = [one for one in self.results if one.request_id == str(request)]
        return found

    def check(self, lengths: dict[int, int]) -> None:
        self.model.check(self.target_manager, lengths, {one: one for one in lengths})

    def end(self, requests: Iterable[int] = ()) -> None:
        """Free what was received; everything must have come back."""
        for request in requests:
            self.target_manager.free_request(request)
        assert self.receiver.use == ReceiverUse()
        assert self.occupancy() == self.fresh
        self.receiver.close(0)
        assert not self.network.ends["decode"].regions


def _yield() -> None:
    """Let the threads that repack run."""
    time.sleep(0)
