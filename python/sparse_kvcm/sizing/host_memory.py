"""How much host memory this rank may pin, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kvcm._core import HostLimits, InvalidArgument, read_host_limits

MEMLOCK_SHARE = 0.8  # the engine pins other memory too
AUTOMATIC_SHARE = 0.5  # of a rank's part of the machine: page cache and processes need some


@dataclass(frozen=True)
class HostMemory:
    """Host memory that may still be pinned.

    Attributes
    ----------
    terms : dict
        What each limit leaves, in bytes, by its name: "MemAvailable", "control group <path>",
        "0.8 x RLIMIT_MEMLOCK". Limits that are not there have no term.
    local_ranks : int
        Ranks that share the machine.
    """

    terms: dict[str, int]
    local_ranks: int = 1

    @property
    def effective(self) -> int:
        """Bytes for all ranks of this machine together: the least term."""
        return min(self.terms.values(), default=0)

    @property
    def binding(self) -> str:
        """The name of the least term."""
        return min(self.terms, key=self.terms.__getitem__, default="no limit can be read")

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
        terms = {name: max(0, left - taken) for name, left in self.terms.items()}
        return HostMemory(terms, self.local_ranks)

    @property
    def advice(self) -> str:
        """What raises the least term."""
        if "MEMLOCK" in self.binding:
            return "raise it with ulimit -l (Docker: --ulimit memlock=-1)"
        if self.binding.startswith("control group"):
            return "raise the memory limit of the group or container"
        return "free memory or use a machine with more"


def host_memory(local_ranks: int = 1, *, limits: HostLimits | None = None) -> HostMemory:
    """Measure what may be pinned.

    Parameters
    ----------
    local_ranks : int
        Ranks that share this machine.
    limits : HostLimits, optional
        What to go by; read from the system without it.

    Raises
    ------
    InvalidArgument
        If ``local_ranks`` is less than 1.
    """
    if local_ranks < 1:
        raise InvalidArgument(f"[host_memory] local_ranks must be >= 1, got {local_ranks}")
    limits = read_host_limits() if limits is None else limits
    terms: dict[str, int] = {}
    if limits.available is not None:
        terms["MemAvailable"] = limits.available
    if limits.group_left is not None:
        terms[f"control group {limits.group}"] = limits.group_left
    if limits.memlock is not None:
        terms["0.8 x RLIMIT_MEMLOCK"] = int(limits.memlock * MEMLOCK_SHARE)
    return HostMemory(terms, local_ranks)


def effective_available_host_memory() -> int:
    """Bytes that the processes of this machine may still pin together."""
    return host_memory().effective
