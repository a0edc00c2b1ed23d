"""The seven kinds of cache that DeepSeek-V4 keeps, and which layers have which.

A layer has a sliding window. Every `ratio` tokens a compressor makes one entry out of its inputs, a
value ("kv") and a score each; at ratio 4 entries overlap, so that it reads two groups back, and an
indexer with a compressor of its own selects among them.
"""

from __future__ import annotations

from enum import IntEnum

from sparse_kvcm._core import PageIndexMode

BLOCK_SCALE_ROLE = "deepseek_v4_compress_block_scale"


class AttentionType(IntEnum):
    """A kind of cache; the numbers are those of virtual layer ids."""

    SWA = 0
    COMPRESSOR_KV = 1
    COMPRESSOR_SCORE = 2
    INDEXER_COMPRESSOR_KV = 3
    INDEXER_COMPRESSOR_SCORE = 4
    COMPRESS = 5
    INDEXER_COMPRESS = 6

    @property
    def role(self) -> str:
        """Of its buffers in a storage."""
        return f"deepseek_v4_{self.name.lower()}"

    @property
    def is_state(self) -> bool:
        """Whether it is what a compressor has read of its inputs, FP32."""
        return self in STATES

    @property
    def index_mode(self) -> PageIndexMode:
        """How kernels name its pages: windows and states by layer, full histories for all alike."""
        full = self in (AttentionType.COMPRESS, AttentionType.INDEXER_COMPRESS)
        return PageIndexMode.SHARED if full else PageIndexMode.PER_LAYER


COMPRESSOR_STATES = (AttentionType.COMPRESSOR_KV, AttentionType.COMPRESSOR_SCORE)
INDEXER_STATES = (AttentionType.INDEXER_COMPRESSOR_KV, AttentionType.INDEXER_COMPRESSOR_SCORE)
STATES = (*COMPRESSOR_STATES, *INDEXER_STATES)
_OF_RATIO = {
    0: (AttentionType.SWA,),
    1: (AttentionType.SWA,),
    4: tuple(AttentionType),
    128: (AttentionType.SWA, *COMPRESSOR_STATES, AttentionType.COMPRESS),
}


def types_of_ratio(ratio: int) -> tuple[AttentionType, ...]:
    """What a layer of this compress ratio keeps; 0 and 1 have a window alone."""
    return _OF_RATIO[ratio]


def overlap(ratio: int) -> int:
    """Groups of `ratio` inputs that one entry is made of."""
    return 2 if ratio == 4 else 1


def state_rows(ratio: int) -> int:
    """Inputs that a compressor keeps: what its next entry may still need."""
    return overlap(ratio) * ratio


def virtual_layer_id(layer: int, kind: AttentionType) -> int:
    """One number for a layer's cache of one kind, the same on every rank and worker."""
    return layer * len(AttentionType) + kind
