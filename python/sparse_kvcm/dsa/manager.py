"""What DSA cache managers of both versions do alike: records, index keys, selections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from sparse_kvcm._core import InvalidArgument, InvalidState
from sparse_kvcm.adapter.manager import RequestManager
from sparse_kvcm.adapter.scatter import Record, gather, gather_regions, scatter, scatter_regions
from sparse_kvcm.adapter.slot_mapping import SlotMapping, map_slots
from sparse_kvcm.adapter.store import Store
from sparse_kvcm.dsa import codecs
from sparse_kvcm.dsa.arguments import Arguments
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.latents import LatentStore
from sparse_kvcm.dsa.pools import RolePool
from sparse_kvcm.dsa.step_tensors import DsaStep, StepTensors
from sparse_kvcm.step import PreparedStep

if TYPE_CHECKING:
    import torch

Role = Literal["KEY", "KEY_BLOCK_SCALE", "INDEX_KEY", "ALL"]


class DsaManager(RequestManager[DsaStep]):
    """A DSA cache: latents of all layers, and index keys of the layers that own an indexer.

    A step is `prepare_step`; per selection group `select`, per layer `write_latents`,
    `write_index_keys` and `gather_latents` in the order of the model; then `end_step`. See
    `RequestManager` for requests and for a forward that fails.
    """

    def __init__(
        self, config: DsaCacheConfig, store: Store, latents: LatentStore, index_keys: RolePool
    ) -> None:
        self.config = config
        self.store = store
        self.index_keys = index_keys
        self._latents = latents
        self._arguments = Arguments(config)
        pools = [*latents.pools, index_keys]
        self._tensors = StepTensors(pools, config.max_batch_size, config.max_pages, config.device)

    # --- requests ---

    def import_history(
        self,
        request_id: int,
        latents: Mapping[int, torch.Tensor],
        index_keys: Mapping[int, torch.Tensor],
    ) -> None:
        """Append tokens that were computed elsewhere: a prompt, or a received transfer.

        Parameters
        ----------
        request_id : int
            Without a row.
        latents : mapping of int to torch.Tensor, float, shape (n, rank + rope)
            By layer, for all layers.
        index_keys : mapping of int to torch.Tensor, float, shape (n, index_head_dim)
            By layer, for all layers that own an indexer.

        Raises
        ------
        InvalidArgument
            If a layer or a shape does not fit.
        InvalidState
            If it has a row: it has decoded. And if it is suspended.
        OutOfPages
            If there is no room; the request is as it was.
        """
        import torch

        history = self._check_known("import_history", request_id)
        if self.store.row_of(request_id) is not None:
            raise InvalidState(
                f"[import_history] request {request_id} has decoded; its prompt is complete"
            )
        length = history + self._arguments.history(latents, index_keys)
        self.store.take(request_id, length, history)
        try:
            slots = self.store.page_indices(request_id, self.index_keys.layer_group)
            on_device = torch.from_numpy(slots).to(self.config.device)
            self._import_index_keys(on_device, history, index_keys)
            records = {layer: self._encode(rows) for layer, rows in latents.items()}
            self._latents.append(request_id, on_device, history, records)
        except BaseException:
            self.store.give_back(request_id)
            raise
        self.store.take(request_id, length, length)

    # --- one step ---

    def select(self, layer: int, selection: torch.Tensor) -> torch.Tensor:
        """Find the tokens that an indexer selected, and bring them to the GPU.

        Parameters
        ----------
        layer : int
            That owns the indexer.
        selection : torch.Tensor, int32, shape (b, k)
            Positions in each request of the step, -1 anywhere for none; k at most top-k.

        Returns
        -------
        torch.Tensor, int, shape (b, k)
            Slots, page * tokens_per_block + offset in the layers' buffers, -1 = none. They serve
            all layers that share the selection.
        """
        step = self.require_step("select")
        self._arguments.selection(layer, selection, len(step.rows))
        group = self.config.geometry.selection_group_of[layer]
        return self._latents.select(step, group, selection)

    def write_latents(self, layer: int, latents: torch.Tensor) -> None:
        """Write the latents of the step's new tokens, float ``[n, rank + rope]``."""
        step = self.require_step("write_latents")
        self._arguments.latents(layer, latents, step.num_new_tokens)
        record = self._encode(latents)
        slots = self._latents.write_slots(step, self.config.geometry.selection_group_of[layer])
        scatter_regions(self._latents.buffers(layer), record, lambda page: map_slots(slots, page))

    def gather_latents(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Read latents at slots of `select`: float32 ``[..., rank + rope]``, zeros at -1."""
        self.require_step("gather_latents")
        self._arguments.slots(layer, slots)
        flat = slots.reshape(-1)
        record = gather_regions(self._latents.buffers(layer), lambda page: map_slots(flat, page))
        geometry = self.config.geometry
        values = codecs.decode_latents(
            record,
            self.config.kv_dtype,
            rank=geometry.kv_lora_rank,
            rope=geometry.qk_rope_head_dim,
            scale=self.config.kv_scale,
        )
        return values.view(*slots.shape, self.config.latent_width)

    def write_index_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Write the index keys of the step's new tokens, float ``[n, index_head_dim]``."""
        step = self.require_step("write_index_keys")
        self._arguments.index_keys(layer, keys, step.num_new_tokens)
        mapping = step.slots["INDEX_KEY"]
        self._scatter_index_keys(layer, mapping, keys)

    def gather_index_keys(self, layer: int, mapping: SlotMapping) -> torch.Tensor:
        """Read index keys, float32 ``[n, index_head_dim]``, such as of `DsaStep.full_kv`."""
        self._arguments.leader("gather_index_keys", layer)
        if not isinstance(mapping, SlotMapping) or mapping.page != self.index_keys.page:
            raise InvalidArgument(
                "[gather_index_keys] mapping must be a SlotMapping of index keys, such as of "
                f"DsaStep.full_kv(), got {mapping!r:.80}"
            )
        record = gather(self.get_indexer_k_cache_buffers(layer), mapping)
        return codecs.decode_index_keys(record, self.config.index_dtype)

    # --- views ---

    @property
    def latents(self) -> LatentStore:
        """Where latents are: buffers of each layer, and the slots of a step's new tokens."""
        return self._latents

    def get_buffers(self, layer: int, role: Role = "KEY") -> torch.Tensor:
        """A layer's latents as kernels read them, ``[pages, tokens_per_block, 1, elements]``.

        Without a copy: pages of a pool, or of the arena, the last of which may be written freely.
        Elements are BF16 or E4M3 where latents have nothing else, bytes otherwise.
        """
        self._arguments.layer("get_buffers", layer)
        return self._latents.view(layer, role)

    def get_indexer_k_cache_buffers(self, layer: int) -> torch.Tensor:
        """A layer's index keys, uint8 ``[pages, tokens_per_block, 1, bytes]``, without a copy.

        In a page all tokens' data come first, then all scales, whatever the last dimensions say.

        Raises
        ------
        InvalidArgument
            For a layer without an indexer, naming those that have one.
        """
        self._arguments.leader("get_indexer_k_cache_buffers", layer)
        view = self.index_keys.view(layer)
        return view.view(len(view), self.config.page_tokens, 1, -1)

    @property
    def indexer_k_cache_page_scale(self) -> int:
        """Page indices of index keys per slot of a page table."""
        return self.index_keys.scale

    def bytes_per_token(self, role: Role = "ALL") -> int:
        """Bytes of a token in all layers, wherever they are; ``"ALL"`` adds the roles up.

        Index keys count in layers that own an indexer alone.
        """
        geometry = self.config.geometry
        units = self.config.latent_page.layout.region_bytes
        roles = self.config.key_roles
        parts = units if len(roles) == len(units) else [sum(units)]
        sizes = {name: geometry.num_layers * size for name, size in zip(roles, parts, strict=True)}
        sizes = {"KEY_BLOCK_SCALE": 0, "INDEX_KEY": self.index_keys.bytes_per_token} | sizes
        sizes["ALL"] = sum(sizes.values())
        if role not in sizes:
            raise InvalidArgument(
                f"[bytes_per_token] role must be one of {', '.join(sizes)}, got {role!r}"
            )
        return sizes[role]

    # --- parts ---

    def _make_step(self, prepared: PreparedStep) -> DsaStep:
        return self._tensors.make(prepared, self.store.base_tables)

    def _forget_selections(self) -> None:
        self._latents.forget_step()

    def _encode(self, latents: torch.Tensor) -> Record:
        return codecs.encode_latents(
            latents,
            self.config.kv_dtype,
            rank=self.config.geometry.kv_lora_rank,
            scale=self.config.kv_scale,
        )

    def _scatter_index_keys(self, layer: int, mapping: SlotMapping, keys: torch.Tensor) -> None:
        record = codecs.encode_index_keys(
            keys, self.config.index_dtype, index_scale=self.config.index_scale
        )
        scatter(self.get_indexer_k_cache_buffers(layer), mapping, record)

    def _import_index_keys(
        self, slots: torch.Tensor, history: int, index_keys: Mapping[int, torch.Tensor]
    ) -> None:
        """Write keys behind `history` tokens of a request, given its slots, int32 ``[pages]``."""
        n = len(next(iter(index_keys.values())))
        mapping = self.index_keys.map_appended(slots, history, n)
        for layer, keys in index_keys.items():
            self._scatter_index_keys(layer, mapping, keys.to(slots.device))
