"""Slices of models: which layers, and the sizes of all that they compute."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from sparse_kvcm import InvalidArgument
from sparse_kvcm.models import DeepSeekV4Geometry, DsaGeometry, load_geometry

Geometry = DsaGeometry | DeepSeekV4Geometry


@dataclass(frozen=True)
class SliceModel:
    """Some layers of a model, numbered from 0, and one of `ranks` ranks of its experts.

    Attributes
    ----------
    name : str
    geometry : DsaGeometry or DeepSeekV4Geometry
        Of the slice.
    whole_layers : int
        Layers of the model.
    kv_budget : int
        Device bytes of the whole model for its cache, on one GPU.
    trace : str
        The preset of its selections.
    tokens_per_block : int
    hidden, heads, q_lora : int
    nope, value_dim : int
        Of a head's query, without the rotary part, and of its value; 0 in DeepSeek-V4, where
        queries and values have the width of an entry.
    index_heads : int
    experts, experts_per_token, expert_width : int
        Experts of the whole model; intermediate size of one.
    o_groups, o_lora : int
        Of DeepSeek-V4's output projection.
    ranks : int
        Expert parallel; each has as many requests as this one.
    """

    name: str
    geometry: Geometry
    whole_layers: int
    kv_budget: int
    trace: str
    tokens_per_block: int
    hidden: int
    heads: int
    q_lora: int
    nope: int
    value_dim: int
    index_heads: int
    experts: int = 256
    experts_per_token: int = 8
    expert_width: int = 2048
    o_groups: int = 0
    o_lora: int = 0
    ranks: int = 2

    @property
    def layers(self) -> int:
        """Of the slice."""
        return self.geometry.num_layers

    @property
    def budget(self) -> int:
        """Device bytes of the slice's cache."""
        return self.kv_budget * self.layers // self.whole_layers

    @property
    def local_experts(self) -> int:
        """Of this rank."""
        return self.experts // self.ranks

    @property
    def width(self) -> int:
        """Elements of a unit, and of a query of the attention kernel."""
        one = self.geometry
        if isinstance(one, DsaGeometry):
            return one.kv_lora_rank + one.qk_rope_head_dim
        return one.head_dim

    @property
    def latent(self) -> int:
        """Elements of what attention returns per head."""
        one = self.geometry
        return one.kv_lora_rank if isinstance(one, DsaGeometry) else one.head_dim

    @property
    def layers_of_units(self) -> int:
        """Layers that attend to a selection."""
        return len(self.geometry.history_layers)

    @property
    def softmax_scale(self) -> float:
        """Of the scores."""
        one = self.geometry
        rope = one.qk_rope_head_dim if isinstance(one, DsaGeometry) else 0
        return 1 / math.sqrt(self.nope + rope if self.nope else self.width)

    @property
    def units_per_page(self) -> int:
        """Units of the selected history in a page."""
        return self.tokens_per_block // self.geometry.tokens_per_unit


def _dsa_slice(geometry: DsaGeometry, layers: int) -> DsaGeometry:
    """Consecutive groups from the third on, which is the first of usual size."""
    groups: list[tuple[int, ...]] = []
    count = 0
    for group in geometry.groups[2:]:
        if count >= layers:
            break
        groups.append(tuple(range(count, count + len(group))))
        count += len(group)
    if count != layers or layers < 1:
        size = len(geometry.groups[2])
        raise InvalidArgument(
            f"[make_slice] layers of {geometry.name} must be whole selection groups, multiples of "
            f"{size} up to {geometry.num_layers - 2}, got {layers}"
        )
    return replace(geometry, num_layers=layers, groups=tuple(groups))


def _v4_slice(geometry: DeepSeekV4Geometry, layers: int) -> DeepSeekV4Geometry:
    """Layers from the third on, which have ratios 4 and 128 in turn."""
    ratios = geometry.compress_ratios[2 : 2 + layers]
    if len(ratios) != layers or layers < 1 or layers % 2:
        raise InvalidArgument(
            f"[make_slice] layers of {geometry.name} must be even and at most "
            f"{geometry.num_layers - 2}, got {layers}"
        )
    groups = tuple((layer,) for layer, ratio in enumerate(ratios) if ratio == 4)
    return replace(geometry, num_layers=layers, groups=groups, compress_ratios=ratios)


_TINY_DSA = DsaGeometry("tiny", 6, ((0, 1), (2, 3, 4, 5)), 32, 1, 128, 1 << 20, 64, 16, 16)
_TINY_V4 = DeepSeekV4Geometry(
    "tiny-v4", 4, ((0,), (2,)), 16, 4, 128, 1 << 20, 64, 16, 32, (4, 128, 4, 128)
)


def _tiny(name: str) -> SliceModel:
    sizes = {"hidden": 64, "heads": 4, "q_lora": 32, "index_heads": 16}
    experts = {"experts": 8, "experts_per_token": 2, "expert_width": 32}
    if name == "tiny":
        return SliceModel(
            name, _TINY_DSA, 6, 1 << 28, "glm51", 16, nope=16, value_dim=32, **sizes, **experts
        )
    groups = {"o_groups": 2, "o_lora": 16}
    return SliceModel(
        name, _TINY_V4, 4, 1 << 28, "glm51", 128, nope=0, value_dim=0, **sizes, **experts, **groups
    )


def _sizes(geometry: Geometry) -> dict[str, int]:
    """Those of the presets."""
    assert geometry.compute is not None
    return asdict(geometry.compute)


# Preset, usual layers, budget, trace and page. The budget of GLM-5.2 is what a published GB300 has
# for 29 resident requests of 32,928 tokens; DeepSeek-V3.2 gets the same. V4 Flash's holds 633.
_SLICES = {
    "glm-5.2": ("glm-5.2", 8, 45_600_000_000, "glm51", 64),
    "v32": ("deepseek-v3.2", 8, 45_600_000_000, "v32_mid", 64),
    "v4-flash": ("deepseek-v4-flash", 12, 87_500_000_000, "glm51", 256),
}


def make_slice(name: str, layers: int | None = None) -> SliceModel:
    """A slice of `layers` layers (None: the usual number), or a tiny model.

    Raises
    ------
    InvalidArgument
        For a model that is not known, or layers that are no whole selection groups.
    """
    if name in ("tiny", "tiny-v4"):
        if layers is not None:
            raise InvalidArgument(f"[make_slice] layers of {name} are fixed, got {layers}")
        return _tiny(name)
    if name not in _SLICES:
        raise InvalidArgument(
            f"[make_slice] model must be one of {', '.join(_SLICES)}, tiny, tiny-v4, got {name!r}"
        )
    preset, usual, budget, trace, page = _SLICES[name]
    whole, count = load_geometry(preset), usual if layers is None else layers
    assert isinstance(whole, Geometry)
    is_v4 = isinstance(whole, DeepSeekV4Geometry)
    part = _v4_slice(whole, count) if is_v4 else _dsa_slice(whole, count)
    return SliceModel(name, part, whole.num_layers, budget, trace, page, **_sizes(whole))
