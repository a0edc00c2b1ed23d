"""Messages, cards and ranks: they come back as they were, and bad ones are refused."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kvcm import InvalidArgument
from sparse_kvcm.transfer.bounce import describe
from sparse_kvcm.transfer.page_table import PeerDataError
from sparse_kvcm.transfer.ranks import RankInfo, sending_rank, sends_to
from sparse_kvcm.transfer.transport import Route
from sparse_kvcm.transfer.wire import (
    MAX_MESSAGE_BYTES,
    BounceGrant,
    Cancel,
    PageList,
    Ping,
    Pong,
    RequestData,
    SliceResult,
    TransferGroup,
    decode_card,
    decode_message,
    encode_message,
    make_card,
)
from transfer_cases import HISTORY, Side, project

REQUEST = RequestData("r", 3, 1, 4, 8, 24, 30, (PageList.of(0, 1, [5, -1, 7]),), None)
GROUP = TransferGroup("VRAM", "VRAM", 1, 1024, 1 << 20)
RESULT = SliceResult("r", 3, 1, "done", 2, "", (GROUP, TransferGroup("VRAM", "DRAM", 3, 99)))
CARD = make_card("a", "nixl", RankInfo(2, 3, "attention_dp"), b"md", Side([HISTORY], 8).table)


@pytest.mark.parametrize("message", [REQUEST, RESULT, Cancel("r", 3, "enough"), Ping(), Pong()])
def test_a_message_comes_back_as_it_was(message) -> None:
    assert decode_message(encode_message(message)) == message


def test_slots_come_back_as_an_array() -> None:
    assert REQUEST.pages[0].slots.tolist() == [5, -1, 7]


def test_a_card_brings_rank_and_table() -> None:
    card = decode_card(CARD)
    assert card.rank == RankInfo(2, 3, "attention_dp")
    assert card.page_table().tokens_per_block == 8


@pytest.mark.parametrize(
    "change",
    [
        {"token_begin": 25},
        {"token_end": 31},
        {"prompt_tokens": -1},
        {"slice_id": 4},
        {"num_slices": 0},
        {"request_id": ""},
        {"request_id": "x" * 129},
        {"attempt": 1 << 62},
        {"pages": ()},
        {"pages": (PageList(0, 0, b""), PageList(0, 1, b""))},
        {"pages": (PageList(0, 0, b"abc"),)},
        {"bounce": BounceGrant((1 << 63) - 1, 4096)},
    ],
)
def test_a_request_at_odds_with_itself_is_refused(change: dict) -> None:
    with pytest.raises(PeerDataError):
        decode_message(encode_message(msgspec.structs.replace(REQUEST, **change)))


@pytest.mark.parametrize("types", [("VRAM", "DRAM"), ("DRAM", "VRAM"), ("DRAM", "DRAM")])
def test_a_group_that_touches_a_host_has_no_bounce(types: tuple[str, str]) -> None:
    bad = TransferGroup(*types, 1, 1024, 1 << 20)
    with pytest.raises(PeerDataError, match="bounce"):
        decode_message(encode_message(msgspec.structs.replace(RESULT, transfer_groups=(bad,))))
    (ranges,) = project(Side([HISTORY], 8), Side([HISTORY], 8), 8).values()
    assert describe(Route(*types), ranges).bounce_dst_base is None
    with pytest.raises(InvalidArgument, match="bounce_dst_base"):
        describe(Route(*types), ranges, 1 << 20)


@pytest.mark.parametrize("change", [{"bounce_dst_base": 0}, {"num_ranges": -1}, {"num_bytes": -1}])
def test_a_result_at_odds_with_itself_is_refused(change: dict) -> None:
    bad = msgspec.structs.replace(GROUP, **change)
    with pytest.raises(PeerDataError):
        decode_message(encode_message(msgspec.structs.replace(RESULT, transfer_groups=(bad,))))


def test_a_message_that_is_too_long_is_refused() -> None:
    with pytest.raises(PeerDataError, match="at most"):
        decode_message(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"table": b"x"}, {"rank": RankInfo(3, 3)}, {"name": ""}]
)
def test_a_bad_card_is_refused(change: dict) -> None:
    card = msgspec.structs.replace(decode_card(CARD), **change)
    with pytest.raises(PeerDataError):
        decode_card(msgspec.msgpack.encode(card))


def test_a_card_of_another_version_says_so_whatever_fields_it_has() -> None:
    fields = msgspec.msgpack.decode(CARD) | {"version": 2, "more": 1}
    del fields["rank"]
    with pytest.raises(PeerDataError, match="version must be 1, got 2; both sides need"):
        decode_card(msgspec.msgpack.encode(fields))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_refused(data: bytes) -> None:
    for read in (decode_message, decode_card):
        with pytest.raises(PeerDataError):
            read(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([REQUEST, RESULT, Cancel("r", 3, "")]), st.data())
def test_broken_messages_are_refused_or_hold_together(message, data: st.DataObject) -> None:
    raw = bytearray(encode_message(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode_message(bytes(raw))
    except PeerDataError:
        return
    if isinstance(read, RequestData):
        assert 0 <= read.token_begin <= read.token_end <= read.prompt_tokens
        assert all(one.slots.ndim == 1 for one in read.pages)
    if isinstance(read, SliceResult):
        bounced = [one for one in read.transfer_groups if one.bounce_dst_base is not None]
        assert all((one.source, one.target) == ("VRAM", "VRAM") for one in bounced)


def test_every_target_has_one_sender_and_the_load_is_even() -> None:
    for sources in range(1, 17):
        for targets in range(1, 17):
            senders = []
            for target in range(targets):
                who = [
                    source
                    for source in range(sources)
                    if sends_to(
                        RankInfo(source, sources), RankInfo(target, targets, "attention_dp")
                    )
                ]
                assert who == [sending_rank(sources, targets, target)]
                senders += who
            assert max(Counter(senders).values()) == -(-targets // sources)


def test_a_source_with_attention_dp_sends_what_it_has() -> None:
    source = RankInfo(1, 4, "attention_dp")
    assert all(sends_to(source, RankInfo(target, 3)) for target in range(3))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_number_is_refused(rank: int) -> None:
    with pytest.raises(InvalidArgument, match="rank must be in"):
        sends_to(RankInfo(rank, 2), RankInfo())
