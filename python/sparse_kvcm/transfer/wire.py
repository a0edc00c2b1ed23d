"""What sender and receiver say to each other, and the card by which they meet.

    receiver -> sender   RequestData   write these tokens into these pages of mine
                         Cancel        nobody wants them any more
                         Ping          are you there?
    sender -> receiver   SliceResult   done, or failed with a reason: once for each RequestData
                         Pong          to each Ping

A request comes in `num_slices` slices, in any order, each with its own range of tokens and pages:
so a receiver with little staging asks for as much at a time as it has room for, and a prefill in
chunks answers each slice as soon as its tokens are computed. A result echoes request, attempt and
slice. The pages of a slice belong to the transfer from the moment the RequestData is sent until its
SliceResult arrives, or the peer is gone for good.

`attempt` is the receiver's: new for every try of a request, so that a late result of an earlier one
is recognised, and dropped.

msgpack of a schema with a version, never pickle. `decode_*` check each field; what fields
say about pages and tables is checked by who has the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.page_table import (
    SCHEMA_VERSION,
    AnyVersion,
    PageTable,
    PeerDataError,
    Struct,
    decode_table,
    encode_table,
)
from sparse_kvcm.transfer.ranks import RankInfo, check_rank
from sparse_kvcm.transfer.transport import MemoryType

MAX_MESSAGE_BYTES = 16 << 20
MAX_REASON = 2000
MAX_TOKENS = 1 << 31

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Attempt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Slice = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Slices = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Packed = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]


class PageList(Struct, frozen=True):
    """Pages [first_page, first_page + n) of a request in one layer group.

    Attributes
    ----------
    layer_group : int
        Of the table of the side whose pages these are.
    first_page : int
        Begins at token first_page * tokens_per_block, its layer group's.
    packed : bytes
        n slots, int32 little-endian; -1 = no page (stale).
    """

    layer_group: _Index
    first_page: _Index
    packed: _Packed

    @classmethod
    def of(cls, layer_group: int, first_page: int, slots: Sequence[int] | np.ndarray) -> PageList:
        """From slots, any integers that fit 32 bits.

        Raises
        ------
        InvalidArgument
            For anything else, which no peer would take either.
        """
        array = np.asarray(slots)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise InvalidArgument(
                f"[PageList.of] slots must be integers in a row, got {array.dtype} of shape "
                f"{array.shape}"
            )
        if len(array) and not -(1 << 31) <= int(array.min()) <= int(array.max()) < 1 << 31:
            raise InvalidArgument(
                f"[PageList.of] slots must be of 32 bits, got {array.min()} to {array.max()}"
            )
        one = cls(layer_group, first_page, array.astype("<i4").tobytes())
        check_page_list("PageList.of", one)
        return one

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """Slots, int32 (n,), read-only."""
        return np.frombuffer(self.packed, "<i4")


def check_page_list(function: str, one: PageList) -> None:
    """Refuse what no peer would take; of a list of ours nobody else looks at the types.

    Raises
    ------
    InvalidArgument
    """
    for name in ("layer_group", "first_page"):
        value = getattr(one, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise InvalidArgument(
                f"[{function}] {name} must be an int in [0, 2**31), got {value!r}"
            )
    if not isinstance(one.packed, bytes) or len(one.packed) % 4:
        raise InvalidArgument(f"[{function}] packed must be bytes, 4 for each slot")


class BounceGrant(Struct, frozen=True):
    """Registered VRAM of the receiver in which small pages may land side by side."""

    address: _Address
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class RequestData(Struct, frozen=True, tag="request_data"):
    """Write tokens [token_begin, token_end) of a request into these pages.

    Attributes
    ----------
    prompt_tokens : int
        Tokens of the whole request; windows are trimmed by it. The same in all slices.
    pages : tuple of PageList
        Of the receiver; each layer group once at most. Every buffer of the groups named is sent.
    bounce : BounceGrant, optional
        For VRAM -> VRAM; not shared with another slice that has no result yet.
    """

    request_id: _Id
    attempt: _Attempt
    slice_id: _Slice
    num_slices: _Slices
    token_begin: _Tokens
    token_end: _Tokens
    prompt_tokens: _Tokens
    pages: Annotated[tuple[PageList, ...], msgspec.Meta(min_length=1, max_length=1024)]
    bounce: BounceGrant | None = None


class TransferGroup(Struct, frozen=True):
    """Writes of a slice that have one source and one target type.

    Attributes
    ----------
    num_ranges, num_bytes : int
        What the engine was given.
    bounce_dst_base : int or None
        Where the bytes lie on the target, side by side, if they do not lie in their pages yet: in
        the order of `Projection.places`. Always None where DRAM is on either side.
    """

    source: MemoryType
    target: MemoryType
    num_ranges: _Index
    num_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    bounce_dst_base: _Address | None = None


class SliceResult(Struct, frozen=True, tag="slice_result"):
    """What became of a RequestData. All of its bytes have landed, or none will move any more.

    Attributes
    ----------
    rank : int
        Of the source.
    reason : str
        Why it failed; empty if it is done.
    transfer_groups : tuple of TransferGroup
        What was sent; empty if it failed, or nothing was to be sent.
    """

    request_id: _Id
    attempt: _Attempt
    slice_id: _Slice
    status: Literal["done", "failed"]
    rank: _Index = 0
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    transfer_groups: Annotated[tuple[TransferGroup, ...], msgspec.Meta(max_length=64)] = ()


class Cancel(Struct, frozen=True, tag="cancel"):
    """The receiver gives an attempt up. Slices that have no result yet still get one."""

    request_id: _Id
    attempt: _Attempt
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class Ping(Struct, frozen=True, tag="ping"):
    """Asks a sender that has said nothing for a while for a Pong."""


class Pong(Struct, frozen=True, tag="pong"):
    """A sender's answer: its engine still calls `progress`."""


Message = RequestData | SliceResult | Cancel | Ping | Pong

_decoder = msgspec.msgpack.Decoder(Message)


def check_request_id(function: str, request_id: str) -> None:
    """Refuse an id that no peer would take.

    Raises
    ------
    InvalidArgument
    """
    try:
        msgspec.convert(request_id, _Id).encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidArgument(
            f"[{function}] request_id must be a str of 1 to 128 characters of Unicode, got "
            f"{request_id!r:.150}"
        ) from error


def encode_message(message: Message) -> bytes:
    """Write a message."""
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> Message:
    """Read a peer's message.

    Raises
    ------
    PeerDataError
        If it is too long, malformed, or at odds with itself.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise _wrong(f"have at most {MAX_MESSAGE_BYTES} bytes", len(data))
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerDataError(f"[decode_message] malformed message: {error}") from error
    if isinstance(message, RequestData):
        _check_request(message)
    elif isinstance(message, SliceResult):
        _check_result(message)
    return message


def _check_request(message: RequestData) -> None:
    if not message.token_begin <= message.token_end <= message.prompt_tokens:
        raise _wrong(
            "have token_begin <= token_end <= prompt_tokens",
            (message.token_begin, message.token_end, message.prompt_tokens),
        )
    if message.slice_id >= message.num_slices:
        raise _wrong(f"have a slice_id below {message.num_slices}", message.slice_id)
    groups = [one.layer_group for one in message.pages]
    if len(set(groups)) != len(groups):
        raise _wrong("name a layer group once", groups)
    if any(len(one.packed) % 4 for one in message.pages):
        raise _wrong("have slots of 4 bytes", [len(one.packed) for one in message.pages])
    if message.bounce and message.bounce.address + message.bounce.size > 1 << 63:
        raise _wrong("have a bounce region below 2**63", message.bounce)


def _check_result(message: SliceResult) -> None:
    for group in message.transfer_groups:
        bounced = group.bounce_dst_base is not None
        if bounced and (group.source, group.target) != ("VRAM", "VRAM"):
            raise _wrong("bounce VRAM -> VRAM alone", (group.source, group.target))


def _wrong(rule: str, got: object) -> PeerDataError:
    return PeerDataError(f"[decode_message] a message must {rule}, got {got}")


class Card(Struct, frozen=True):
    """What a process shows its peers before they exchange anything else.

    Attributes
    ----------
    name : str
        Of its transport.
    transport : str
        Kind of engine, such as "nixl"; equal on both sides.
    metadata : bytes
        `Transport.metadata`, for the peer's engine.
    table : bytes
        `encode_table` of its page table.
    """

    name: _Id
    transport: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    rank: RankInfo
    metadata: _Packed
    table: _Packed
    version: int = SCHEMA_VERSION

    def page_table(self) -> PageTable:
        """The table, checked."""
        return decode_table(self.table)


def make_card(
    name: str, transport: str, rank: RankInfo, metadata: bytes, table: PageTable
) -> bytes:
    """Write a card; `decode_card` reads it."""
    check_rank(rank)
    return msgspec.msgpack.encode(Card(name, transport, rank, metadata, encode_table(table)))


def decode_card(data: bytes) -> Card:
    """Read a peer's card; its table has been checked.

    Raises
    ------
    PeerDataError
        If it is malformed, of another version, or its table or rank does not hold together.
    """
    try:
        version = msgspec.msgpack.decode(data, type=AnyVersion).version
        if version == SCHEMA_VERSION:
            card = msgspec.msgpack.decode(data, type=Card)
            check_rank(card.rank)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise PeerDataError(f"[decode_card] malformed card: {error}") from error
    if version != SCHEMA_VERSION:
        raise PeerDataError(
            f"[decode_card] version must be {SCHEMA_VERSION}, got {version}; both sides need the "
            "same sparse_kvcm schema"
        )
    card.page_table()
    return card
