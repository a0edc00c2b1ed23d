"""Arguments of a manager's calls, refused by function, name, bound and value.

Nothing here asks a tensor for a value, so that a forward which is checked can be captured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.adapter.arguments import check_tensor
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.deepseek_v4.config import DeepseekV4CacheConfig
from sparse_kvcm.deepseek_v4.history import (
    DeepseekV4History,
    check_has,
    least_inputs,
    types_of,
    width_of,
)
from sparse_kvcm.deepseek_v4.step import At
from sparse_kvcm.models import AttentionType, DeepSeekV4Geometry
from sparse_kvcm.step import is_int

FULL = (AttentionType.COMPRESS, AttentionType.INDEXER_COMPRESS)


def check_at(function: str, at: At, num_queries: int) -> None:
    """Refuse queries that the step does not have, or that are named twice."""
    if isinstance(at, slice):
        step = 1 if at.step is None else at.step
        if not all(one is None or is_int(one) for one in (at.start, at.stop, step)) or step < 1:
            raise InvalidArgument(
                f"[{function}] at must be a slice of ints with a step >= 1, got {at}"
            )
        return
    if not isinstance(at, list | range):  # a tuple would index dimensions
        raise InvalidArgument(
            f"[{function}] at must be a slice or a list of queries, got {type(at).__name__}"
        )
    for query in at:
        check_int(function, "at", query, 0, num_queries - 1)
    if len(set(at)) != len(at):
        raise InvalidArgument(f"[{function}] at must name a query once, got {list(at)}")


class Arguments:
    """The arguments of one manager's calls.

    Parameters
    ----------
    config : DeepseekV4CacheConfig
        Whose layers, widths and device they must have.
    """

    def __init__(self, config: DeepseekV4CacheConfig) -> None:
        self._geometry = config.geometry
        self._device = config.device

    def layer(
        self,
        function: str,
        layer: int,
        kind: AttentionType,
        kinds: Collection[AttentionType] = tuple(AttentionType),
    ) -> None:
        """Refuse a type that a call is not for, and a layer that does not have it."""
        if not isinstance(kind, AttentionType) or kind not in kinds:
            raise InvalidArgument(
                f"[{function}] kind must be one of AttentionType "
                f"{', '.join(one.name for one in kinds)}, got {kind!r}"
            )
        check_int(function, "layer", layer, 0, self._geometry.num_layers - 1)
        check_has(function, self._geometry, layer, kind)

    def values(
        self,
        function: str,
        layer: int,
        kind: AttentionType,
        values: object,
        num_queries: int,
        kinds: Collection[AttentionType] = (AttentionType.SWA,),
    ) -> None:
        """Refuse what is not ``(queries, width)`` items, or ``(queries, m, width)`` inputs."""
        self.layer(function, layer, kind, kinds)
        head = (num_queries, "m") if kind.is_state else (num_queries,)
        shape = (*head, width_of(self._geometry, layer, kind))
        name = f"{kind.name} of layer {layer}"
        check_tensor(function, name, values, shape, None, self._device)

    def selection(self, layer: int, selection: object, num_queries: int) -> None:
        """Refuse what is no selection of so many queries, or a wider one than top-k."""
        import torch

        self.layer("select", layer, AttentionType.INDEXER_COMPRESS)
        shape, dtypes = (num_queries, "k"), (torch.int32,)
        found = check_tensor("select", "selection", selection, shape, dtypes, self._device)
        if found.shape[1] > self._geometry.top_k:
            raise InvalidArgument(
                f"[select] selection must have at most top-k {self._geometry.top_k} columns, "
                f"got {found.shape[1]}"
            )

    def selected(self, layer: int, selected: object, num_queries: int) -> None:
        """Refuse what is no result of `select`, and one where a layer selects nothing."""
        import torch

        self.layer("attention_indices", layer, AttentionType.SWA)
        ratio = self._geometry.compress_ratios[layer]
        if (selected is not None) != (ratio == 4):
            raise InvalidArgument(
                f"[attention_indices] selected must be given at ratio 4 alone, layer {layer} has "
                f"ratio {ratio}"
            )
        if selected is not None:
            shape, dtypes = (num_queries, "k"), (torch.int32, torch.int64)
            check_tensor("attention_indices", "selected", selected, shape, dtypes, self._device)

    def rows(self, layer: int, kind: AttentionType, rows: object) -> None:
        """Refuse what are no rows to read."""
        import torch

        self.layer("read", layer, kind)
        shape = ("n",) * getattr(rows, "ndim", 1)
        check_tensor("read", "rows", rows, shape, (torch.int32, torch.int64), self._device)


def check_history(
    geometry: DeepSeekV4Geometry, history: DeepseekV4History, max_tokens: int
) -> None:
    """Refuse a history that is not whole, or longer than its request may get.

    Raises
    ------
    InvalidArgument
        Naming the layer, the type and the shape.
    """
    if not isinstance(history, DeepseekV4History) or not isinstance(history.items, Mapping):
        raise InvalidArgument(
            f"[import_history] history must be a DeepseekV4History with a mapping of items, "
            f"got {history!r:.80}"
        )
    check_int("import_history", "tokens", history.tokens, 1)
    if history.tokens > max_tokens:
        raise InvalidArgument(
            f"[import_history] tokens must be at most {max_tokens}, the request's max_tokens, "
            f"got {history.tokens}; add it with more"
        )
    wanted = list(types_of(geometry))
    wrong = [key for key in wanted if key not in history.items]
    wrong += [key for key in history.items if key not in wanted]
    if wrong:
        raise InvalidArgument(
            f"[import_history] items must be of each layer and each of its types, got one too "
            f"many or too few: {_name(wrong[0])}"
        )
    for (layer, kind), rows in history.items.items():
        least, most = _bounds(geometry, history.tokens, layer, kind)
        width = width_of(geometry, layer, kind)
        name = f"{kind.name} of layer {layer}"
        check_tensor("import_history", name, rows, ("n",) * getattr(rows, "ndim", 2))
        if rows.ndim != 2 or rows.shape[1] != width or not least <= len(rows) <= most:
            raise InvalidArgument(
                f"[import_history] {name} must be ({least} to {most}, {width}) for "
                f"{history.tokens} tokens, got {tuple(rows.shape)}"
            )


def _name(key: object) -> str:
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], AttentionType):
        return f"layer {key[0]}, {key[1].name}"
    return repr(key)


def _bounds(
    geometry: DeepSeekV4Geometry, tokens: int, layer: int, kind: AttentionType
) -> tuple[int, int]:
    ratio = geometry.compress_ratios[layer]
    if kind is AttentionType.SWA:
        return min(tokens, geometry.sliding_window - 1), tokens
    if kind.is_state:
        return least_inputs(tokens, ratio), tokens
    return tokens // ratio, tokens // ratio
