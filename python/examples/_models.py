"""The tiny models of the demonstrations, as `disaggregated` runs them on two workers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import glm5
import torch
import v4
from transformers import DynamicCache, PreTrainedModel

from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.factory import create_deepseek_v4_manager, create_dsa_manager
from sparse_kvcm.integrations.transformers import IMPLEMENTATION, StepDriver
from sparse_kvcm.integrations.transformers.deepseek_v4 import V4StepDriver
from sparse_kvcm.models import geometry_of
from sparse_kvcm.sizing import HostMemory, HostTerm, Machine, Ranks

DEVICE_BUDGET = 128 << 20
HOST_BYTES = 64 << 20


def worker_config(
    algorithm: str, requests: int, longest: int, page: int, staging: int
) -> WorkerConfig:
    """Of a decode rank."""
    offload = {"gpu_cache_factor": 3, "host_history_size": HOST_BYTES}
    return WorkerConfig.model_validate(
        {
            "sparse_attention_config": {
                "algorithm": algorithm,
                "enable_kv_cache_offload": True,
                "kv_cache_offload_config": offload,
            },
            "kv_cache_config": {
                "max_batch_size": requests,
                "max_seq_len": longest,
                "tokens_per_block": page,
                "index_dtype": "bf16",
                "max_util_for_resume": 1.0,
            },
            "cache_transceiver_config": {"backend": "nixl", "staging_slots": staging},
            "generation_only": True,
        }
    )


def machine(model: PreTrainedModel, rank: int) -> Machine:
    """What a rank finds: the first has the least device memory, the second the least of a host."""
    gpu = model.device if model.device.type == "cuda" else None
    return Machine(
        DEVICE_BUDGET + (rank << 22),
        device=str(model.device),
        compute_capability=torch.cuda.get_device_capability(gpu) if gpu else None,
        host=HostMemory({HostTerm.AVAILABLE: 20 * HOST_BYTES - (rank << 25)}),
    )


class Glm5:
    """All requests decode in one forward, so the oracle steps the stock model in equal batches."""

    title = "GLM-5"
    lengths: tuple[int, ...] = glm5.PROMPT_LENGTHS

    def build(self, device: str) -> PreTrainedModel:
        """As workers run it."""
        return glm5.build(glm5.glm5(), IMPLEMENTATION, device)

    def make_manager(self, model: PreTrainedModel, longest: int, *, resident: bool) -> Any:
        """For as many requests as there are."""
        return glm5.make_manager(model, len(self.lengths), longest, resident)

    def size_manager(
        self, model: PreTrainedModel, longest: int, staging: int, rank: int, ranks: Ranks
    ) -> Any:
        """An offloading one, with what all ranks can have. Each finds other memory."""
        config = worker_config("dsa", len(self.lengths), longest, glm5.PAGE, staging)
        geometry = geometry_of(model.config.to_dict(), "demo")
        return create_dsa_manager(geometry, config, machine(model, rank), ranks)

    def make_driver(self, model: PreTrainedModel, manager: Any) -> StepDriver:
        """On a manager."""
        config = manager.config
        return StepDriver(
            model,
            max_rows=config.max_batch_size,
            max_length=config.max_seq_len,
            manager=manager,
        )

    def id_of(self, request: Any) -> int:
        """A driver's request in the manager."""
        identity: int = request.cache.request_id
        return identity

    def stock(self, device: str, new_tokens: int, batches: Sequence[Sequence[int]]) -> Any:
        """Tokens of one stock process, request by request."""
        model = glm5.build(glm5.glm5(), "eager", device)
        stock = StockSteps(model, [v4.prompt(length) for length in self.lengths])
        for batch in batches:
            stock.step(batch)
        return [one[:new_tokens] for one in stock.tokens]


class V4:
    """Each request has a forward of its own."""

    title = "DeepSeek-V4"
    lengths: tuple[int, ...] = v4.PROMPT_LENGTHS

    def build(self, device: str) -> PreTrainedModel:
        """As workers run it."""
        return v4.build(device)

    def make_manager(self, model: PreTrainedModel, longest: int, *, resident: bool) -> Any:
        """For as many requests as there are."""
        return v4.make_manager(model, longest, resident)

    def size_manager(
        self, model: PreTrainedModel, longest: int, staging: int, rank: int, ranks: Ranks
    ) -> Any:
        """An offloading one, with what all ranks can have. Each finds other memory."""
        config = worker_config("deepseek_v4", len(self.lengths), longest, 128, staging)
        geometry = geometry_of(model.config.to_dict(), "demo")
        return create_deepseek_v4_manager(geometry, config, machine(model, rank), ranks)

    def make_driver(self, model: PreTrainedModel, manager: Any) -> V4StepDriver:
        """On a manager."""
        return V4StepDriver(model, manager)

    def id_of(self, request: Any) -> int:
        """A driver's request in the manager."""
        identity: int = request.request_id
        return identity

    def stock(self, device: str, new_tokens: int, batches: Sequence[Sequence[int]]) -> Any:
        """Tokens of one stock process, request by request."""
        del batches
        model = v4.build(device)
        return [v4.stock_tokens(model, length, new_tokens) for length in self.lengths]


MODELS: dict[str, Any] = {"glm5": Glm5, "v4": V4}


class StockSteps:
    """The stock model and the stock cache, in given batches: what rounding has to be equal to.

    Each step puts a cache together for the requests of its batch, padded on the left to the
    longest.
    """

    names = ("keys", "values", "indexer_keys")

    def __init__(self, model: PreTrainedModel, prompts: Sequence[torch.Tensor]) -> None:
        self.model = model
        self.tokens: list[list[int]] = []
        self.layers: list[list[dict[str, Any]]] = []
        self.lengths = [len(prompt) for prompt in prompts]
        for prompt in prompts:
            cache = DynamicCache(config=model.config)
            ids = prompt[None].to(model.device)
            self.tokens.append(self._forward(ids, torch.ones_like(ids), cache))
            self.layers.append(self._take(cache, 0, 0))

    def step(self, batch: Sequence[int]) -> None:
        """Decode a token of each of these requests."""
        longest = max(self.lengths[one] for one in batch)
        padding = [longest - self.lengths[one] for one in batch]
        cache = DynamicCache(config=self.model.config)
        for index, layer in enumerate(cache.layers):
            self._put(layer, [self.layers[one][index] for one in batch], padding)
        ids = torch.tensor([[self.tokens[one][-1]] for one in batch], device=self.model.device)
        columns = torch.arange(longest + 1, device=ids.device)
        mask = (columns >= torch.tensor(padding, device=ids.device)[:, None]).long()
        tokens = self._forward(ids, mask, cache)
        for place, one in enumerate(batch):
            self.layers[one] = self._take(cache, place, padding[place])
            self.lengths[one] += 1
            self.tokens[one].append(tokens[place])

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> list[int]:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # transformers 5.24 renamed the argument.
        new_name = "cache" in inspect.signature(self.model.forward).parameters
        argument = "cache" if new_name else "past_key_values"
        with torch.no_grad():
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{argument: cache},
            )
        tokens: list[int] = output.logits[:, -1].argmax(-1).tolist()
        return tokens

    def _put(self, layer: Any, sources: Sequence[dict[str, Any]], padding: Sequence[int]) -> None:
        layer.is_initialized = True
        for name in self.names:
            rows = [source[name] for source in sources]
            if rows[0] is None:
                continue
            padded = [
                torch.nn.functional.pad(row, (0, 0, pad, 0))
                for row, pad in zip(rows, padding, strict=True)
            ]
            setattr(layer, name, torch.stack(padded))
            layer.is_indexer_initialized |= name == "indexer_keys"

    def _take(self, cache: DynamicCache, row: int, padding: int) -> list[dict[str, Any]]:
        def own(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[row][..., padding:, :].clone()

        return [{name: own(getattr(layer, name)) for name in self.names} for layer in cache.layers]
