"""Records of DeepSeek-V4: bytes against a NumPy codec, and through host history and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_codec_oracle as oracle  # noqa: E402
import v4_cases as cases  # noqa: E402
from sparse_kvcm.deepseek_v4 import codecs  # noqa: E402
from sparse_kvcm.models import load_geometry  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

HEAD, ROPE = 512, 64
WIDE = {"head_dim": HEAD, "qk_rope_head_dim": ROPE, "index_head_dim": 128}


def entries(seed: int, n: int) -> torch.Tensor:
    """With tiles of zeros, of tiny and of huge elements."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, HEAD)).astype(np.float32)
    rows *= 2.0 ** rng.integers(-20, 12, (n, HEAD // 64)).repeat(64, 1)
    rows[0, :64] = 0
    return torch.from_numpy(rows)


def footer_record(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FlashMLA's MODEL1_FP8Sparse record, restated in NumPy: 576 B of data, 8 B of footer."""
    data = np.zeros((len(rows), 576), np.uint8)
    footers = np.zeros((len(rows), 8), np.uint8)
    for i, row in enumerate(rows):
        for tile in range(7):
            part = row[64 * tile : 64 * tile + 64]
            amax = max(float(np.abs(part).max()), 1e-4)
            exponent = int(np.ceil(np.log2(np.float64(np.float32(amax) / np.float32(448)))))
            footers[i, tile] = exponent + 127
            codes = oracle.e4m3(part / np.float32(2.0**exponent))
            data[i, 64 * tile : 64 * tile + 64] = codes
        data[i, 448:] = oracle.bf16(row[448:])
    return data, footers


@pytest.mark.parametrize("seed", range(3))
def test_records_with_footers_have_the_published_bytes(seed: int) -> None:
    rows = entries(seed, 9)
    data, footers = codecs.encode_entries(rows, "fp8_ds_mla", rope=ROPE)
    wanted = footer_record(rows.numpy())
    np.testing.assert_array_equal(footers.numpy(), wanted[1])
    np.testing.assert_array_equal(data.numpy(), wanted[0])


@pytest.mark.parametrize(
    ("kv_dtype", "error"), [("bf16", 2**-8), ("fp8", 2**-4), ("fp8_ds_mla", 2**-4), ("nvfp4", 0.26)]
)
def test_records_decode_to_what_the_format_can_hold(kv_dtype: Any, error: float) -> None:
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((5, HEAD)).astype(np.float32))
    record = codecs.encode_entries(rows, kv_dtype, rope=ROPE)
    layout = load_geometry("deepseek-v4-flash").unit_layout(kv_dtype)
    assert [one.shape[1] for one in record] == layout.region_bytes
    back = codecs.decode_entries(record, kv_dtype, head_dim=HEAD, rope=ROPE)
    assert float((back - rows).abs().max()) <= error * float(rows.abs().max())
    again = codecs.encode_entries(back, kv_dtype, rope=ROPE)
    torch.testing.assert_close(
        codecs.decode_entries(again, kv_dtype, head_dim=HEAD, rope=ROPE), back
    )


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla", "nvfp4"])
def test_no_entries_are_a_record_too(kv_dtype: Any) -> None:
    """Of a prompt that is shorter than a group."""
    record = codecs.encode_entries(torch.zeros(0, HEAD), kv_dtype, rope=ROPE)
    layout = load_geometry("deepseek-v4-flash").unit_layout(kv_dtype)
    assert [tuple(one.shape) for one in record] == [(0, size) for size in layout.region_bytes]
    back = codecs.decode_entries(record, kv_dtype, head_dim=HEAD, rope=ROPE)
    assert back.shape == (0, HEAD)


@pytest.mark.parametrize("index_dtype", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("offload", [False, True])
def test_short_prompts_are_imported_in_every_type(
    offload: bool, kv_dtype: Any, index_dtype: Any
) -> None:
    wide = cases.geometry(**WIDE)
    sizes = {"geometry": wide, "gpu_quota": 64 << 20}
    if (offload, kv_dtype, index_dtype) == (False, "nvfp4", "bf16"):  # 256 bytes each, in one pool
        with pytest.raises(
            kvcm.InvalidArgument, match="pages of two sizes .* nvfp4 and bf16, 8192 B each"
        ):
            cases.manager(offload, kv_dtype=kv_dtype, index_dtype=index_dtype, **sizes)
        return
    made = cases.manager(offload, kv_dtype=kv_dtype, index_dtype=index_dtype, **sizes)
    for request, tokens in enumerate((1, 3, 127)):
        made.add_request(request, 200)
        made.import_history(request, cases.history(made.config.geometry, request, tokens))
        assert made.frontier(request) == tokens


def test_a_page_has_all_data_rows_and_then_all_footers() -> None:
    """64 entries: 37,440 B, footers from 36,864 on."""
    made = cases.manager(False, geometry=cases.geometry(**WIDE), kv_dtype="fp8_ds_mla",
                         tokens_per_block=256, index_dtype="fp8", gpu_quota=64 << 20)  # fmt: skip
    page = made.access.layout(1, cases.C).page
    assert (page.page_bytes, page.regions) == (37_440, [(0, 576), (36_864, 8)])
    assert made.get_buffers(1, cases.C).shape[1] == 37_440


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("page", [128, 256])
def test_records_go_through_host_history_byte_for_byte(kv_dtype: Any, page: int) -> None:
    """Imported, fetched, flushed and fetched again: bytes of the arena, region by region."""
    model = cases.geometry(**WIDE)
    made = cases.manager(
        True, geometry=model, kv_dtype=kv_dtype, tokens_per_block=page, index_dtype="fp8",
        gpu_quota=64 << 20, max_seq_len=1024,
    )  # fmt: skip
    prompt, length, layer = 4 * 210, 4 * 210, 3
    made.add_request(1, 1024)
    made.import_history(1, cases.history(model, 1, prompt))
    rng = np.random.default_rng(page)
    all_entries = [*range(prompt // 4)]
    for step in range(56):
        made.prepare_step([StepRequest(1, length)])
        length += 1
        if length % 4 == 0:
            all_entries.append(length // 4 - 1)
        for one in model.history_layers:
            names = rng.choice(all_entries, cases.TOP_K, replace=False).astype(np.int32)
            slots = made.select(one, torch.from_numpy(names)[None])
            new = cases.values(model, 1, one, cases.C, [length // 4 - 1])
            made.write_entries(one, cases.C, new)
            if one == layer and step % 5 == 0:
                check_arena(made, layer, kv_dtype, names, slots[0])
        made.end_step()


def check_arena(made: Any, layer: int, kv_dtype: Any, names: np.ndarray, slots: Any) -> None:
    rows = cases.values(made.config.geometry, 1, layer, cases.C, names)
    record = codecs.encode_entries(rows, kv_dtype, rope=ROPE)
    arena = made.get_buffers(layer, cases.C).numpy()
    per_page = made.config.units_per_page
    begin = 0
    for region in record:
        size = region.shape[1]
        for slot, wanted in zip(slots.tolist(), region.numpy(), strict=True):
            place = begin + slot % per_page * size
            found = arena[slot // per_page, place : place + size]
            np.testing.assert_array_equal(found, wanted)
        begin += per_page * size


def test_nvfp4_keeps_windows_and_dense_entries_in_fp8() -> None:
    made = cases.manager(False, geometry=cases.geometry(**WIDE), kv_dtype="nvfp4",
                         index_dtype="fp8", gpu_quota=64 << 20)  # fmt: skip
    assert [page.layout.region_bytes for _, page in made.access.buffers(1, cases.C)] == [
        [256],
        [32],
    ]
    assert made.access.layout(1, cases.SWA).page.layout.region_bytes == [512]
    assert made.access.layout(2, cases.C).page.layout.region_bytes == [512]


def test_an_unknown_record_is_refused() -> None:
    with pytest.raises(kvcm.InvalidArgument, match="kv_dtype"):
        codecs.encode_entries(entries(0, 1), "nvfp4_ds_mla", rope=ROPE)
    with pytest.raises(kvcm.InvalidArgument, match=r"\(n, head_dim\)"):
        codecs.encode_entries(entries(0, 1)[0], "bf16", rope=ROPE)
