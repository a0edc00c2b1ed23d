"""Decode steps of a model's seated requests: one Batch, the arenas, and the counts.

Knows nothing of transformers. One step is open (resize, publish, wait_ready), then per selection
group resolve and fetch, per layer write and gather, then commit or abort. Whoever calls keeps that
order; an abort gives every request its length back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

import sparse_kvcm as kvcm
from sparse_kvcm.integrations.transformers.geometry import DsaGeometry
from sparse_kvcm.integrations.transformers.statistics import GroupStatistics


class DecodeError(RuntimeError):
    """The device reported a fault in a decode step. The step has been aborted."""


class History(Protocol):
    """A request, as caches and drivers see it."""

    @property
    def need(self) -> int:
        """Most tokens that it will have."""

    @property
    def committed_length(self) -> int:
        """Tokens that it has."""

    @property
    def row(self) -> int | None:
        """Its seat."""

    def suspend(self, stream: int = 0) -> None:
        """Give its seat back."""

    def close(self) -> None:
        """End it."""


class Steps(Protocol):
    """What caches and drivers need of whoever takes requests through decode steps.

    `DecodeSteps` documents the calls. Requests are those that `reserve` made.
    """

    manager: Any
    geometry: DsaGeometry
    device: torch.device
    max_length: int
    holds_index_keys: bool

    @property
    def stream(self) -> int:
        """The stream that torch works on now."""

    def reserve(self, needs: Sequence[int]) -> Sequence[Any]:
        """Make requests."""

    def activate(self, cache: Any) -> None:
        """Resume and seat one."""

    def import_history(
        self, cache: Any, latents: dict[int, torch.Tensor], index_keys: dict[int, torch.Tensor]
    ) -> None:
        """Append a prompt."""

    def open(self, caches: Sequence[Any]) -> None:
        """Open a step."""

    def append_index_keys(
        self, layer: int, keys: torch.Tensor, past: torch.Tensor | None, padding: torch.Tensor
    ) -> torch.Tensor:
        """All index keys of a layer."""

    def select(self, group: int, ordinals: torch.Tensor) -> None:
        """Find a selection."""

    def slots(self, group: int) -> torch.Tensor:
        """Where it is."""

    def write(self, layer: int, latents: torch.Tensor) -> None:
        """Write new latents."""

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Read latents."""

    def commit(self) -> None:
        """End the step."""

    def abort(self) -> None:
        """Undo the step."""

    def close(self) -> None:
        """Free the rows."""

    def statistics(self, caches: Iterable[Any]) -> list[GroupStatistics]:
        """Counts."""


class DecodeSteps:
    """Takes requests through decode steps.

    Parameters
    ----------
    manager : KvCacheManager
        Must fit ``geometry``. It holds no index keys; caches keep those.
    geometry : DsaGeometry
        Of the model.
    max_rows : int
        Most requests of one step.
    max_length : int
        Most units of one request.
    """

    holds_index_keys = False

    def __init__(
        self,
        manager: kvcm.KvCacheManager,
        geometry: DsaGeometry,
        *,
        max_rows: int,
        max_length: int,
    ) -> None:
        geometry.check_manager(manager)
        self.manager = manager
        self.geometry = geometry
        self.max_length = max_length
        # Write slots are always valid, so that a fault on the device cannot become a wild write.
        self.batch = manager.create_batch(max_rows, max_length, no_write_slot=manager.trash_slot)
        self.arenas = {
            layer: _typed(from_dlpack(manager.arena(layer)), geometry) for layer in manager.layers
        }
        self.device = self.arenas[0].device
        self._num_steps = 0
        self._num_rows = 0
        self._counts = torch.zeros(len(geometry.groups), 2, dtype=torch.int64, device=self.device)
        self._rows: list[int] = []
        self._launch_rows = torch.empty(0, dtype=torch.int32, device=self.device)
        self._resolved: dict[int, kvcm.ops.ResolveOutputs] = {}

    @property
    def stream(self) -> int:
        """The stream that torch works on now."""
        if self.device.type == "cpu":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    # --- requests ---

    def reserve(self, needs: Sequence[int]) -> list[kvcm.KvCache]:
        """Make ACTIVE requests without history, one per need: all of them or none.

        Raises
        ------
        OutOfPages
            If the arena or the lease ids do not suffice.
        ValueError, InvalidState
            If there are more needs than rows, or than free rows.
        """
        if len(needs) > self.batch.max_rows:
            raise ValueError(
                f"[OffloadedCache] the batch must have at most max_rows = {self.batch.max_rows} "
                f"requests, got {len(needs)}"
            )
        caches: list[kvcm.KvCache] = []
        try:
            for need in needs:
                caches.append(self.manager.create_kv_cache(need))
                self.activate(caches[-1])
        except Exception:
            release(caches)
            raise
        return caches

    def activate(self, cache: kvcm.KvCache) -> None:
        """Resume a request and seat it.

        Raises
        ------
        OutOfPages
            If the arena has no room; the request stays suspended.
        """
        if not cache.resume(self.stream):
            room = self.manager.occupancy()
            raise kvcm.OutOfPages(
                f"[OffloadedCache] no lease for a request of {cache.need} units: "
                f"{room.free_leases} leases free, largest run of free slots "
                f"{room.largest_free_arena_run}. Suspend or close a request and try again"
            )
        try:
            self.batch.add(cache)
        except Exception:
            cache.suspend(self.stream)
            raise

    def import_history(
        self,
        cache: kvcm.KvCache,
        latents: dict[int, torch.Tensor],
        index_keys: dict[int, torch.Tensor],
    ) -> None:
        """Append a prompt's latents, ``[n, width]`` per layer, to a request's host history."""
        del index_keys  # stay with the cache
        cache.import_history(
            {
                layer: rows.contiguous().view(torch.uint8).cpu().numpy()
                for layer, rows in latents.items()
            },
            self.stream,
        )

    # --- one step ---

    def open(self, caches: Sequence[kvcm.KvCache]) -> None:
        """Open a step in which every request grows by one unit.

        Raises
        ------
        OutOfPages, ValueError
            If a request cannot grow; no length changes then.
        DecodeError
            If the device reported a fault since the last step; the next call goes on.
        """
        late = self.batch.take_errors()
        if late.rows or late.batch:
            raise DecodeError(f"[OffloadedCache] the device reported after the last step: {late}")
        rows = [_row(cache) for cache in caches]
        lengths = {row: cache.committed_length for row, cache in zip(rows, caches, strict=True)}
        results = self.batch.resize({row: length + 1 for row, length in lengths.items()})
        try:
            for cache, row in zip(caches, rows, strict=True):
                _check_growth(cache, row, results[row])
            self.batch.publish(self.stream)
        except Exception:
            self.batch.resize(lengths)
            raise
        if rows != self._rows:
            self._rows = rows
            self._launch_rows = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self._resolved.clear()
        self.batch.wait_ready(self.stream)

    def select(self, group: int, ordinals: torch.Tensor) -> None:
        """Resolve a group's selection, int32 ``[b, k]``, and fetch its misses for all members."""
        outputs = self.batch.resolve(group, self._launch_rows, ordinals, stream=self.stream)
        self.batch.fetch(group, self._launch_rows, outputs, stream=self.stream)
        self._resolved[group] = outputs

    def append_index_keys(
        self, layer: int, keys: torch.Tensor, past: torch.Tensor | None, padding: torch.Tensor
    ) -> torch.Tensor:
        """All index keys of a layer, ``[b, t, d]``, given those of earlier tokens and new ones."""
        del layer, padding
        return keys if past is None else torch.cat([past, keys], 1)

    def slots(self, group: int) -> torch.Tensor:
        """The arena slots of the group's selection, int32 ``[b, k]``, -1 where there is none."""
        return from_dlpack(self._resolved[group].slots)

    def write(self, layer: int, latents: torch.Tensor) -> None:
        """Write each request's new unit, ``[b, width]``, into its window slot of a layer."""
        group = self.geometry.group_of_layer[layer]
        slots = from_dlpack(self._resolved[group].write_slots)[:, 0]
        self.arenas[layer].index_copy_(0, slots.long(), latents)

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Read the units at ``slots`` [...] of a layer's arena: ``[..., width]``."""
        return self.arenas[layer][slots.long()]

    def commit(self) -> None:
        """End the step; its units become real.

        Raises
        ------
        DecodeError
            If the device reported a fault; the step has been aborted then.
        """
        outputs = list(self._resolved.values())
        errors = torch.stack([from_dlpack(output.errors).int() for output in outputs])
        # One wait per step, for a promise: no token comes out of a step that went wrong.
        if errors.any():
            message = self._describe(errors)
            self.abort()
            raise DecodeError(message)
        self.batch.record_read(self._rows, self.stream)
        for group, output in self._resolved.items():
            self._counts[group, 0] += from_dlpack(output.hit_counts).sum()
            self._counts[group, 1] += from_dlpack(output.miss_counts).sum()
        self._resolved.clear()
        self._num_steps += 1
        self._num_rows += len(self._rows)

    def abort(self) -> None:
        """End the step, if one is open, as if it had not been."""
        self._resolved.clear()
        if self.batch.step_open:
            self.batch.abort_step(self.stream)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # so that its errors are here
            self.batch.take_errors()  # of a step that no longer counts

    def close(self) -> None:
        """Free the rows. Requests stay as they are."""
        self._resolved.clear()
        self.batch.close()

    # --- counts ---

    def statistics(self, caches: Iterable[kvcm.KvCache]) -> list[GroupStatistics]:
        """Counts of all committed steps, and the memory of ``caches`` now, per group."""
        caches = list(caches)
        leases = [cache.lease for cache in caches if cache.lease is not None]
        slots = sum(lease.cached_slots + lease.window_slots for lease in leases)
        units = sum(cache.committed_length for cache in caches)
        statistics = []
        for group, (hits, misses) in enumerate(self._counts.tolist()):
            layers = self.geometry.groups[group]
            unit_bytes = self.geometry.unit_bytes * len(layers)
            statistics.append(
                GroupStatistics(
                    group=group,
                    layers=layers,
                    steps=self._num_steps,
                    rows=self._num_rows,
                    hits=hits,
                    misses=misses,
                    bytes_fetched=misses * unit_bytes,
                    device_bytes=slots * unit_bytes,
                    history_bytes=units * unit_bytes,
                )
            )
        return statistics

    def _describe(self, errors: torch.Tensor) -> str:
        faults = [
            f"row {self._rows[i]}, group {group}: "
            + "|".join(str(bit.name) for bit in kvcm.ErrorBits if word & bit)
            for group, words in zip(self._resolved, errors.tolist(), strict=True)
            for i, word in enumerate(words)
            if word
        ]
        return "[OffloadedCache] the device reported in a decode step: " + "; ".join(faults)


def release(caches: Iterable[History]) -> None:
    """Close requests."""
    for cache in caches:
        cache.close()


def _typed(arena: torch.Tensor, geometry: DsaGeometry) -> torch.Tensor:
    """View an arena, uint8 ``[pages, page_bytes]``, as units ``[slots, width]``."""
    return arena.view(-1).view(geometry.dtype).view(-1, geometry.width)


def _row(cache: kvcm.KvCache) -> int:
    if cache.row is None:
        raise kvcm.InvalidState(
            f"[OffloadedCache] every request must be seated in a decode step, got one that is "
            f"{cache.state}. Resume it first"
        )
    return int(cache.row)


def _check_growth(cache: kvcm.KvCache, row: int, result: kvcm.ResizeResult) -> None:
    if result == kvcm.ResizeResult.OK:
        return
    length = cache.committed_length + 1
    if result == kvcm.ResizeResult.PAST_WINDOW:
        raise kvcm.OutOfPages(
            f"[OffloadedCache] row {row} cannot grow to {length} units: host history is full and "
            "its window is too. Close a request and try again"
        )
    raise ValueError(
        f"[OffloadedCache] row {row} must stay within its {cache.need} units, got {length}. "
        "Give a larger max_length"
    )
