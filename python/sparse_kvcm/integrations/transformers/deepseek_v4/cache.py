"""The cache class that a user passes to ``generate`` or to a DeepSeek-V4's ``forward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
)

from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager
from sparse_kvcm.integrations.transformers._arguments import check_int, check_model
from sparse_kvcm.integrations.transformers.absorbed import check_model as check_for_triton
from sparse_kvcm.integrations.transformers.deepseek_v4.attention import IMPLEMENTATION
from sparse_kvcm.integrations.transformers.deepseek_v4.layers import (
    ManagedCSA,
    ManagedHCA,
    ManagedWindow,
)
from sparse_kvcm.integrations.transformers.deepseek_v4.state import Form, V4State
from sparse_kvcm.models import DeepSeekV4Geometry, geometry_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMS = ("scatter", "compact", "triton")


def check_form(function: str, model: Any, form: Any) -> None:
    """Refuse a form that is not known, or that the model cannot be run in.

    Raises
    ------
    ValueError
    ImportError
        For "triton" without triton.
    """
    if form not in FORMS:
        raise ValueError(f"[{function}] form must be one of {', '.join(FORMS)}, got {form}")
    if form == "triton":
        check_for_triton(function, model.dtype, model.device)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"[{function}] the model's attention implementation must be "
                f'"{IMPLEMENTATION}" with form "triton", got '
                f'"{model.config._attn_implementation}". Call '
                f'model.set_attn_implementation("{IMPLEMENTATION}")'
            )


class ManagedV4Cache(DynamicCache):
    """A transformers cache whose contents are a manager's; see `attach`.

    The first forward must hold the whole prompts, all of one length; each later one decodes one
    token for each of them. A forward that fails is undone by the next call.

    Parameters
    ----------
    model : PreTrainedModel
        A DeepSeek-V4 with hooks of `attach`.
    manager : DeepseekV4CacheManager
        Made for the model. It may serve several caches, one forward at a time.
    max_length : int
        Most tokens of each request, output included: ``generate``'s ``max_length``.
    form : {"scatter", "compact", "triton"}
        How selected entries are attended to. "scatter" puts them back in their places, which gives
        the stock cache's logits bit for bit where records hold the model's dtype; "compact" keeps
        them side by side, which takes no memory per entry and rounds differently. "triton" gathers
        nothing: window and entries are read and written where they lie, by `sparse_kvcm.attention`;
        for BF16 models with the attention implementation ``"sparse_kvcm_v4"``.
    owns_steps : bool
        Whether each forward is a step of the manager. A driver of several caches opens its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        manager: DeepseekV4CacheManager,
        *,
        max_length: int,
        form: Form = "scatter",
        owns_steps: bool = True,
    ) -> None:
        check_model("ManagedV4Cache", model)
        check_int("ManagedV4Cache", "max_length", max_length)
        check_manager(model, manager)
        if max_length > manager.config.max_seq_len:
            raise ValueError(
                f"[ManagedV4Cache] max_length must be <= {manager.config.max_seq_len}, the "
                f"manager's, got {max_length}"
            )
        check_form("ManagedV4Cache", model, form)
        super().__init__(config=model.config)
        kinds = {0: ManagedWindow, 1: ManagedWindow, 4: ManagedCSA, 128: ManagedHCA}
        ratios = manager.config.geometry.compress_ratios
        layers = [
            ManagedWindow(model.config.sliding_window) if ratio < 4 else kinds[ratio](model.config)
            for ratio in ratios
        ]
        self.layers = layers
        self.state = V4State(
            manager,
            layers,
            position_biases(model),
            max_length=max_length,
            form=form,
            owns_steps=owns_steps,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each request."""
        del layer_idx  # all alike
        return self.state.tokens_seen

    def reset(self) -> None:
        """End every request; the cache is empty then."""
        self.state.recover()
        self.state.clear()

    close = reset

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: tokens that are there stay."""
        raise NotImplementedError(
            "[ManagedV4Cache.crop] tokens stay; assisted decoding is not supported"
        )


def check_manager(model: PreTrainedModel, manager: DeepseekV4CacheManager) -> None:
    """Refuse a manager that was made for another model.

    Raises
    ------
    ValueError
        Naming the field.
    """
    wanted, got = geometry_of(model.config.to_dict()), manager.config.geometry
    if not isinstance(wanted, DeepSeekV4Geometry):
        raise ValueError(
            f"[ManagedV4Cache] model must be a DeepSeek-V4, got {type(model).__name__}"
        )
    fields = ("compress_ratios", "head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window")
    for field in (*fields, "top_k"):
        if getattr(wanted, field) != getattr(got, field):
            raise ValueError(
                f"[ManagedV4Cache] {field} of the manager must be {getattr(wanted, field)}, as "
                f"the model's, got {getattr(got, field)}"
            )


def decoder_of(model: PreTrainedModel) -> Any:
    """The model without its head."""
    return model.get_decoder()  # type: ignore[no-untyped-call]


def position_biases(model: PreTrainedModel) -> dict[tuple[int, str], torch.Tensor]:
    """Position bias of each compressor, by layer and transformers' name of it."""
    biases: dict[tuple[int, str], torch.Tensor] = {}
    for index, layer in enumerate(decoder_of(model).layers):
        compressor = layer.self_attn.compressor
        if isinstance(compressor, DeepseekV4CSACompressor | DeepseekV4HCACompressor):
            biases[index, "compressor"] = compressor.position_bias
        if isinstance(compressor, DeepseekV4CSACompressor):
            biases[index, "indexer"] = compressor.indexer.position_bias
    return biases
