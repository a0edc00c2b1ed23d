"""Decode steps of a model whose whole cache is a DSA manager's: latents and index keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch.utils.dlpack import from_dlpack

import sparse_kvcm as kvcm
from sparse_kvcm.adapter.slot_mapping import map_full_kv, spread
from sparse_kvcm.adapter.streams import current_stream
from sparse_kvcm.dsa import DsaManager
from sparse_kvcm.dsa.manager_v2 import DSACacheManagerV2
from sparse_kvcm.integrations.transformers.geometry import DsaGeometry
from sparse_kvcm.integrations.transformers.statistics import GroupStatistics
from sparse_kvcm.integrations.transformers.steps import DecodeError, DecodeSteps, Steps
from sparse_kvcm.step import StepRequest


class DsaRequest:
    """A request of a `DsaManager`."""

    def __init__(self, manager: DsaManager, request_id: int, need: int) -> None:
        self.manager = manager
        self.request_id = request_id
        self.need = need

    @property
    def committed_length(self) -> int:
        """Tokens that it has; 0 once it is closed."""
        return self.manager.frontier(self.request_id) or 0

    @property
    def row(self) -> int | None:
        """Its seat."""
        return self.manager.store.row_of(self.request_id)

    def suspend(self, stream: int = 0) -> None:
        """Give its seat back."""
        del stream
        self.manager.suspend_request(self.request_id)

    def close(self) -> None:
        """End it. No-op if it is closed."""
        if self.manager.frontier(self.request_id) is not None:
            self.manager.free_request(self.request_id)


class DsaSteps:
    """`DecodeSteps` over a DSA manager of either version, which holds index keys too.

    Parameters
    ----------
    manager : DsaManager
        Must fit `geometry`.
    geometry : DsaGeometry
        Of the model.
    max_length : int
        Most tokens of one request.
    """

    holds_index_keys = True
    _ids = itertools.count()

    def __init__(self, manager: DsaManager, geometry: DsaGeometry, *, max_length: int) -> None:
        theirs = manager.config.geometry
        wanted = (geometry.groups, geometry.kv_lora_rank, geometry.qk_rope_head_dim)
        got = (theirs.groups, theirs.kv_lora_rank, theirs.qk_rope_head_dim)
        if got != wanted:
            raise ValueError(
                f"[DsaSteps] groups, rank and rope of the manager must be {wanted}, got {got}"
            )
        self.manager = manager
        self.geometry = geometry
        self.max_length = max_length
        self.device = torch.device(manager.config.device)
        self._num_steps = 0
        self._num_rows = 0
        self._counts = torch.zeros(len(geometry.groups), 2, dtype=torch.int64, device=self.device)
        self._slots: dict[int, torch.Tensor] = {}

    @property
    def stream(self) -> int:
        """The stream that torch works on now."""
        return current_stream(str(self.device))

    # --- requests ---

    def reserve(self, needs: Sequence[int]) -> list[DsaRequest]:
        """Make requests without history, one per need: all of them or none. As `DecodeSteps`."""
        requests: list[DsaRequest] = []
        try:
            for need in needs:
                request = DsaRequest(self.manager, next(self._ids), need)
                self.manager.add_request(request.request_id, need)
                requests.append(request)
        except Exception:
            for request in requests:
                request.close()
            raise
        return requests

    def adopt(self, request_id: int, new_tokens: int) -> DsaRequest:
        """Seat a request that the manager has already; it decodes so many tokens."""
        length = self.manager.frontier(request_id)
        if not length:
            raise kvcm.InvalidArgument(
                f"[DsaSteps] request_id must be one with tokens in the manager, got {request_id}"
            )
        request = DsaRequest(self.manager, request_id, length + new_tokens - 1)
        if request.need > self.max_length:
            raise ValueError(
                f"[DsaSteps] prompt and output must take at most max_length = {self.max_length} "
                f"units, got {request.need}"
            )
        self.manager.store.seat(request_id)
        return request

    def activate(self, request: DsaRequest) -> None:
        """Resume a request and seat it."""
        self.manager.resume_request(request.request_id)
        try:
            self.manager.store.seat(request.request_id)
        except Exception:
            self.manager.suspend_request(request.request_id)
            raise

    def import_history(
        self,
        request: DsaRequest,
        latents: dict[int, torch.Tensor],
        index_keys: dict[int, torch.Tensor],
    ) -> None:
        """Append a prompt, and seat its request: the lowest row goes to who comes first."""
        self.manager.import_history(request.request_id, latents, index_keys)
        self.manager.store.seat(request.request_id)

    # --- one step ---

    def open(self, requests: Sequence[DsaRequest]) -> None:
        """Open a step in which every request grows by one token, in this order."""
        self._slots.clear()
        self.manager.prepare_step(
            [
                StepRequest(one.request_id, one.committed_length, batch_index=place)
                for place, one in enumerate(requests)
            ]
        )

    def append_index_keys(
        self, layer: int, keys: torch.Tensor, past: torch.Tensor | None, padding: torch.Tensor
    ) -> torch.Tensor:
        """All index keys of a layer, ``[b, t, d]``: written to its pages, and read from them."""
        step = self.manager.step
        if step is None:  # of a prompt, whose keys are imported when all layers have run
            return keys if past is None else torch.cat([past, keys], 1)
        self.manager.write_index_keys(layer, keys[:, 0])
        mapping, _ = map_full_kv(
            step.page_tables["INDEX_KEY"], step.lengths, self.manager.index_keys.page
        )
        rows, positions = spread(step.lengths)
        longest = int((step.lengths + padding).max())
        padded = keys.new_zeros(len(keys), longest, keys.shape[-1])
        found = self.manager.gather_index_keys(layer, mapping)
        padded[rows, positions + padding[rows]] = found.to(keys.dtype)
        return padded

    def select(self, group: int, ordinals: torch.Tensor) -> None:
        """Find a group's selection, int32 ``[b, k]``, for all its layers."""
        self._slots[group] = self.manager.select(self.geometry.groups[group][0], ordinals)

    def slots(self, group: int) -> torch.Tensor:
        """The slots of the group's selection, ``[b, k]``, -1 where there is none."""
        return self._slots[group]

    def write(self, layer: int, latents: torch.Tensor) -> None:
        """Write each request's new latent, ``[b, width]``."""
        self.manager.write_latents(layer, latents)

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Read the latents at ``slots`` [...] of a layer: ``[..., width]``."""
        return self.manager.gather_latents(layer, slots).to(self.geometry.dtype)

    def commit(self) -> None:
        """End the step; its tokens become real. DecodeError, and aborted, if the device failed."""
        manager = self.manager
        if isinstance(manager, DSACacheManagerV2) and manager.config.offload is not None:
            outputs = [manager.resolved(group[0]) for group in self.geometry.groups]
            errors = torch.stack([from_dlpack(output.errors).int() for output in outputs])
            if errors.any():
                self.abort()
                raise DecodeError(f"[DsaSteps] the device reported in a decode step: {errors}")
            for group, output in enumerate(outputs):
                self._counts[group, 0] += from_dlpack(output.hit_counts).sum()
                self._counts[group, 1] += from_dlpack(output.miss_counts).sum()
        else:
            for group, slots in self._slots.items():
                self._counts[group, 0] += (slots >= 0).sum()
        self._num_rows += len(next(iter(self._slots.values())))
        self._num_steps += 1
        manager.end_step()
        self._slots.clear()

    def abort(self) -> None:
        """End the step, if one is open, as if it had not been."""
        self._slots.clear()
        self.manager.abort_step()
        if isinstance(self.manager, DSACacheManagerV2):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # so that its errors are here
            self.manager.batch.take_errors()  # of a step that no longer counts

    def close(self) -> None:
        """Nothing is left to free: requests have been closed."""
        self.abort()

    # --- counts ---

    def statistics(self, requests: Iterable[DsaRequest]) -> list[GroupStatistics]:
        """Counts of all committed steps, and the memory of ``requests`` now, per group."""
        tokens = sum(request.committed_length for request in requests)
        offloads = self.manager.config.offload is not None
        layout = self.manager.config.latent_page.layout
        slots = 0
        if isinstance(self.manager, DSACacheManagerV2):
            slots = self.manager.leased_slots
        return [
            GroupStatistics(
                group=group,
                layers=layers,
                steps=self._num_steps,
                rows=self._num_rows,
                hits=hits,
                misses=misses,
                bytes_fetched=misses * layout.unit_bytes * len(layers),
                device_bytes=(slots if offloads else tokens) * layout.unit_bytes * len(layers),
                history_bytes=tokens * layout.unit_bytes * len(layers) if offloads else 0,
            )
            for group, (layers, (hits, misses)) in enumerate(
                zip(self.geometry.groups, self._counts.tolist(), strict=True)
            )
        ]


def steps_for(
    manager: kvcm.KvCacheManager | DsaManager,
    geometry: DsaGeometry,
    *,
    max_rows: int,
    max_length: int,
) -> Steps:
    """Steps of the kind that a manager takes."""
    if isinstance(manager, DsaManager):
        if max_rows > manager.store.max_rows or max_length > manager.config.max_seq_len:
            raise ValueError(
                f"[DsaSteps] max_rows must be <= {manager.store.max_rows} and max_length <= "
                f"{manager.config.max_seq_len}, as the manager's, got {max_rows} and {max_length}"
            )
        return DsaSteps(manager, geometry, max_length=max_length)
    return DecodeSteps(manager, geometry, max_rows=max_rows, max_length=max_length)
