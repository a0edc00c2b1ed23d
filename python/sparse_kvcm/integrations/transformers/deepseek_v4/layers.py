"""Cache layers of a managed DeepSeek-V4: stock while a prompt runs, the manager's afterwards.

transformers keeps per layer what the manager has seven types for: a window, per compressor the
inputs of the group that is begun, the first series of the group before it ("overlap", its gate
with the position bias added), and all entries. Here a decode step reads each of them from the
manager, at the place where the stock layer would use its own tensor. Gates are kept without their
bias, which is added when they are read, so that a step may be run again after it failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACache,
    DeepseekV4HCACache,
)

from sparse_kvcm.attention import write_step
from sparse_kvcm.deepseek_v4.history import Key
from sparse_kvcm.models import AttentionType
from sparse_kvcm.models.attention_types import COMPRESSOR_STATES, INDEXER_STATES, state_rows

if TYPE_CHECKING:
    from sparse_kvcm.integrations.transformers.deepseek_v4.state import V4State

SWA, COMPRESS = AttentionType.SWA, AttentionType.COMPRESS
_KINDS = {
    "compressor": (*COMPRESSOR_STATES, COMPRESS),
    "indexer": (*INDEXER_STATES, AttentionType.INDEXER_COMPRESS),
}


class _Managed:
    """What all three kinds of layer do with their window."""

    _state: V4State
    _layer: int
    cumulative_length: int
    keys: Any
    values: Any
    is_initialized: bool

    def bind(self, state: V4State, layer: int) -> None:
        """Say whose layer it is."""
        self._state, self._layer = state, layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens' keys, ``[b, 1, s, d]``; all keys of the window, if they are read."""
        if not self._state.decodes:
            kept: tuple[torch.Tensor, torch.Tensor] = super().update(  # type: ignore[misc]
                key_states, value_states, *args, **kwargs
            )
            return kept
        manager, at = self._state.manager, self._state.at
        if self._state.form == "triton":
            write_step(manager, self._layer, key_states[:, 0, 0], kind=SWA, at=at)
            return key_states, value_states
        manager.write_window(self._layer, key_states[:, 0, 0], at)
        window = manager.config.geometry.sliding_window
        rows = manager.rows(self._layer, SWA, at, min(self._state.length + 1, window))
        keys = manager.read(self._layer, SWA, rows).to(key_states.dtype)[:, None]
        return keys, keys

    def history(self, row: int) -> dict[Key, torch.Tensor]:
        """What a request of the prompt's forward leaves in this layer."""
        return {(self._layer, SWA): self.keys[row, 0]}

    def forget(self) -> None:
        """Drop the prompt's tensors: the manager has them."""
        self.keys = self.values = None
        self.is_initialized = False

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "[ManagedV4Cache] requests stay in their rows and keep their tokens: no beams, no "
            "cropping, no copies"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = reset = _refuse


class ManagedWindow(_Managed, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A layer with a window alone."""

    _layer_type = None


class _ManagedCompressor(_Managed):
    """What both kinds of compressing layer do with inputs and entries."""

    compress_rate: int
    compressed_kv: dict[str, Any]
    buffer_kv: dict[str, Any]
    buffer_gate: dict[str, Any]
    entry_count: dict[str, int]
    _inputs: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def bind(self, state: V4State, layer: int) -> None:
        """Say whose layer it is."""
        super().bind(state, layer)
        self._inputs = {}

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Add inputs, ``[b, s, width]``; those of whole groups, and where the first one begins."""
        if not self._state.decodes:
            keep = state_rows(self.compress_rate)
            self._inputs[name] = kv[:, -keep:], gate[:, -keep:]
            chunk: tuple[torch.Tensor, torch.Tensor, int] = super().store_compression_weights(  # type: ignore[misc]
                name, kv, gate
            )
            return chunk
        manager, at, rate = self._state.manager, self._state.at, self.compress_rate
        whole = []
        length = self._state.length + 1
        for kind, new in zip(_KINDS[name], (kv, gate), strict=False):
            manager.write_states(self._layer, kind, new, at)
            if length % rate:
                whole.append(new[:, :0])
            else:
                whole.append(manager.read_states(self._layer, kind, rate, at=at).to(new.dtype))
        return whole[0], whole[1], (length - 1) // rate * rate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Add entries, ``[b, n, width]``; all of them."""
        if not self._state.decodes:
            entries: torch.Tensor = super().update_compressor_states(name, compressed)  # type: ignore[misc]
            return entries
        manager, at, kind = self._state.manager, self._state.at, _KINDS[name][2]
        if kind is COMPRESS and self._state.form == "triton":
            self._write(compressed)
            return compressed[:, :0]
        if compressed.shape[1]:
            manager.write_entries(self._layer, kind, compressed[:, 0], at)
        return self._all_entries(kind, compressed)

    def _write(self, compressed: torch.Tensor) -> None:
        """Write the entry that requests complete, if they do, where attention reads it."""
        if compressed.shape[1]:
            write_step(self._state.manager, self._layer, compressed[:, 0], at=self._state.at)

    def history(self, row: int) -> dict[Key, torch.Tensor]:
        """What a request of the prompt's forward leaves in this layer."""
        items = super().history(row)
        for name, inputs in self._inputs.items():
            items[self._layer, _KINDS[name][2]] = self.compressed_kv[name][row]
            for kind, rows in zip(_KINDS[name], inputs, strict=False):
                items[self._layer, kind] = rows[row]
        return items

    def forget(self) -> None:
        """Drop the prompt's tensors."""
        super().forget()
        self._inputs.clear()
        for tensors in (self.compressed_kv, self.buffer_kv, self.buffer_gate):
            for name in tensors:
                tensors[name] = None
                self.entry_count[name] = 0

    def _all_entries(self, kind: AttentionType, like: torch.Tensor) -> torch.Tensor:
        manager, at = self._state.manager, self._state.at
        count = (self._state.length + 1) // self.compress_rate
        rows = manager.rows(self._layer, kind, at, count)
        return manager.read(self._layer, kind, rows).to(like.dtype)


class ManagedHCA(_ManagedCompressor, DeepseekV4HCACache):  # type: ignore[no-untyped-call]
    """A layer of ratio 128: attention reads every entry."""

    _layer_type = None  # type: ignore[assignment]


class ManagedCSA(_ManagedCompressor, DeepseekV4CSACache):  # type: ignore[no-untyped-call]
    """A layer of ratio 4: attention reads the entries that its indexer selects."""

    _layer_type = None  # type: ignore[assignment]
    selection: torch.Tensor | None = None  # [b, s, k], of the forward at hand
    _new: torch.Tensor | None = None  # the entry that it completes, [b, width]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Add entries; of those to select from there is only the shape, until they are."""
        if name == "indexer" or not self._state.decodes:
            return super().update_compressor_states(name, compressed)
        self._new = compressed[:, 0] if compressed.shape[1] else None
        count = (self._state.length + 1) // self.compress_rate
        return compressed.new_zeros(1).expand(len(compressed), count, compressed.shape[2])

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The first series of the group before this one, None in front of the first."""
        if not self._state.decodes:
            prior: tuple[torch.Tensor | None, torch.Tensor | None] = super().update_overlap_state(
                name, chunk_kv, chunk_gate, head_dim
            )
            return prior
        rate, at = self.compress_rate, self._state.at
        if self._state.length + 1 < 2 * rate:
            return None, None
        read = self._state.manager.read_states
        kv = read(self._layer, _KINDS[name][0], rate, rate, at)
        gate = read(self._layer, _KINDS[name][1], rate, rate, at).to(chunk_gate.dtype)
        biased = gate + self._state.biases[self._layer, name]
        return kv[..., :head_dim], biased[..., :head_dim]

    def forget(self) -> None:
        """Drop the prompt's tensors."""
        super().forget()
        for tensors in (self.overlap_kv, self.overlap_gate):
            for name in tensors:
                tensors[name] = None

    def attend(self, kv: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill in the selected entries.

        Parameters
        ----------
        kv : torch.Tensor, shape (b, 1, c, d)
            Entries in name only.
        bias : torch.Tensor, shape (b, 1, 1, c)
            Mask of the selected ones.

        Returns
        -------
        tuple of torch.Tensor
            What takes their places: all c with zeros for those not selected ("scatter"), the
            selected ones side by side ("compact"), or none, since they are read where they lie.
        """
        assert self.selection is not None
        selection = self.selection[:, 0].to(torch.int32)
        self.selection = None
        slots = self._state.select(self._layer, selection)
        manager = self._state.manager
        if self._state.form == "triton":
            self._state.slots[self._layer] = slots
            if self._new is not None:
                self._write(self._new[:, None])
            return kv[:, :, :0], bias[..., :0]
        if self._new is not None:
            manager.write_entries(self._layer, COMPRESS, self._new, self._state.at)
        rows = manager.read(self._layer, COMPRESS, slots).to(kv.dtype)
        absent = slots < 0
        if self._state.form == "compact":
            return rows[:, None], bias.new_zeros(absent.shape).masked_fill_(absent, float("-inf"))[
                :, None, None
            ]
        b, _, count, width = kv.shape
        full = kv.new_zeros(b, count + 1, width)  # the last one takes what is not there
        places = selection.long().masked_fill(absent, count)
        full.scatter_(1, places[..., None].expand(-1, -1, width), rows)
        return full[:, None, :-1], bias
