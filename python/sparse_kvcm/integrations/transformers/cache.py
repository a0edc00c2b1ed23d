"""The cache class that a user passes to ``generate`` or to a model's ``forward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

import sparse_kvcm as kvcm
from sparse_kvcm.dsa import DsaManager
from sparse_kvcm.integrations.transformers._arguments import check_model
from sparse_kvcm.integrations.transformers._closing import Closing
from sparse_kvcm.integrations.transformers.dsa_steps import steps_for
from sparse_kvcm.integrations.transformers.geometry import DsaGeometry, manager_for
from sparse_kvcm.integrations.transformers.state import CacheState, Form
from sparse_kvcm.integrations.transformers.statistics import GroupStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _refuse(function: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"[OffloadedCache.{function}] {reason}")


class OffloadedLayer(DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """One layer of an :class:`OffloadedCache`. It holds indexer keys at most."""

    _layer_type = None  # not to be found by transformers' table of layer classes
    is_croppable = False
    supports_early_init = False

    def __init__(self, state: CacheState, layer: int) -> None:
        self._state = state
        self._layer = layer
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """Keys of the layer's indexer, ``[b, t, d]``; None without one or before the prompt."""
        return self._state.indexer_keys.get(self._layer)

    @indexer_keys.setter
    def indexer_keys(self, keys: torch.Tensor | None) -> None:
        if keys is not None:
            _refuse("indexer_keys", "they are appended by the model's forward alone")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new latents and return them.

        The registered attention function reads older ones by itself, so what the layer expands in
        a decode step is one row, not the history.
        """
        self._state.store(self._layer, key_states, value_states)
        self.is_initialized = True
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append indexer keys, ``[b, s, d]``, and return all of them."""
        self.is_indexer_initialized = True
        return self._state.append_indexer_keys(self._layer, indexer_key_states)

    def get_seq_length(self) -> int:
        """Columns of the padded batch."""
        return self._state.length

    def reset(self) -> None:
        """Refuse: layers live and end together."""
        _refuse("layers.reset", "call OffloadedCache.reset, layers end together")

    def offload(self) -> None:
        """Refuse: the history is in host memory already."""
        _refuse("offload", "the history is in host memory already")

    def prefetch(self) -> None:
        """Refuse: units are fetched when they are selected."""
        _refuse("prefetch", "units are fetched when they are selected")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: beams would need to share histories."""
        _refuse("reorder_cache", "beams are not supported: a seat holds one request")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: committed units stay."""
        _refuse("crop", "committed units stay; assisted decoding is not supported")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: a seat holds one request."""
        _refuse("batch_repeat_interleave", "requests cannot be copied; a seat holds one request")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: rows leave one by one, in a StepDriver."""
        _refuse("batch_select_indices", "rows stay; use a StepDriver for requests that leave")


class OffloadedCache(Closing, DynamicCache):
    """A transformers cache whose latents live in host memory, behind a small lease per request.

    Pass it as the cache of ``generate`` or of ``forward``. The first forward must hold the whole
    prompts, padded on the left; each later one decodes one token for each of them. A batch is fixed
    from its prompts to `reset`; use a :class:`StepDriver` for requests that come and go.

    A forward that fails is undone by the next call on the cache: the step is aborted and indexer
    keys are cut back. The step counts as done once the last layer's attention has run.

    Parameters
    ----------
    model : PreTrainedModel
        A GLM-5 or DeepSeek-V3.2 model that uses the attention implementation ``"sparse_kvcm"``.
    max_rows : int
        Most requests of a batch.
    max_length : int
        Most columns of the padded batch, output included: ``generate``'s ``max_length``.
    cached_slots : int, optional
        N; see :func:`manager_config`. Only without ``manager``.
    tokens_per_block : int, optional
        Tokens of one page. Default 64. Only without ``manager``.
    manager : KvCacheManager or DsaManager, optional
        Made for the model, e.g. from :func:`manager_config`. It may serve several caches, one
        forward at a time. Default: one for this cache alone.
    form : {"scatter", "compact", "triton"}
        How selected units are attended to. "scatter" puts them back in their columns, which gives
        the stock cache's logits bit for bit; "compact" keeps them side by side, which takes no
        memory per column and rounds differently. "triton" gathers nothing: latents are read and
        written where they lie, by `sparse_kvcm.attention`; for BF16 models and a DsaManager.

    Examples
    --------
    >>> model.set_attn_implementation("sparse_kvcm")              # doctest: +SKIP
    >>> cache = OffloadedCache(model, max_rows=2, max_length=4096)  # doctest: +SKIP
    >>> model.generate(ids, attention_mask=mask, cache=cache)     # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        max_length: int,
        cached_slots: int | None = None,
        tokens_per_block: int | None = None,
        manager: kvcm.KvCacheManager | DsaManager | None = None,
        form: Form = "scatter",
    ) -> None:
        check_model("OffloadedCache", model)
        geometry = DsaGeometry.from_config(model.config, model.dtype)
        manager = manager_for(
            "OffloadedCache",
            model,
            manager,
            max_rows=max_rows,
            max_length=max_length,
            cached_slots=cached_slots,
            tokens_per_block=tokens_per_block,
        )
        steps = steps_for(manager, geometry, max_rows=max_rows, max_length=max_length)
        state = CacheState(
            steps, model.config, max_length=max_length, form=form, commit_after_attention=True
        )
        self._adopt(state, model)

    @classmethod
    def _from_state(cls, state: CacheState, model: PreTrainedModel) -> OffloadedCache:
        """Make a cache over a state that somebody else drives."""
        cache = cls.__new__(cls)
        cache._adopt(state, model)
        return cache

    def _adopt(self, state: CacheState, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self._state = state
        self.layers = [OffloadedLayer(state, layer) for layer in range(len(self.layers))]

    @property
    def manager(self) -> Any:
        """The manager that holds the histories."""
        return self._state.steps.manager

    @property
    def requests(self) -> tuple[Any, ...]:
        """The requests of the batch, in its order; empty before the prompts are in."""
        self._state.recover()
        return tuple(self._state.requests)

    def suspend(self) -> None:
        """Give the leases of all requests back, between two steps.

        Raises
        ------
        OutOfPages
            If host history cannot take the units of a window. Requests suspended so far stay so;
            `resume` brings them back.
        """
        for request in self.requests:
            request.suspend(self._state.steps.stream)

    def resume(self) -> None:
        """Take new, empty leases for all suspended requests.

        Raises
        ------
        OutOfPages
            If the arena has no room; requests resumed so far stay so, and the call can be repeated.
        """
        for request in self.requests:
            self._state.steps.activate(request)

    def statistics(self) -> list[GroupStatistics]:
        """Counts and memory of each selection group."""
        return self._state.steps.statistics(self.requests)

    def reset(self) -> None:
        """Close the requests. The cache takes new prompts then."""
        self._state.recover()
        self._state.clear()

    def close(self) -> None:
        """Close the requests and free the rows. The cache cannot be used after that."""
        self.reset()
        self._state.steps.close()
