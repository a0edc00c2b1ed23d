"""Records of latents and index keys, byte for byte against a NumPy codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dsa_codec_oracle as oracle
import sparse_kvcm as kvcm
from sparse_kvcm.models import load_geometry

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
from sparse_kvcm.dsa import codecs  # noqa: E402

RANK, ROPE = 512, 64
LATENTS = ("bf16", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla")
INDEX = ("bf16", "fp8", "mxfp4")


def same(got: Any, expected: list[list[Any]]) -> None:
    """Compare records, rows of regions, and name the first byte that differs."""
    for region, codes in enumerate(got):
        for row, wanted in enumerate(expected):
            differ = np.flatnonzero(codes[row].numpy() != wanted[region])
            assert not len(differ), f"region {region}, row {row}, byte {differ[0]}"


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("kv_dtype", LATENTS)
def test_latents_have_the_bytes_of_the_numpy_codec(kv_dtype: Any, scale: float) -> None:
    rows = oracle.hard_rows(RANK + ROPE, seed=1)
    got = codecs.encode_latents(torch.from_numpy(rows), kv_dtype, rank=RANK, scale=scale)
    regions = load_geometry("glm-5.2").unit_layout(kv_dtype).region_bytes
    assert [codes.shape[1] for codes in got] == regions
    same(got, [oracle.latent(row, kv_dtype, RANK, scale) for row in rows])


@pytest.mark.parametrize("index_scale", ["fp32", "ue8m0"])
@pytest.mark.parametrize("index_dtype", INDEX)
def test_index_keys_have_the_bytes_of_the_numpy_codec(index_dtype: Any, index_scale: Any) -> None:
    rows = oracle.hard_rows(128, seed=2, n=40)
    got = codecs.encode_index_keys(torch.from_numpy(rows), index_dtype, index_scale=index_scale)
    regions = load_geometry("glm-5.2").index_layout(index_dtype).region_bytes
    assert [codes.shape[1] for codes in got] == regions
    same(got, [oracle.index_key(row, index_dtype, index_scale) for row in rows])


# Half a step of the format, at the largest element of a scale's tile.
@pytest.mark.parametrize(
    ("kv_dtype", "bound"),
    [("bf16", 2**-8), ("fp8", 2**-4), ("fp8_ds_mla", 2**-4), ("nvfp4", 0.2), ("nvfp4_ds_mla", 0.2)],
)
def test_latents_come_back_within_half_a_step(kv_dtype: Any, bound: float) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(50, RANK + ROPE, generator=generator)
    record = codecs.encode_latents(rows, kv_dtype, rank=RANK)
    back = codecs.decode_latents(record, kv_dtype, rank=RANK, rope=ROPE)
    assert (back - rows).abs().max() <= bound * rows.abs().max()
    again = codecs.encode_latents(back, kv_dtype, rank=RANK)
    if kv_dtype in ("bf16", "fp8"):
        assert all(torch.equal(a, b) for a, b in zip(again, record, strict=True))


@pytest.mark.parametrize(
    ("index_dtype", "bound"), [("bf16", 2**-8), ("fp8", 2**-4), ("mxfp4", 0.25)]
)
def test_index_keys_come_back_within_half_a_step(index_dtype: Any, bound: float) -> None:
    rows = torch.randn(50, 128, generator=torch.Generator().manual_seed(4))
    back = codecs.decode_index_keys(codecs.encode_index_keys(rows, index_dtype), index_dtype)
    assert (back - rows).abs().max() <= bound * rows.abs().max()


@pytest.mark.parametrize("kv_dtype", LATENTS)
def test_no_tokens_make_empty_records(kv_dtype: Any) -> None:
    for codes in codecs.encode_latents(torch.zeros(0, RANK + ROPE), kv_dtype, rank=RANK):
        assert codes.shape[0] == 0


@pytest.mark.parametrize("index_dtype", INDEX)
def test_no_index_keys_make_empty_records(index_dtype: Any) -> None:
    for codes in codecs.encode_index_keys(torch.zeros(0, 128), index_dtype):
        assert codes.shape[0] == 0


def test_rows_of_another_shape_or_dtype_are_refused() -> None:
    with pytest.raises(kvcm.InvalidArgument, match=r"latents must be \(n, rank 512"):
        codecs.encode_latents(torch.zeros(3, 512), "bf16", rank=512)
    wrong: Any = "int8"
    with pytest.raises(kvcm.InvalidArgument, match="kv_dtype must be .*got 'int8'"):
        codecs.encode_latents(torch.zeros(3, 576), wrong, rank=512)
    with pytest.raises(kvcm.InvalidArgument, match="index_dtype must be .*got 'int8'"):
        codecs.encode_index_keys(torch.zeros(3, 128), wrong)
