"""Sparse MLA: against float64, and what must not change a bit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import mla_cases as cases  # noqa: E402
from sparse_kvcm import InvalidArgument  # noqa: E402
from sparse_kvcm.attention import AttentionBase, mla_registry  # noqa: E402
from sparse_kvcm.attention.mla_torch import sparse_mla_torch  # noqa: E402
from sparse_kvcm.attention.mla_tuning import Tuning, plan_work  # noqa: E402
from sparse_kvcm.attention.sparse_mla import (  # noqa: E402
    KeyPart,
    sparse_mla_decode,
    workspace_bytes,
)

DEVICES = ["cpu", "cuda"]
FUNCTIONS = [sparse_mla_decode, sparse_mla_torch]
# Entries and tokens; the last three are none of DeepSeek-V4's, and no reason to be wrong.
WINDOWS = [
    ("fp8_ds_mla", "fp8_ds_mla"), ("nvfp4", "fp8"), ("nvfp4", "nvfp4"),
    ("nvfp4", "bf16"), ("nvfp4", "fp8_ds_mla"), ("fp8", "nvfp4"),
]  # fmt: skip
SMALL = Tuning(16, 4, 2, 8)  # many blocks and pieces of few units


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return cases.device_or_skip(request.param)


def elements(units: int, width: int, device: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(units, width, generator=generator).to(device)


def problem(name: str, device: str, b: int, heads: int, k: int, size: str = "small") -> Any:
    """A pool of scattered units, queries, and a selection with -1, duplicates and an empty row."""
    layout = cases.layout_of(name, size)
    units = 3 * k + 5
    pages = -(-2 * units // layout.units_per_page)
    generator = torch.Generator().manual_seed(k * heads + b)
    slots = torch.randperm(pages * layout.units_per_page, generator=generator)[:units]
    made = cases.pool_of(
        layout, elements(units, layout.width, device), slots.to(device), pages=pages
    )
    q = elements(b * heads, layout.width, device, 1).view(b, heads, -1).to(torch.bfloat16)
    chosen = torch.randint(0, units, (b, k), generator=generator)
    chosen[torch.rand(b, k, generator=generator) < 0.2] = -1
    if k > 2:
        chosen[:, -1] = chosen[:, 0]
    if b > 1:
        chosen[b // 2] = -1
    return made, q, chosen.to(torch.int32).to(device)


def run(function: Any, made: Any, q: Any, chosen: Any, **options: Any) -> Any:
    """Outputs into poison, float32."""
    b, heads, _ = q.shape
    out = torch.full((b, heads, made.layout.value_width), float("nan"), device=q.device)
    lse = torch.full((b, heads), float("nan"), device=q.device)
    return function(
        q, made.buffers, made.rows(chosen), layout=made.layout, softmax_scale=scale_of(made),
        kv_scale=cases.KV_SCALE, out=out, lse=lse, **options,
    )  # fmt: skip


def scale_of(made: Any) -> float:
    return float(made.layout.width**-0.5)


def compare(got: Any, made: Any, q: Any, chosen: Any, sinks: Any = None) -> None:
    want = cases.attend(q, [(made, chosen)], scale_of(made), sinks)
    cases.check(got, want, float(made.elements.abs().max()), chosen.shape[1])


@pytest.mark.parametrize("name", cases.LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_layout_matches_float64(function: Any, name: str, device: str) -> None:
    made, q, chosen = problem(name, device, 3, 4, 37)
    tuned = {"tuning": SMALL} if function is sparse_mla_decode else {}
    got = run(function, made, q, chosen, **tuned)
    if function is sparse_mla_torch:  # whose operands are float32
        made.elements = made.exact
    compare(got, made, q, chosen)
    assert not got[0][1].any()
    assert torch.isneginf(got[1][1]).all()


@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
def test_any_number_of_heads(heads: int, device: str) -> None:
    made, q, chosen = problem("dsa/fp8", device, 2, heads, 33)
    compare(run(sparse_mla_decode, made, q, chosen, tuning=SMALL), made, q, chosen)


@pytest.mark.parametrize(("b", "k"), [(1, 1), (1, 16), (2, 15), (5, 17), (1, 40)])
def test_any_batch_and_width(b: int, k: int, device: str) -> None:
    made, q, chosen = problem("v4/fp8_ds_mla", device, b, 2, k)
    compare(run(sparse_mla_decode, made, q, chosen, tuning=SMALL), made, q, chosen)


def test_no_queries_give_no_outputs(device: str) -> None:
    made, q, chosen = problem("dsa/bf16", device, 1, 2, 3)
    got = run(sparse_mla_decode, made, q[:0], chosen[:0])
    assert got[0].shape == (0, 2, made.layout.value_width)
    assert workspace_bytes(0, 2, made.layout, 3) == 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sinks_take_weight_but_are_not_in_the_sums(function: Any, device: str) -> None:
    made, q, chosen = problem("v4/bf16", device, 2, 4, 20)
    sinks = torch.tensor([0.0, 2.5, float("-inf"), 90.0], device=device)
    got = run(function, made, q, chosen, sinks=sinks)
    compare(got, made, q, chosen, sinks)
    plain = run(function, made, q, chosen)
    assert torch.equal(got[1], plain[1])
    torch.testing.assert_close(got[0][:, 2], plain[0][:, 2], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("entries", "tokens"), WINDOWS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_window_and_entries_are_one_softmax(
    function: Any, entries: str, tokens: str, device: str
) -> None:
    made, q, chosen = problem(f"v4/{entries}", device, 3, 4, 37)
    window, _, seen = problem(f"v4/{tokens}", device, 3, 4, 20)
    seen[1, :4] = torch.arange(4)  # of a row without entries
    sinks = torch.linspace(-1, 1, 4, device=device)
    tuned = {"tuning": SMALL} if function is sparse_mla_decode else {}
    part = KeyPart(window.buffers, window.rows(seen), window.layout, cases.KV_SCALE * 2)
    window.elements *= 2 if window.layout.tensor_scale else 1
    got = run(function, made, q, chosen, window=part, sinks=sinks, **tuned)
    want = cases.attend(q, [(window, seen), (made, chosen)], scale_of(made), sinks)
    largest = max(float(one.elements.abs().max()) for one in (made, window))
    cases.check(got, want, largest, 57)


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_where_units_lie_changes_no_bit(name: str, device: str) -> None:
    """An arena, and a pool whose regions are buffers and whose pages belong to three layers."""
    layout = cases.layout_of(name)
    unit_elements = elements(50, layout.width, device)
    slots = [torch.randperm(64 * n)[:50].to(device) for n in (1, 9)]
    options = [{"pages": 1}, {"pages": 9, "split": "regions", "stride_pages": 3, "poison": 0x7F}]
    pools = [
        cases.pool_of(layout, unit_elements, place, **option)
        for place, option in zip(slots, options, strict=True)
    ]
    q = elements(2 * 4, layout.width, device, 1).view(2, 4, -1).to(torch.bfloat16)
    chosen = torch.randint(-1, 50, (2, 40), dtype=torch.int32).to(device)
    first, second = (run(sparse_mla_decode, one, q, chosen, tuning=SMALL) for one in pools)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["dsa/fp8", "v4/fp8_ds_mla", "dsa/nvfp4"])
def test_poison_in_units_that_are_not_selected_changes_no_bit(name: str, device: str) -> None:
    made, q, chosen = problem(name, device, 2, 4, 37)
    before = run(sparse_mla_decode, made, q, chosen)
    named = set(made.rows(chosen).flatten().tolist())
    units = made.layout.units_per_page
    for offset, size in made.layout.page.regions:
        region = made.buffers[0][:, offset : offset + units * size].unflatten(1, (units, size))
        for slot in set(range(len(made.buffers[0]) * units)) - named:
            region[slot // units, slot % units] = 0x7F  # NaN in E4M3, 3e38 in BF16
    after = run(sparse_mla_decode, made, q, chosen)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_what_is_no_number_is_passed_on(device: str) -> None:
    """In one head, not hidden as a query without units."""
    made, q, chosen = problem("dsa/bf16", device, 2, 4, 20)
    q[0, 1, 3] = float("nan")
    out, lse = run(sparse_mla_decode, made, q, chosen)
    assert out[0, 1].isnan().all()
    assert not out[0, [0, 2, 3]].isnan().any()
    assert lse[0].isnan().tolist() == [False, True, False, False]


def test_implementations_of_a_device_read_arena_rows(device: str) -> None:
    made, q, chosen = problem("v4/fp8_ds_mla", device, 2, 4, 20)
    base = AttentionBase(made.layout, tuple(made.buffers), is_arena=True)
    registry = mla_registry(str(device))
    assert ("triton_sparse_mla" in registry.names) == (device != "cpu")
    outputs = [
        registry.choose(base, name)(
            base,
            q,
            made.rows(chosen),
            softmax_scale=scale_of(made),
            out=torch.zeros_like(q).float(),
        )
        for name in registry.names
    ]
    for got in outputs:
        compare(got, made, q, chosen)


def test_pieces_of_a_selection_can_be_merged_by_their_sums(device: str) -> None:
    made, q, chosen = problem("dsa/fp8", device, 1, 4, 40)
    whole = run(sparse_mla_decode, made, q, chosen)
    parts = [run(sparse_mla_decode, made, q, part) for part in (chosen[:, :13], chosen[:, 13:])]
    shares = torch.stack([part[1] for part in parts]).softmax(0)[..., None]
    merged = (torch.stack([part[0] for part in parts]) * shares).sum(0)
    bound = 2 * cases.BF16_ROUNDING * float(made.elements.abs().max())
    torch.testing.assert_close(merged, whole[0], rtol=0, atol=bound)
    sums = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(sums, whole[1], rtol=1e-5, atol=1e-5)


def test_a_workspace_of_the_size_that_is_told_is_enough(device: str) -> None:
    made, q, chosen = problem("dsa/fp8", device, 2, 4, 40)
    size = workspace_bytes(2, 4, made.layout, 40, tuning=SMALL)
    assert size > 0
    guarded = torch.full((size + 64,), 0xA5, dtype=torch.uint8, device=device)
    got = run(sparse_mla_decode, made, q, chosen, tuning=SMALL, workspace=guarded[:size])
    want = run(sparse_mla_decode, made, q, chosen, tuning=SMALL)
    assert torch.equal(got[0], want[0])
    assert (guarded[size:] == 0xA5).all()
    with pytest.raises(InvalidArgument, match="workspace must have"):
        run(sparse_mla_decode, made, q, chosen, tuning=SMALL, workspace=guarded[: size - 16])


@pytest.mark.parametrize("b", [1, 2, 31, 32, 132, 133, 151, 1500])
@pytest.mark.parametrize("widths", [(1,), (2048,), (128, 512), (128, 1)])
@pytest.mark.parametrize("heads", [1, 64, 128])
def test_programs_share_all_blocks_once_and_pieces_have_places(
    b: int, widths: tuple[int, ...], heads: int
) -> None:
    work = plan_work(b, heads, widths, Tuning(64, 8, 3, 132))
    row = sum(work.blocks)
    places = set()
    for program in range(work.programs):
        first = program * work.per_program
        last = min(first + work.per_program, b * row)
        assert first < last
        for one in range(first // row, (last - 1) // row + 1):
            if first > one * row or last < (one + 1) * row:
                assert program + one not in places
                places.add(program + one)
    assert work.programs * work.per_program >= b * row
    assert not places or max(places) < work.pieces
    assert bool(places) == bool(work.pieces)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_real_sizes_match_float64_and_repeat(name: str, heads: int) -> None:
    device = cases.device_or_skip("cuda")
    made, q, chosen = problem(name, device, 6, heads, 2048 if "dsa" in name else 512, "full")
    got = run(sparse_mla_decode, made, q, chosen)
    compare(got, made, q, chosen)
    for again in (run(sparse_mla_decode, made, q, chosen) for _ in range(5)):
        assert torch.equal(got[0], again[0])
        assert torch.equal(got[1], again[1])


@pytest.mark.parametrize("b", [1, 300])
@pytest.mark.parametrize("entries", ["bf16", "fp8", "fp8_ds_mla", "nvfp4"])
def test_real_windows_match_float64(entries: str, b: int) -> None:
    device = cases.device_or_skip("cuda")
    tokens = "fp8" if entries == "nvfp4" else entries
    made, q, chosen = problem(f"v4/{entries}", device, b, 64, 512, "full")
    window, _, seen = problem(f"v4/{tokens}", device, b, 64, 128, "full")
    sinks = torch.linspace(-1, 1, 64, device=device)
    part = KeyPart(window.buffers, window.rows(seen), window.layout, cases.KV_SCALE)
    got = run(sparse_mla_decode, made, q, chosen, window=part, sinks=sinks)
    want = cases.attend(q, [(window, seen), (made, chosen)], scale_of(made), sinks)
    largest = max(float(one.elements.abs().max()) for one in (made, window))
    cases.check(got, want, largest, 640)


@pytest.mark.parametrize("name", ["dsa/bf16", "v4/fp8_ds_mla"])
def test_units_beyond_two_to_the_31_bytes_are_found(name: str) -> None:
    device = cases.device_or_skip("cuda")
    layout = cases.layout_of(name, "full")
    pages = 2**32 // layout.page.page_bytes + 2
    slots = pages * layout.units_per_page - 1 - torch.randperm(90, device=device)
    made = cases.pool_of(layout, elements(90, layout.width, device), slots, pages=pages)
    q = elements(2 * 64, layout.width, device, 1).view(2, 64, -1).to(torch.bfloat16)
    chosen = torch.randint(-1, 90, (2, 80), dtype=torch.int32).to(device)
    compare(run(sparse_mla_decode, made, q, chosen), made, q, chosen)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("q must be bfloat16", {"q": torch.zeros(2, 4, 192)}),
    (r"q must be \(b, heads, 192\)", {"q": torch.zeros(2, 4, 128).bfloat16()}),
    ("q must have contiguous elements", {"q": torch.zeros(2, 4, 200).bfloat16()[..., 3:195]}),
    (r"rows must be int32 \(2, k\)", {"rows": torch.zeros(3, 5, dtype=torch.int32)}),
    (r"rows must be int32 \(2, k\)", {"rows": torch.zeros(2, 5, dtype=torch.int64)}),
    (r"rows must be int32 \(2, k\)", {"rows": torch.zeros(2, 0, dtype=torch.int32)}),
    ("rows must be contiguous", {"rows": torch.zeros(5, 2, dtype=torch.int32).T}),
    ("kv_scale must be finite and > 0", {"kv_scale": 0.0}),
    ("softmax_scale must be finite", {"softmax_scale": float("nan")}),
    (r"sinks must be contiguous float32 \(4,\)", {"sinks": torch.zeros(5)}),
    (r"out must be \(2, 4, 128\)", {"out": torch.zeros(2, 4, 192)}),
    ("out must be bfloat16, float16 or float32", {"out": torch.zeros(2, 4, 128).double()}),
    (r"lse must be contiguous float32 \(2, 4\)", {"lse": torch.zeros(2, 4).double()}),
    ("buffers of dsa/fp8 must be", {"pool": torch.zeros(3, 77).byte()}),
    ("pages of dsa/fp8 must have their data at multiples of 16", {"pool": "odd"}),
    ("q must be a strided torch.Tensor, got list", {"q": [[[0.0] * 192]]}),
    (
        "q must be a strided torch.Tensor, got torch.sparse",
        {"q": torch.zeros(2, 4, 192).to_sparse()},
    ),
    ("rows must be a strided torch.Tensor, got NoneType", {"rows": None}),
    ("pool must be a torch.Tensor or a sequence of them, got NoneType", {"pool": None}),
    ("pool must be a strided torch.Tensor, got bytes", {"pool": [b"1"]}),
    ("layout must be a RecordLayout, .* got str", {"layout": "dsa/fp8"}),
    ("layout must be a RecordLayout, .* got tuple", {"window": (None, None)}),
    ("kv_scale must be finite and > 0, got None", {"kv_scale": None}),
    ("softmax_scale must be finite, got 1", {"softmax_scale": "1"}),
    ("sinks must be a strided torch.Tensor, got float", {"sinks": 0.0}),
    ("lse must be a strided torch.Tensor, got list", {"lse": []}),
    ("out must have a place for each", {"out": torch.zeros(2, 1, 128).expand(2, 4, 128)}),
    ("out must have a place for each", {"out": torch.zeros(1, 4, 128).expand(2, 4, 128)}),
    (
        "out must have a place for each",
        {"out": torch.zeros(9999).as_strided((2, 4, 128), (256, 64, 1))},
    ),
    ("q's device", {"sinks": torch.zeros(4, device="meta")}),
]


@pytest.mark.parametrize(("message", "wrong"), WRONG)
def test_what_does_not_fit_is_refused(message: str, wrong: dict[str, Any]) -> None:
    layout = cases.layout_of("dsa/fp8")
    size = layout.page.page_bytes
    fields: dict[str, Any] = {
        "q": torch.zeros(2, 4, 192).bfloat16(),
        "pool": torch.zeros(3, size).byte(),
        "rows": torch.zeros(2, 5, dtype=torch.int32),
        "layout": layout,
        "softmax_scale": 1.0,
    } | wrong
    if isinstance(fields["pool"], str):
        fields["pool"] = torch.zeros(3 * size + 16).byte()[4 : 4 + 3 * size].view(3, size)
    for function in FUNCTIONS[: 1 if message.startswith("pages of") else 2]:
        with pytest.raises(InvalidArgument, match=message):
            function(**fields)


@pytest.mark.parametrize(
    "bad", [(0, 4, 2, 8), (8, 4, 2, 8), (24, 4, 2, 8), (16, 3, 2, 8), (16, 4, 0, 8), (16, 4, 2, 0)]
)
def test_a_tuning_that_triton_does_not_take_is_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match=r"\[Tuning\] .* must be"):
        Tuning(*bad)


def test_outputs_may_be_the_rows_of_a_transposed_array(device: str) -> None:
    made, q, chosen = problem("dsa/bf16", device, 2, 3, 7)
    out = torch.zeros(3, 2, made.layout.value_width, device=device).transpose(0, 1)
    got, _ = sparse_mla_decode(
        q, made.buffers, made.rows(chosen), layout=made.layout, softmax_scale=1.0, out=out
    )
    want, _ = sparse_mla_decode(
        q, made.buffers, made.rows(chosen), layout=made.layout, softmax_scale=1.0,
        out=torch.zeros_like(out, memory_format=torch.contiguous_format),
    )  # fmt: skip
    assert torch.equal(got, want)
