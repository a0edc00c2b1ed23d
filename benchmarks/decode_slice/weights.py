"""Random weights of a slice, and what one layer does to its input beside attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import rms_norm, silu

from benchmarks.decode_slice.model import SliceModel

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def normal(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square norm of the last dimension."""
    return rms_norm(x, (x.shape[-1],))


def to_codes(x: torch.Tensor) -> torch.Tensor:
    """E4M3 codes, uint8."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def scaled_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 of each row divided by its scale, and the scales, float32 ``[rows]``."""
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=1e-6) / FP8_MAX
    return (x / scale[:, None]).to(FP8), scale


@dataclass
class Experts:
    """Experts of one layer that this rank has, weights as [experts, out, in].

    FP8 weights are codes of at most 1.875 with a scale per output.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, router: torch.Tensor, top: int) -> torch.Tensor:
        """Send each token to `top` of these experts.

        Under expert parallelism each of r ranks has 1/r of all experts and sends its tokens
        everywhere: as many rows come as if every token of this rank went to experts of its own.
        """
        b, count = len(x), len(self.up)
        chosen = (x @ router).float().sigmoid().topk(top)
        share = chosen.values / chosen.values.sum(-1, keepdim=True)
        experts, order = chosen.indices.flatten().sort(stable=True)
        bounds = torch.arange(count, device=x.device)
        ends = torch.searchsorted(experts, bounds, right=True).int()
        wide = _grouped(x[order // top], self.up, self.up_scale, ends)
        gate, up = wide.chunk(2, -1)
        rows = _grouped(silu(gate) * up, self.down, self.down_scale, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        per_token = rows[back].view(b, top, -1)
        return (per_token * share[..., None].to(rows.dtype)).sum(1)


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Rows up to ends[i] times weights[i], transposed."""
    if not x.is_cuda:
        out = x.new_empty((len(x), weights.shape[1]))
        begin = 0
        for one, end in zip(weights, ends.tolist(), strict=True):
            out[begin:end] = x[begin:end] @ one.T
            begin = end
        return out
    if scale is None:
        return torch._grouped_mm(x, weights.transpose(-2, -1), offs=ends)
    codes, row_scale = scaled_codes(x)
    return torch._scaled_grouped_mm(
        codes,
        weights.transpose(-2, -1),
        row_scale,
        scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


@dataclass
class LayerWeights:
    """Matrices of one layer by name, BF16 [in, out] unless said.

    q_a, q_b, kv, out; key_up [heads, nope, latent] and value_up [heads, latent, value] where a
    latent is expanded; out_a [groups, in, lora] of DeepSeek-V4; router; shared_up, shared_down.
    Of layers that own an indexer: index_q, index_k, index_w; of ratio 4 and 128: compress.
    """

    matrices: dict[str, torch.Tensor] = field(default_factory=dict)
    experts: Experts | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.matrices[name]


class Weights:
    """Weights of all layers, and rows that tokens begin as.

    Parameters
    ----------
    model : SliceModel
    device : str
    expert_dtype : {"fp8", "bf16"}
        FP8 on a GPU alone.
    seed : int
    """

    vocabulary = 1024

    def __init__(self, model: SliceModel, device: str, expert_dtype: str, seed: int = 0) -> None:
        self._model, self._device = model, device
        self._fp8 = expert_dtype == "fp8" and device != "cpu"
        self._random = torch.Generator(device).manual_seed(seed)
        self.embedding = self._normal(self.vocabulary, model.hidden, gain=self.vocabulary**0.5)
        leaders = {group[0] for group in model.geometry.groups}
        self.layers = [self._layer(layer, layer in leaders) for layer in range(model.layers)]

    def _layer(self, layer: int, leads: bool) -> LayerWeights:
        one = self._model
        query = one.heads * (one.nope + one.width - one.latent if one.nope else one.width)
        shapes = {
            "q_a": (one.hidden, one.q_lora),
            "q_b": (one.q_lora, query),
            "kv": (one.hidden, one.width),
            "router": (one.hidden, one.local_experts),
            "shared_up": (one.hidden, 2 * one.expert_width),
            "shared_down": (one.expert_width, one.hidden),
        }
        if one.nope:
            shapes["out"] = (one.heads * one.value_dim, one.hidden)
        else:
            shapes["out"] = (one.o_groups * one.o_lora, one.hidden)
            shapes["compress"] = (one.hidden, one.width)
        if leads:
            width = one.geometry.index_head_dim
            shapes["index_q"] = (one.q_lora, one.index_heads * width)
            shapes["index_k"] = (one.hidden, width)
            shapes["index_w"] = (one.hidden, one.index_heads)
        matrices = {name: self._normal(*shape) for name, shape in shapes.items()}
        if one.nope:
            matrices["key_up"] = self._normal(one.heads, one.nope, one.latent)
            matrices["value_up"] = self._normal(one.heads, one.latent, one.value_dim)
        else:
            heads = one.heads // one.o_groups
            matrices["out_a"] = self._normal(one.o_groups, heads * one.width, one.o_lora)
        return LayerWeights(matrices, self._experts())

    def _experts(self) -> Experts:
        one = self._model
        up = (one.local_experts, 2 * one.expert_width, one.hidden)
        down = (one.local_experts, one.hidden, one.expert_width)
        if not self._fp8:
            return Experts(self._expert(up), self._expert(down))
        codes = [self._codes(shape) for shape in (up, down)]
        scales = [
            torch.full(shape[:2], 2 * shape[2] ** -0.5, device=self._device) for shape in (up, down)
        ]
        return Experts(*codes, *scales)

    def _codes(self, shape: tuple[int, int, int]) -> torch.Tensor:
        codes = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return codes.random_(generator=self._random).bitwise_and_(0xBF).view(FP8)

    def _expert(self, shape: tuple[int, int, int]) -> torch.Tensor:
        weights = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return weights.normal_(std=shape[2] ** -0.5, generator=self._random)

    def _normal(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        """Entries that keep the size of what they are multiplied with."""
        made = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return made.normal_(std=gain * shape[-2] ** -0.5, generator=self._random)
