"""How much host memory this rank may pin, term by term."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from sparse_kvcm._core import HostLimits, InvalidArgument, read_host_limits

MEMLOCK_SHARE = 0.8  # the engine pins other memory too
AUTOMATIC_SHARE = 0.5  # of a rank's part of the machine: page cache and processes need some


class HostTerm(Enum):
    """A limit of host memory."""

    AVAILABLE = "MemAvailable"
    GROUP = "control group"
    MEMLOCK = "0.8 x RLIMIT_MEMLOCK"


_ADVICE = {
    HostTerm.AVAILABLE: "free memory or use a machine with more",
    HostTerm.GROUP: "raise the memory limit of the group or container",
    HostTerm.MEMLOCK: "raise it with ulimit -l (Docker: --ulimit memlock=-1)",
    None: "mount /proc",
}


@dataclass(frozen=True)
class HostMemory:
    """Host memory that may still be pinned.

    Attributes
    ----------
    terms : dict
        What each limit leaves, in bytes. Limits that are not there have no term.
    local_ranks : int
        Ranks that share the machine.
    group : str
        Path of the control group that has the term.
    """

    terms: dict[HostTerm, int]
    local_ranks: int = 1
    group: str = ""

    def __post_init__(self) -> None:
        ranks = self.local_ranks
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise InvalidArgument(
                f"[HostMemory] local_ranks must be an integer >= 1, got {ranks!r}"
            )
        for term, left in self.terms.items():
            if not isinstance(term, HostTerm):
                raise InvalidArgument(f"[HostMemory] terms must be by HostTerm, got {term!r}")
            if isinstance(left, bool) or not isinstance(left, int) or left < 0:
                raise InvalidArgument(
                    f"[HostMemory] terms[{term.name}] must be an integer >= 0, got {left!r}"
                )

    @property
    def effective(self) -> int:
        """Bytes for all ranks of this machine together: the least term."""
        return min(self.terms.values(), default=0)

    @property
    def binding(self) -> HostTerm | None:
        """The least term; None if no limit can be read."""
        return min(self.terms, key=self.terms.__getitem__, default=None)

    @property
    def per_rank(self) -> int:
        """The most that a rank may pin when it is told to."""
        return self.effective // self.local_ranks

    @property
    def automatic(self) -> int:
        """The most that a rank pins of itself."""
        return int(self.per_rank * AUTOMATIC_SHARE)

    def without(self, rank_bytes: int) -> HostMemory:
        """What is left when each rank pins so many bytes for something else."""
        taken = rank_bytes * self.local_ranks
        return replace(
            self, terms={term: max(0, left - taken) for term, left in self.terms.items()}
        )

    def name(self, term: HostTerm) -> str:
        """The term in words, a group with its path."""
        return f"{term.value} {self.group}" if term is HostTerm.GROUP else term.value

    @property
    def limit(self) -> str:
        """The least term in words."""
        return "no limit that can be read" if self.binding is None else self.name(self.binding)

    @property
    def advice(self) -> str:
        """What raises the least term."""
        return _ADVICE[self.binding]


def host_memory(local_ranks: int = 1, *, limits: HostLimits | None = None) -> HostMemory:
    """Measure what may be pinned.

    Parameters
    ----------
    local_ranks : int
        Ranks that share this machine.
    limits : HostLimits, optional
        What to go by; read from the system without it.
    """
    limits = read_host_limits() if limits is None else limits
    found = {
        HostTerm.AVAILABLE: limits.available,
        HostTerm.GROUP: limits.group_left,
        HostTerm.MEMLOCK: None if limits.memlock is None else int(limits.memlock * MEMLOCK_SHARE),
    }
    terms = {term: max(0, left) for term, left in found.items() if left is not None}
    return HostMemory(terms, local_ranks, limits.group)


def effective_available_host_memory() -> int:
    """Bytes that the processes of this machine may still pin together."""
    return host_memory().effective
