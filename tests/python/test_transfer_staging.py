"""Staging in pages of the prefill's size: history arrives in whole pages, repacked as ever."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

from sparse_kvcm._core import InvalidArgument

from receiver_cases import DsaModel, Pair, V4Model
from sparse_kvcm.transfer.attempts import ReceiverOptions
from sparse_kvcm.transfer.target import OffloadTarget
from sparse_kvcm.transfer.transport import Route
from sparse_kvcm.transfer.wire import RequestData, decode_message

CASES = [
    (DsaModel(), (16, 8), (1, 15, 16, 17, 61)),
    (DsaModel(), (8, 16), (9, 61)),
    (DsaModel(kv_dtype="nvfp4"), (16, 8), (61,)),
    (V4Model(), (256, 128), (3, 130, 256, 701)),
    (V4Model(), (128, 256), (130, 701)),
]
NAMES = ["dsa 16 to 8", "dsa 8 to 16", "nvfp4 16 to 8", "v4 256 to 128", "v4 128 to 256"]


@pytest.mark.parametrize(("model", "pages", "lengths"), CASES, ids=NAMES)
def test_history_arrives_in_whole_pages_and_decodes_like_an_imported_one(
    model: Any, pages: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    pair = Pair(model, pages=pages, staging=3, staging_tokens=pages[0])
    receive, pieces = pair.senders[0]._receive, []

    def tapped(peer: str, data: bytes) -> None:
        message = decode_message(data)
        if isinstance(message, RequestData) and message.slice_id > 0:
            projection = pair.senders[0]._ledger.peers[peer].projection
            offer = pair.senders[0]._ledger.offers[message.request_id]
            span = (message.token_begin, message.token_end)
            found = projection.ranges(offer.pages, message.pages, span, message.prompt_tokens)
            whole = span[1] - span[0] == len(message.pages[0].slots) * pages[0]
            pieces.append((whole, len(found[Route("DRAM", "DRAM")]), message.pages[0].slots))
        receive(peer, data)

    pair.senders[0]._receive = tapped  # type: ignore[method-assign]
    for number, tokens in enumerate(lengths):
        pair.prefill(number, tokens)
        pair.ask(number, tokens)
        pair.run_to_the_end()
        assert pair.result(number).reason == ""
        pair.check({number: tokens})
        pair.target_manager.free_request(number)
    pair.end()
    num_buffers = len(pair.target.staging.placed)
    wholes = [(count, len(slots)) for whole, count, slots in pieces if whole]
    assert wholes
    assert all(count <= num_slots * num_buffers for count, num_slots in wholes)


def test_slices_are_counted_in_pages_of_staging() -> None:
    options = ReceiverOptions(slice_pages=2)
    pair = Pair(DsaModel(), pages=(16, 8), staging=2, staging_tokens=16, options=options)
    assert (pair.target.page_tokens, pair.target.num_pages(61)) == (16, 4)
    pair.prefill(1, 61)
    pair.ask(1, 61)
    pair.run_to_the_end()
    pair.check({1: 61})
    pair.end([1])


@pytest.mark.parametrize("tokens", [-8, 6])
def test_staging_pages_that_hold_no_whole_units_are_refused(tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="staging_tokens must be a multiple of 4"):
        OffloadTarget(V4Model().target(128), 3, tokens)
