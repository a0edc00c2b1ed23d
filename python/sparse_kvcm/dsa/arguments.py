"""Arguments of a DSA manager's calls, refused by function, name, bound and value.

Nothing here asks a tensor for a value, so that a forward which is checked can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.arguments import check_tensor
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.dsa.config import DsaCacheConfig

if TYPE_CHECKING:
    import torch


class Arguments:
    """The arguments of one manager's calls.

    Parameters
    ----------
    config : DsaCacheConfig
        Whose layers, widths and device they must have.
    """

    def __init__(self, config: DsaCacheConfig) -> None:
        self._geometry = config.geometry
        self._latent_width = config.latent_width
        self._device = config.device

    def layer(self, function: str, layer: int) -> None:
        """Refuse what is no layer of the model."""
        check_int(function, "layer", layer, 0, self._geometry.num_layers - 1)

    def leader(self, function: str, layer: int) -> None:
        """Refuse a layer that does not own an indexer."""
        check_int(function, "layer", layer)
        geometry = self._geometry
        if not geometry.owns_indexer(layer):
            group = geometry.selection_group_of.get(layer)
            shares = "" if group is None else f" shares that of layer {geometry.groups[group][0]}"
            owners = ", ".join(str(one[0]) for one in geometry.groups)
            raise InvalidArgument(
                f"[{function}] layer must own an indexer, one of {owners}; got {layer}, which"
                f"{shares or ' the model does not have'}"
            )

    def selection(self, layer: int, selection: object, num_rows: int) -> None:
        """Refuse what is no selection of so many rows, or a wider one than top-k."""
        import torch

        self.leader("select", layer)
        shape, dtypes = (num_rows, "k"), (torch.int32,)
        found = check_tensor("select", "selection", selection, shape, dtypes, self._device)
        top_k = self._geometry.top_k
        if not 1 <= found.shape[1] <= top_k:
            raise InvalidArgument(
                f"[select] selection must be (b, k) with k in [1, top-k {top_k}], "
                f"got {tuple(found.shape)}"
            )

    def latents(self, layer: int, latents: object, num_tokens: int) -> None:
        """Refuse what are not the latents of a step's new tokens."""
        self.layer("write_latents", layer)
        shape = (num_tokens, self._latent_width)
        check_tensor("write_latents", "latents", latents, shape, None, self._device)

    def index_keys(self, layer: int, keys: object, num_tokens: int) -> None:
        """Refuse what are not the index keys of a step's new tokens."""
        self.leader("write_index_keys", layer)
        shape = (num_tokens, self._geometry.index_head_dim)
        check_tensor("write_index_keys", "keys", keys, shape, None, self._device)

    def slots(self, layer: int, slots: object) -> None:
        """Refuse what are no slots to read."""
        import torch

        self.layer("gather_latents", layer)
        shape = ("n",) * getattr(slots, "ndim", 1)
        dtypes = (torch.int32, torch.int64)
        check_tensor("gather_latents", "slots", slots, shape, dtypes, self._device)

    def history(
        self, latents: Mapping[int, torch.Tensor], index_keys: Mapping[int, torch.Tensor]
    ) -> int:
        """Tokens of an import whose arrays fit, wherever they lie."""
        geometry = self._geometry
        parts = (
            ("latents", latents, geometry.history_layers, self._latent_width),
            ("index_keys", index_keys, [g[0] for g in geometry.groups], geometry.index_head_dim),
        )
        tokens: int | None = None
        for name, arrays, layers, width in parts:
            if not isinstance(arrays, Mapping) or set(arrays) != set(layers):
                got = [*arrays] if isinstance(arrays, Mapping) else arrays
                raise InvalidArgument(
                    f"[import_history] {name} must be a mapping of layers {layers}, got {got!r:.80}"
                )
            for layer, array in arrays.items():
                shape = ("n" if tokens is None else tokens, width)
                tokens = len(check_tensor("import_history", f"{name}[{layer}]", array, shape))
        return tokens or 0
