"""Which attention runs on a layer. One that cannot read an arena is never chosen for one.

Rows of an arena and page indices of a pool are both int32: what reads them as the wrong kind gives
other tokens, not an error. So an implementation says what it reads, and is called through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.attention.pointers import AttentionBase


@dataclass(frozen=True)
class AttentionImplementation:
    """One implementation of sparse attention.

    Attributes
    ----------
    name : str
    attend : callable
        Called with an `AttentionBase` and whatever the engine gives.
    reads_arena_rows : bool
        Whether it takes rows of an arena, as of `sparse_arena_rows`, beside those of pools.
    record_layouts : frozenset of str, optional
        Names of the `RecordLayout` that it reads, such as "dsa/fp8"; None: all.
    """

    name: str
    attend: Callable[..., Any]
    reads_arena_rows: bool
    record_layouts: frozenset[str] | None = None

    def refusal(self, base: AttentionBase) -> str | None:
        """Why it cannot read a layer; None if it can."""
        if base.is_arena and not self.reads_arena_rows:
            return "does not read arena rows, and the layer is offloaded"
        if self.record_layouts is not None and base.layout.name not in self.record_layouts:
            return f"reads {', '.join(sorted(self.record_layouts))}, not {base.layout.name}"
        return None

    def __call__(self, base: AttentionBase, *args: Any, **kwargs: Any) -> Any:
        """Attend to rows of `base`.

        Raises
        ------
        InvalidArgument
            If it cannot read them.
        """
        why = self.refusal(base)
        if why is not None:
            raise InvalidArgument(
                f"[{self.name}] base must be one that it can read: it {why}; let "
                "AttentionRegistry.choose pick the implementation"
            )
        return self.attend(base, *args, **kwargs)


class AttentionRegistry:
    """Implementations in order of preference.

    Parameters
    ----------
    implementations : iterable of AttentionImplementation
    """

    def __init__(self, implementations: Iterable[AttentionImplementation] = ()) -> None:
        self._known: dict[str, AttentionImplementation] = {}
        for one in implementations:
            self.register(one)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order of preference."""
        return tuple(self._known)

    def register(self, implementation: AttentionImplementation) -> None:
        """Add one behind the others.

        Raises
        ------
        InvalidArgument
            If the name is taken, or it does not say as a bool whether it reads arena rows.
        """
        if implementation.name in self._known:
            raise InvalidArgument(
                f"[AttentionRegistry] name must be a new one, got {implementation.name!r}"
            )
        if not isinstance(implementation.reads_arena_rows, bool):
            raise InvalidArgument(
                f"[AttentionRegistry] reads_arena_rows of {implementation.name} must be a bool, "
                f"got {implementation.reads_arena_rows!r}"
            )
        self._known[implementation.name] = implementation

    def choose(self, base: AttentionBase, name: str | None = None) -> AttentionImplementation:
        """The first that can read a layer, or the one that is asked for.

        Raises
        ------
        InvalidArgument
            If none can, or the named one cannot, saying why. Nothing else is chosen in its place.
        """
        if name is not None and name not in self._known:
            raise InvalidArgument(
                f"[AttentionRegistry] name must be one of {', '.join(self._known)}, got {name!r}"
            )
        wanted = list(self._known.values()) if name is None else [self._known[name]]
        for one in wanted:
            if one.refusal(base) is None:
                return one
        reasons = "; ".join(f"{one.name} {one.refusal(base)}" for one in wanted)
        raise InvalidArgument(
            f"[AttentionRegistry] no implementation can read the layer: {reasons or 'none known'}"
        )
