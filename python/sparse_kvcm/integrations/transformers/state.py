"""The state machine behind an offloaded cache: a prompt's forward, decode steps, and recovery.

    IDLE -> PROMPT -> IDLE      the cache was empty: latents stay live until all layers have run,
                                then every request's rows are imported into host history
    IDLE -> STEP -> IDLE        one token per request: a step of the Batch is open

Layers come in order, `store` then `attended`. Whatever breaks that order, a forward that failed
above all, leaves the phase behind; the next call finds it and `recover` puts everything back to
where it was before that forward: lengths, leases and the indexer keys, of which the layers in front
of the fault have one more than the others.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

import sparse_kvcm as kvcm
from sparse_kvcm.integrations.transformers import absorbed
from sparse_kvcm.integrations.transformers import forward as _forward
from sparse_kvcm.integrations.transformers.attention import IMPLEMENTATION, only
from sparse_kvcm.integrations.transformers.steps import History, Steps, release

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Form = Literal["scatter", "compact", "triton"]
FORMS = ("scatter", "compact", "triton")


class Phase(enum.Enum):
    """What a cache is in the middle of."""

    IDLE = enum.auto()
    PROMPT = enum.auto()
    STEP = enum.auto()


@dataclass(eq=False)
class Parked:
    """A request outside a cache: its history in the manager and its indexer keys, ``[n, d]``."""

    cache: History
    indexer_keys: dict[int, torch.Tensor]


class CacheState:
    """What the layers of one offloaded cache share.

    Parameters
    ----------
    steps : Steps
        May be shared with other caches, one of which may be in a step at a time.
    config : PreTrainedConfig
        Of the model; read for the attention implementation that is in force.
    max_length : int
        Most columns of the padded batch.
    form : {"scatter", "compact", "triton"}
        How selected units are attended to.
    commit_after_attention : bool
        Whether the last layer's attention commits, or the caller does after the forward.
    """

    def __init__(
        self,
        steps: Steps,
        config: PreTrainedConfig,
        *,
        max_length: int,
        form: Form,
        commit_after_attention: bool,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"[OffloadedCache] form must be one of {', '.join(FORMS)}, got {form}")
        if form == "triton":
            absorbed.check(steps.manager, steps.geometry.dtype, steps.device)
        self.steps = steps
        self.form = form
        self.max_length = max_length
        self.requests: list[History] = []
        self.indexer_keys: dict[int, torch.Tensor] = {}
        self._config = config
        self._geometry = steps.geometry
        self._commit_after_attention = commit_after_attention
        self._phase = Phase.IDLE
        self._length = 0  # columns of the padded batch
        self._padding = torch.empty(0, dtype=torch.int64, device=steps.device)
        self._next_layer = 0
        self._latents: dict[int, torch.Tensor] = {}  # [b, s, width] of this forward

    # --- between forwards ---

    @property
    def length(self) -> int:
        """Columns of the padded batch. Asked for while a forward is unfinished, it has failed."""
        self.recover()
        return self._length

    def recover(self) -> None:
        """Undo the forward that is under way, if any."""
        phase, self._phase = self._phase, Phase.IDLE
        self._latents.clear()
        self._next_layer = 0
        if phase is Phase.STEP:
            self.steps.abort()
            self.indexer_keys = {
                layer: keys[:, : self._length] for layer, keys in self.indexer_keys.items()
            }
        elif phase is Phase.PROMPT:
            self.clear()

    def clear(self) -> None:
        """Close every request."""
        release(self.requests)
        self.requests = []
        self.indexer_keys = {}
        self._length = 0

    def take(self) -> list[Parked]:
        """Take the requests out, without their padding; the cache is empty then."""
        self.recover()
        parked = [
            Parked(
                request,
                {
                    layer: keys[i, self._length - request.committed_length :].clone()
                    for layer, keys in self.indexer_keys.items()
                },
            )
            for i, request in enumerate(self.requests)
        ]
        self.requests = []
        self.clear()
        return parked

    def put(self, parked: Sequence[Parked]) -> None:
        """Move requests into an empty cache, padded on the left to the longest."""
        lengths = [one.cache.committed_length for one in parked]
        self._length = max(lengths)
        self._padding = torch.tensor(
            [self._length - length for length in lengths], device=self.steps.device
        )
        self.requests = [one.cache for one in parked]
        self.indexer_keys = {}
        for layer, example in parked[0].indexer_keys.items():
            keys = example.new_zeros(len(parked), self._length, example.shape[-1])
            for row, one, length in zip(keys, parked, lengths, strict=True):
                row[self._length - length :] = one.indexer_keys[layer]
            self.indexer_keys[layer] = keys
        for one in parked:
            one.indexer_keys.clear()

    def attention_mask(self, batch_size: int, query_length: int) -> torch.Tensor:
        """Make the 2-D mask of the next forward; a prompt's has no padding."""
        columns = torch.arange(self._length + query_length, device=self.steps.device)
        padding = self._padding if self.requests else columns.new_zeros(batch_size)
        return columns >= padding[:, None]

    # --- within a forward ---

    @property
    def is_prompt(self) -> bool:
        """Whether the forward that is under way is a prompt's."""
        return self._phase is Phase.PROMPT

    def store(self, layer: int, k_pass: torch.Tensor, k_rot: torch.Tensor) -> None:
        """Take a layer's new latents, ``[b, 1, s, rank]`` and ``[b, 1, s, rope]``."""
        if layer == 0:
            self.recover()
            self._check_latents(layer, k_pass, k_rot)
            self._begin(k_pass.shape[0], k_pass.shape[2])
        elif self._phase is Phase.IDLE or layer != self._next_layer:
            self.recover()
            raise kvcm.InvalidState(
                f"[OffloadedCache] layer {layer} came out of order: each layer's attention must "
                f'run under the implementation "{IMPLEMENTATION}", and the cache must not be '
                "called in the middle of a forward pass"
            )
        else:
            self._check_latents(layer, k_pass, k_rot)
        self._latents[layer] = torch.cat([k_pass, k_rot], -1)[:, 0].detach()

    def append_indexer_keys(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Append indexer keys, ``[b, s, d]``, and return all of the layer's."""
        if self._phase is Phase.IDLE or layer != self._next_layer:
            raise kvcm.InvalidState(
                f"[OffloadedCache] indexer keys of layer {layer} came out of order"
            )
        past = self.indexer_keys.get(layer)
        keys = self.steps.append_index_keys(layer, keys.detach(), past, self._padding)
        self.indexer_keys[layer] = keys
        return keys

    def read(
        self, module: nn.Module, layer: int, attention_mask: torch.Tensor, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read the selected units of a decode step from the arena.

        Parameters
        ----------
        module : nn.Module
            The attention layer, which expands latents.
        layer : int
            Its index.
        attention_mask : torch.Tensor
            Additive, ``[b, 1, 1, t]``.
        indices : torch.Tensor
            Selected columns of the padded batch, int32 ``[b, k]``.

        Returns
        -------
        tuple of torch.Tensor
            Keys, values and the mask that goes with them.
        """
        slots = self._select(layer, indices)
        self.steps.write(layer, self._latents[layer][:, 0])
        if self.form == "compact":
            rows, attention_mask = self._compact(layer, attention_mask, indices, slots)
        else:
            rows = self._scatter(layer, attention_mask.shape[-1], indices, slots)
            attention_mask = only(attention_mask, indices[:, None])
        rank = self._geometry.kv_lora_rank
        expand_kv: Any = module.expand_kv
        key, value = expand_kv(
            rows[:, None, :, :rank].contiguous(), rows[:, None, :, rank:].contiguous()
        )
        return key, value, attention_mask

    def attend(
        self,
        module: nn.Module,
        layer: int,
        query: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attend to selected units where they lie: ``[b, 1, h, d_v]``. Else as `read`."""
        latents = self._latents[layer][:, 0]
        slots = self._select(layer, indices)
        return absorbed.attend(self.steps.manager, module, layer, query, latents, slots, scale)

    def attended(self, layer: int) -> None:
        """Note that a layer's attention has run."""
        self._next_layer = layer + 1
        if self._next_layer == self._geometry.num_layers:
            _forward.current.set(None)
            if self._commit_after_attention:
                self.commit()

    def commit(self) -> None:
        """Make the forward's units real."""
        if self._phase is Phase.IDLE or self._next_layer != self._geometry.num_layers:
            raise kvcm.InvalidState("[OffloadedCache] commit needs a forward of all layers")
        try:
            if self._phase is Phase.STEP:
                self.steps.commit()
                self._length += 1
            else:
                self._import()
        except BaseException:
            self.recover()
            raise
        self._phase = Phase.IDLE
        self._latents.clear()
        if self.steps.holds_index_keys:
            self.indexer_keys.clear()

    # --- parts ---

    def _begin(self, batch_size: int, query_length: int) -> None:
        if self._config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f'[OffloadedCache] the model\'s attention implementation must be "{IMPLEMENTATION}"'
                f', got "{self._config._attn_implementation}". Call '
                f'model.set_attn_implementation("{IMPLEMENTATION}")'
            )
        forward = _forward.current.get()
        _forward.current.set(None)  # each forward starts one; what is left of another is not ours
        expected = (batch_size, query_length, self._length + query_length)
        if forward is None or expected != (
            forward.batch_size,
            forward.query_length,
            forward.kv_length,
        ):
            raise NotImplementedError(
                f'[OffloadedCache] no mask was made under "{IMPLEMENTATION}" for this forward: the '
                "model must use that implementation, and attention_mask must be 2-D or None; "
                "prepared masks are not supported"
            )
        padding = _forward.left_padding(forward, self.steps.device)
        if self.requests:
            self._begin_step(batch_size, query_length, padding)
        else:
            self._begin_prompt(query_length, padding)
        forward.state = self
        _forward.current.set(forward)

    def _begin_prompt(self, query_length: int, padding: torch.Tensor) -> None:
        if query_length > self.max_length:
            raise ValueError(
                f"[OffloadedCache] the prompt must have at most max_length = {self.max_length} "
                f"positions, got {query_length}"
            )
        needs = [self.max_length - pad for pad in padding.tolist()]
        self.requests = list(self.steps.reserve(needs))
        self._padding = padding
        self._phase = Phase.PROMPT

    def _begin_step(self, batch_size: int, query_length: int, padding: torch.Tensor) -> None:
        if batch_size != len(self.requests):
            raise ValueError(
                "[OffloadedCache] the batch must be the seated requests, in their order: expected "
                f"{len(self.requests)}, got {batch_size}"
            )
        if query_length != 1:
            raise NotImplementedError(
                "[OffloadedCache] a filled cache takes one token per request, got "
                f"{query_length}. Chunks of a prompt, several tokens at a time and assisted "
                "decoding are not supported"
            )
        if not torch.equal(padding, self._padding):
            raise ValueError(
                f"[OffloadedCache] padding must stay what it was, {self._padding.tolist()}, got "
                f"{padding.tolist()}. attention_mask must cover past tokens too"
            )
        self.steps.open(self.requests)
        self._phase = Phase.STEP

    def _check_latents(self, layer: int, k_pass: torch.Tensor, k_rot: torch.Tensor) -> None:
        geometry, device = self._geometry, self.steps.device
        if k_pass.dtype != geometry.dtype or k_pass.device != device:
            raise ValueError(
                f"[OffloadedCache] latents must be {geometry.dtype} on {device}, got "
                f"{k_pass.dtype} on {k_pass.device} in layer {layer}"
            )
        widths = (k_pass.shape[-1], k_rot.shape[-1])
        if widths != (geometry.kv_lora_rank, geometry.qk_rope_head_dim):
            raise ValueError(
                f"[OffloadedCache] latents must have {geometry.kv_lora_rank} + "
                f"{geometry.qk_rope_head_dim} elements, got {widths[0]} + {widths[1]} in layer "
                f"{layer}"
            )

    def _import(self) -> None:
        columns = self._latents[0].shape[1]
        for i, (request, pad) in enumerate(zip(self.requests, self._padding.tolist(), strict=True)):
            self.steps.import_history(
                request,
                {layer: rows[i, pad:] for layer, rows in self._latents.items()},
                {layer: keys[i, pad:] for layer, keys in self.indexer_keys.items()},
            )
        self._length = columns

    def _select(self, layer: int, indices: torch.Tensor) -> torch.Tensor:
        """Slots of a layer's selection, which its group's first layer has found for all."""
        group = self._geometry.group_of_layer[layer]
        if layer == self._geometry.groups[group][0]:
            ordinals = (indices - self._padding[:, None]).clamp(min=-1)
            self.steps.select(group, ordinals.to(torch.int32))
        return self.steps.slots(group)

    def _scatter(
        self, layer: int, columns: int, indices: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Put gathered rows back in their columns, zeros elsewhere: the stock form, bit for bit."""
        rows = self._latents[layer].new_zeros(slots.shape[0], columns, self._geometry.width)
        row, place = (slots >= 0).nonzero(as_tuple=True)
        rows[row, indices[row, place].long()] = self.steps.gather(layer, slots[row, place])
        return rows

    def _compact(
        self, layer: int, attention_mask: torch.Tensor, indices: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep gathered rows side by side: sums in another order, without a row per column."""
        absent = slots < 0
        rows = self.steps.gather(layer, slots.clamp(min=0)).masked_fill(absent[..., None], 0)
        attention_mask = attention_mask.gather(-1, indices[:, None, None].long())
        minimum = torch.finfo(attention_mask.dtype).min
        return rows, attention_mask.masked_fill(absent[:, None, None], minimum)
