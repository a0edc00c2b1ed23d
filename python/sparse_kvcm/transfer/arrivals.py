"""What becomes of a slice whose bytes have come: scattered, repacked, ended.

    POSTED -> SCATTERING -> REPACKING -> ENDED
              if bounced    if history

Both run beside the caller: copies on a GPU, threads. Of a request that has failed nothing more
begins, and what runs is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sparse_kvcm.transfer.attempts import Attempt, Slice, SliceStage, Stage
from sparse_kvcm.transfer.bounce import Bounce, bounced_groups
from sparse_kvcm.transfer.page_table import PeerDataError
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.target import OffloadTarget
from sparse_kvcm.transfer.transport import Region
from sparse_kvcm.transfer.wire import PageList, TransferGroup


class Arrivals:
    """Slices of a receiver from their results to their ends.

    Parameters
    ----------
    target : OffloadTarget
    bounce : Bounce or None
        Where small pages of the GPU arrive side by side.
    num_workers : int
        Threads that repack.
    """

    def __init__(self, target: OffloadTarget, bounce: Bounce | None, num_workers: int) -> None:
        self._target = target
        self._bounce = bounce
        self._num_workers = num_workers
        self._workers = ThreadPoolExecutor(num_workers, "repack")

    @property
    def regions(self) -> list[Region]:
        """What peers write to."""
        regions = self._target.table.regions()
        return [*regions, self._bounce.region] if self._bounce else regions

    @property
    def bounce_bytes(self) -> int:
        """Of the bounce region, in use."""
        return self._bounce.bytes_in_use if self._bounce else 0

    def expect(
        self, attempt: Attempt, one: Slice, pages: Sequence[PageList], projection: Projection
    ) -> None:
        """Take room in the bounce region for a slice that is asked for, if it is worth it."""
        if self._bounce is None:
            return
        try:
            places = projection.places(pages, one.tokens, attempt.prompt_tokens)
        except PeerDataError:  # as the sender will say
            return
        one.landing = self._bounce.land(places)

    def take(self, attempt: Attempt, one: Slice, groups: Sequence[TransferGroup]) -> str:
        """A slice has come; what is wrong with it, or nothing."""
        num_bounced, fault = bounced_groups(groups, one.landing)
        if fault or attempt.stage is Stage.DRAINING:
            self.end(one)
        elif num_bounced:
            assert one.landing is not None  # or it would be a fault
            try:
                one.scatter, one.stage = one.landing.scatter(), SliceStage.SCATTERING
            except Exception as error:  # nothing moves after it
                self.end(one)
                return f"scattering failed: {error}"
        else:
            self._repack(attempt, one)
        return fault

    def progress(self, attempt: Attempt) -> tuple[int, str]:
        """Look at a request's slices: how many have ended, and the first fault, or nothing."""
        fault, num_ended = "", 0
        for one in list(attempt.in_stage(SliceStage.SCATTERING)):
            assert one.scatter is not None  # in this stage
            try:
                if one.scatter.query():
                    self._repack(attempt, one)
            except Exception as error:  # the device's, on which nothing moves any more
                self.end(one)
                fault = fault or f"scattering failed: {error}"
            num_ended += one.stage is SliceStage.ENDED
        for one in list(attempt.in_stage(SliceStage.REPACKING)):
            if all(job.done() for job in one.jobs):
                broken = next((e for job in one.jobs if (e := job.exception())), None)
                fault = fault or (f"repacking failed: {broken}" if broken else "")
                self.end(one)
                num_ended += 1
        return num_ended, fault

    def end(self, one: Slice) -> None:
        """Nobody writes to a slice or reads it any more."""
        one.stage = SliceStage.ENDED
        self._target.staging.give_back(one.slots)
        if one.landing is not None:
            one.landing.end()
        one.slots, one.landing, one.scatter = [], None, None

    def close(self) -> None:
        """Wait for the threads."""
        self._workers.shutdown(wait=True)

    def _repack(self, attempt: Attempt, one: Slice) -> None:
        """What has arrived lies where it was sent to: history goes on to where it belongs."""
        if not one.num_pages or attempt.stage is Stage.DRAINING:
            self.end(one)
            return
        one.stage = SliceStage.REPACKING
        jobs = self._target.repack_jobs(attempt.key, one.first_page, one.slots, self._num_workers)
        one.jobs = [self._workers.submit(job) for job in jobs]
