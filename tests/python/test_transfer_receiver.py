"""Requests that arrive from a prefill can be decoded, and what fails gives everything back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

import msgspec
from sparse_kvcm._core import InvalidArgument

from receiver_cases import DsaModel, Pair, V4Model
from sparse_kvcm.sizing import HostMemory, HostTerm, Workload, size_host
from sparse_kvcm.transfer.attempts import ReceiverOptions, ReceiverUse, plan_slices
from sparse_kvcm.transfer.page_table import PeerDataError
from sparse_kvcm.transfer.target import NoRoomError
from sparse_kvcm.transfer.transport import TransferState
from sparse_kvcm.transfer.wire import decode_card

MODELS = {"dsa": DsaModel(), "v4": V4Model()}
PROMPT = {"dsa": 61, "v4": 701}


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def hold(pair: Pair) -> None:
    """From now on transfers end when they are finished by hand."""

    def policy(transfer: Any) -> None:
        transfer.polls_left = None

    pair.network.policy = policy


@pytest.mark.parametrize(
    ("model", "pages", "lengths"),
    [
        (DsaModel(), (8, 8), (1, 7, 8, 9, 61, 192)),
        (DsaModel(), (16, 8), (1, 16, 17, 61)),
        (DsaModel(), (8, 16), (9, 61)),
        (DsaModel(kv_dtype="nvfp4"), (8, 8), (61,)),
        (DsaModel(kv_dtype="fp8"), (8, 8), (61,)),
        (V4Model(), (128, 128), (1, 3, 4, 127, 128, 129, 701)),
        (V4Model(), (256, 128), (130, 701)),
        (V4Model(), (128, 256), (130, 701)),
    ],
    ids=[
        "dsa",
        "dsa 16 to 8",
        "dsa 8 to 16",
        "nvfp4",
        "fp8",
        "v4",
        "v4 256 to 128",
        "v4 128 to 256",
    ],
)
def test_a_received_request_decodes_like_an_imported_one(
    model: Any, pages: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    pair = Pair(model, pages=pages)
    for number, tokens in enumerate(lengths):
        pair.prefill(number, tokens)
        pair.ask(number, tokens)
        pair.run_to_the_end()
        assert pair.result(number).reason == ""
        pair.check({number: tokens})
        pair.target_manager.free_request(number)
    assert [one.status for one in pair.outcomes] == ["done"] * len(lengths)
    pair.end()


def test_several_requests_at_once_share_a_ring_smaller_than_any_of_them(kind: str) -> None:
    pair = Pair(MODELS[kind], staging=2)
    tokens = PROMPT[kind]
    lengths = {1: tokens, 2: tokens - 5, 3: tokens - 13}
    for request, length in lengths.items():
        pair.ask(request, length)
        pair.prefill(request, length)
    pair.run_to_the_end()
    assert [one.reason for one in pair.results] == [""] * 3
    pair.check(lengths)
    pair.end(lengths)


def test_nobody_can_decode_a_request_before_all_of_it_is_there(kind: str) -> None:
    pair = Pair(MODELS[kind])
    hold(pair)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run()
    with pytest.raises(Exception, match="receiving|must be"):
        pair.check({1: PROMPT[kind]})
    assert pair.receiver.use.admitted == 1


def test_a_request_is_asked_for_only_once_its_pages_are_ready(kind: str) -> None:
    pair = Pair(MODELS[kind])
    ready = False

    class Event:
        def query(self) -> bool:
            return ready

    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.target._admitted[1].ready = Event()
    pair.run()
    assert pair.receiver.use.posted == 0
    ready = True
    pair.run()
    assert pair.receiver.use.posted > 0
    pair.run_to_the_end()
    pair.end([1])


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        ("host pages", {"host_pages": 10}),
        ("arena lease", {"arena_pages": "one"}),
        ("staging", {"staging": 2}),
        ("transfers in flight", {"options": ReceiverOptions(slice_pages=2, max_in_flight=1)}),
    ],
)
def test_who_finds_no_room_waits_and_the_limit_that_binds_is_named(
    limit: str, changes: dict[str, Any], kind: str
) -> None:
    changes = {"staging": 16} | changes
    if changes.get("arena_pages") == "one":
        changes["arena_pages"] = 5 if kind == "dsa" else 2
    if limit == "host pages" and kind == "v4":
        changes["host_pages"] = 8
    pair = Pair(MODELS[kind], **changes)
    tokens = PROMPT[kind]
    hold(pair)
    for request in (1, 2):
        pair.prefill(request, tokens)
        pair.ask(request, tokens)
        pair.run()
    assert pair.receiver.waiting == {"2": limit}
    assert pair.receiver.use.queued == 1
    pair.network.policy = lambda transfer: None
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_until(lambda: len(pair.results) == 1)
    pair.check({1: tokens})
    pair.target_manager.free_request(1)
    pair.run_to_the_end()
    assert pair.result(2).reason == ""
    pair.check({2: tokens})
    pair.end([2])


def test_without_a_queue_who_finds_no_room_is_refused(kind: str) -> None:
    pair = Pair(MODELS[kind], options=ReceiverOptions(slice_pages=2, max_queued=0, max_in_flight=1))
    pair.ask(1, PROMPT[kind])
    taken = pair.occupancy()
    with pytest.raises(NoRoomError, match="1 are on their way") as refused:
        pair.ask(2, PROMPT[kind])
    assert refused.value.limit == "transfers in flight"
    assert pair.occupancy() == taken


def test_what_would_never_fit_is_refused_and_takes_nothing(kind: str) -> None:
    pair = Pair(MODELS[kind], host_pages=2)
    tokens = PROMPT[kind]
    for asked, most in ((tokens, tokens), (0, 5), (6, 5), (1, 10 * pair.model.max_tokens)):
        with pytest.raises(InvalidArgument):
            pair.receiver.request("prefill0", "1", 1, asked, most)
    pair.end()


def test_ids_that_are_in_use_and_unknown_peers_are_refused(kind: str) -> None:
    pair = Pair(MODELS[kind])
    pair.ask(1, PROMPT[kind])
    with pytest.raises(InvalidArgument, match="request_id '1' must be a new one"):
        pair.receiver.request("prefill0", "1", 2, 5, 5)
    with pytest.raises(InvalidArgument, match="key must be one that is not in use"):
        pair.receiver.request("prefill0", "2", 1, 5, 5)
    with pytest.raises(InvalidArgument, match="peer must be one that was added"):
        pair.receiver.request("nobody", "2", 2, 5, 5)
    assert not pair.receiver.cancel("unknown")
    pair.receiver.cancel("1")
    pair.run_to_the_end()
    pair.end()


def test_a_card_that_is_not_a_prefill_s_is_refused_and_changes_nothing(kind: str) -> None:
    pair = Pair(MODELS[kind])
    good = decode_card(pair.senders[0].card())
    other = Pair(MODELS["v4" if kind == "dsa" else "dsa"]).senders[0].card()
    for bad, words in (
        (msgspec.msgpack.encode(msgspec.structs.replace(good, transport="nixl")), "transport"),
        (msgspec.msgpack.encode(msgspec.structs.replace(good, name="prefill7")), "must be of"),
        (other, "a buffer of the target"),
    ):
        with pytest.raises(PeerDataError, match=words):
            pair.receiver.add_peer(bad)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run_to_the_end()
    assert pair.result(1).reason == ""
    pair.end([1])


def test_a_canceled_request_gives_its_pages_back_when_its_last_byte_has_landed(kind: str) -> None:
    pair = Pair(MODELS[kind])
    pair.prefill(2, PROMPT[kind])
    pair.ask(2, PROMPT[kind])
    pair.run_to_the_end()
    hold(pair)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run()
    pair.run()
    assert pair.receiver.cancel("1", "the user left")
    pair.results += pair.receiver.poll()
    assert pair.result(1).reason == "the user left"  # at once
    taken = pair.occupancy()
    pair.run()
    assert pair.occupancy() == taken  # bytes may still land
    assert pair.receiver.use.draining == 1
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end()
    pair.check({2: PROMPT[kind]})
    pair.end([2])


def test_a_canceled_request_may_be_asked_for_again_while_the_first_try_drains(kind: str) -> None:
    pair = Pair(MODELS[kind], num_senders=2)
    hold(pair)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run()
    pair.receiver.cancel("1")
    pair.network.policy = lambda transfer: None
    pair.receiver.request("prefill1", "1", 7, PROMPT[kind], PROMPT[kind])
    manager, source = pair.sources[1]
    pair.model.fill(manager, 7, PROMPT[kind])
    pair.senders[1].offer("1", PROMPT[kind], source.pages(7))
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end()
    assert [(one.key, bool(one.reason)) for one in pair.results] == [(1, True), (7, False)]
    pair.end([7])


def test_a_peer_that_dies_takes_only_its_own_requests_along(kind: str) -> None:
    pair = Pair(MODELS[kind], num_senders=2, staging=12)
    hold(pair)
    tokens = PROMPT[kind]
    for request, number in ((1, 0), (2, 1)):
        pair.prefill(request, tokens, number)
        pair.ask(request, tokens, number)
    pair.run()
    pair.run()
    pair.network.kill("prefill0")
    pair.network.transfers = {
        index: one for index, one in pair.network.transfers.items() if one.source != "prefill0"
    }
    pair.receiver.remove_peer("prefill0", "its process ended")
    pair.network.policy = lambda transfer: None
    for index in list(pair.network.transfers):
        pair.network.finish(index)
    pair.run_to_the_end(senders=[1])
    assert pair.result(1).reason == "peer prefill0 is gone: its process ended"
    assert pair.result(2).reason == ""
    pair.check({2: tokens})
    pair.end([2])


def test_a_peer_that_cannot_be_reached_is_found_out_by_the_next_message(kind: str) -> None:
    pair = Pair(MODELS[kind])
    pair.network.kill("prefill0")
    pair.ask(1, PROMPT[kind])
    pair.results += pair.receiver.poll()
    assert "prefill0 is gone" in pair.result(1).reason
    pair.end()


def test_who_waits_for_room_too_long_is_told_what_lacks(kind: str) -> None:
    pair = Pair(MODELS[kind], options=ReceiverOptions(slice_pages=2, max_in_flight=1))
    pair.ask(1, PROMPT[kind])
    pair.ask(2, PROMPT[kind])
    pair.now = 121.0
    pair.results += pair.receiver.poll()
    assert pair.result(2).reason == "no room (transfers in flight) within 120 s"


def test_a_slice_that_fails_fails_its_request_after_the_others_have_ended(kind: str) -> None:
    pair = Pair(MODELS[kind])
    seen: list[Any] = []

    def policy(transfer: Any) -> None:
        seen.append(transfer)
        transfer.fails = len(seen) == 2
        transfer.polls_left = 3 * len(seen)

    pair.network.policy = policy
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run_to_the_end()
    assert "peer prefill0 failed" in pair.result(1).reason
    assert all(one.state is not TransferState.PENDING for one in seen)
    pair.end()


def test_a_repack_that_fails_fails_its_request_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(MODELS[kind])
    tokens = PROMPT[kind]
    make = pair.target.repack_jobs

    def broken(key: int, *arguments: Any) -> list[Any]:
        def fail() -> None:
            raise RuntimeError("a fault")

        return [*make(key, *arguments), fail] if key == 1 else make(key, *arguments)

    monkeypatch.setattr(pair.target, "repack_jobs", broken)
    for request in (1, 2):
        pair.prefill(request, tokens)
        pair.ask(request, tokens)
    pair.run_to_the_end()
    assert pair.result(1).reason == "repacking failed: a fault"
    assert pair.result(2).reason == ""
    pair.check({2: tokens})
    pair.end([2])


def test_slices_cover_every_token_and_page_once() -> None:
    for tokens, pages in ((1, 1), (8, 1), (9, 2), (61, 8), (3, 0)):
        first, *others = plan_slices(tokens, 8, pages, 3)
        assert (first.num_pages, first.tokens) == (0, (0, tokens))
        covered = [
            page for one in others for page in range(one.first_page, one.first_page + one.num_pages)
        ]
        assert covered == list(range(pages))
        bounds = [one.tokens for one in others]
        assert bounds == sorted(bounds)
        if others:
            assert (bounds[0][0], bounds[-1][1]) == (0, tokens)


def test_closing_gives_everything_up(kind: str) -> None:
    pair = Pair(MODELS[kind])
    hold(pair)
    pair.prefill(1, PROMPT[kind])
    pair.ask(1, PROMPT[kind])
    pair.run()
    pair.receiver.close(0)
    assert pair.receiver.use == ReceiverUse()
    assert pair.occupancy() == pair.fresh
    pair.receiver.close(0)  # again


def test_staging_takes_the_bytes_that_sizing_takes_from_the_history(kind: str) -> None:
    pair = Pair(MODELS[kind], staging=5)
    config = pair.target_manager.config
    fields = {"kv_dtype": config.kv_dtype, "index_dtype": config.index_dtype}
    fields |= {"tokens_per_block": MODELS[kind].page, "gpu_cache_factor": 2.0}
    without = Workload(config.geometry, 900, **fields)
    staged = Workload(config.geometry, 900, **fields, staging_slots=5)
    memory = HostMemory({HostTerm.AVAILABLE: 1 << 34})
    sizes = [size_host(one, 2, memory, host_history_size=1 << 30) for one in (without, staged)]
    assert sizes[1].staging - sizes[0].staging == pair.target.staging.num_bytes
    assert sizes[1].total_bytes <= 1 << 30
    assert sizes[1].pages < sizes[0].pages
