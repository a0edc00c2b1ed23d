"""What a layer computes with: sizes that the time of a step follows from, and no byte kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Fields of config.json; those of one family alone have a default in the other.
_FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "q_lora": "q_lora_rank",
    "index_heads": "index_n_heads",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
}
_OF_DSA = {"nope": "qk_nope_head_dim", "value_dim": "v_head_dim"}
_OF_V4 = {"o_groups": "o_groups", "o_lora": "o_lora_rank"}


@dataclass(frozen=True)
class ModelCompute:
    """Sizes of a layer's matrices.

    Attributes
    ----------
    hidden, heads, q_lora : int
    index_heads : int
        Query heads of an indexer.
    experts, experts_per_token, expert_width : int
        Routed experts of a layer; intermediate size of one. A shared one is as wide.
    nope, value_dim : int
        Of a head's query, without the rotary part, and of its value; 0 in DeepSeek-V4, where
        queries and values have the width of an entry.
    o_groups, o_lora : int
        Of DeepSeek-V4's output projection; 0 in others.
    """

    hidden: int
    heads: int
    q_lora: int
    index_heads: int
    experts: int
    experts_per_token: int
    expert_width: int
    nope: int = 0
    value_dim: int = 0
    o_groups: int = 0
    o_lora: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelCompute | None:
        """Read a ``config.json``; None if it lacks any of it, since no byte depends on these."""
        family = _OF_V4 if config.get("model_type") == "deepseek_v4" else _OF_DSA
        sizes = {name: config.get(field) for name, field in (_FIELDS | family).items()}
        known = {name: n for name, n in sizes.items() if type(n) is int and n > 0}
        return cls(**known) if len(known) == len(sizes) else None

    @property
    def expert_weights(self) -> int:
        """Elements of one expert."""
        return 3 * self.hidden * self.expert_width

    def dense_weights(self, width: int, latent: int) -> int:
        """Elements of what every token meets in a layer: projections, shared expert, router.

        Parameters
        ----------
        width, latent : int
            Elements of a stored unit, and of what attention returns per head.
        """
        q = self.nope + width - latent if self.nope else width
        sums = self.hidden * (self.q_lora + width + self.experts) + self.expert_weights
        sums += self.q_lora * self.heads * q
        if self.nope:
            sums += self.heads * latent * (self.nope + self.value_dim)
            return sums + self.heads * self.value_dim * self.hidden
        sums += self.hidden * width  # the compressor's
        return sums + self.o_lora * (self.heads * width + self.o_groups * self.hidden)
