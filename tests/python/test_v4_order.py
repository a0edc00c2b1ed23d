"""Where items of DeepSeek-V4 lie, byte by byte, and that code which errs is caught.

Places come from the storage's own converters and the contract: token p of a window in row p of
its page, entry e likewise, input p of a compressor in row p of a ring, and entry e of a lease's
window in slot N + e mod W.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import dsa_codec_oracle as oracle  # noqa: E402
import v4_cases as cases  # noqa: E402
from sparse_kvcm.deepseek_v4 import access, indices  # noqa: E402
from sparse_kvcm.deepseek_v4 import manager as manager_module  # noqa: E402
from v4_cases import INDEX, STATES, SWA, C, Run  # noqa: E402

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


def check_bytes(run: Run, request: int, tokens: int) -> None:
    """Each item that the next token may read lies where the contract says, on the CPU."""
    made, model = run.manager, run.manager.config.geometry
    page = made.config.tokens_per_block
    for layer, ratio in enumerate(model.compress_ratios):
        for kind in cases.kinds_of(ratio):
            if kind is C and layer in made.access.arenas:
                continue
            per_page, rows = page, page
            if kind in (C, INDEX):
                per_page = rows = page // ratio
                items = range(tokens // ratio)
            elif kind is SWA:
                items = range(max(0, tokens - cases.WINDOW + 1), tokens)
            else:
                rows = 8 if ratio == 4 else 128
                items = range(tokens - min(tokens, 4 if ratio == 4 else tokens % ratio), tokens)
            storage = made.store.storage
            base = made.store.page_indices(request, made.access.layer_group(layer, kind))
            converter = storage.get_page_index_converter(
                model.storage_layer_of(kind, layer), kind.role, kind.index_mode
            )
            pages = np.asarray(converter.convert(np.asarray(base)))
            buffer = made.get_buffers(layer, kind).numpy()
            wanted = cases.values(model, request, layer, kind, items).numpy()
            for item, value in zip(items, wanted, strict=True):
                row = value.view(np.uint8) if kind in STATES else oracle.bf16(value)
                begin = item % rows * len(row)
                found = buffer[pages[item // per_page], begin : begin + len(row)]
                np.testing.assert_array_equal(found, row, f"{kind.name} {layer} {item}")


@MODES
@pytest.mark.parametrize("page", [128, 256])
def test_items_lie_in_the_rows_of_their_numbers(offload: bool, page: int) -> None:
    run = Run(offload, tokens_per_block=page)
    run.add(1, 250)
    run.add(2, 5)
    for _ in range(12):
        run.step()
        for request, tokens in run.lengths.items():
            check_bytes(run, request, tokens)


def test_a_lease_s_window_is_a_ring_in_order_of_entries() -> None:
    run = Run(True)
    run.add(1, 500)
    seen = set()
    for _ in range(160):
        run.open()
        run.reader.run()
        length = run.lengths[1] + 1
        lease = run.manager.store._requests[1].cache.lease
        for layer in run.manager.access.arenas:
            write = int(np.asarray(run.manager.resolved(layer).write_slots)[0, 0])
            if length % 4:
                assert write == run.manager.store.manager.trash_slot
                continue
            entry = length // 4 - 1
            assert write == lease.base + lease.cached_slots + entry % lease.window_slots
            seen.add(write)
        run.manager.end_step()
        run.lengths[1] = length
    assert len(seen) == 32  # the ring went round


# --- code that errs ---


def program(run: Run) -> None:
    """Crosses pages, groups and the ring; prompts of several lengths."""
    run.add(1, 250)
    run.add(2, 61)
    for _ in range(8):
        run.step(padded=3)
        for request, tokens in run.lengths.items():
            check_bytes(run, request, tokens)


class Without:
    """A Batch one of whose calls does nothing."""

    def __init__(self, batch: Any, name: str) -> None:
        self.batch, self.name = batch, name

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name == self.name else getattr(self.batch, name)


real = {
    name: getattr(indices, name)
    for name in ("window_positions", "all_entries", "completes_entry", "num_entries", "map_items")
}
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "windows newest first": (
        indices,
        "window_positions",
        lambda lengths, window: real["window_positions"](lengths, window).flip(1),
    ),
    "windows rotated": (
        indices,
        "window_positions",
        lambda lengths, window: real["window_positions"](lengths, window).roll(1, 1),
    ),
    "windows a token behind": (
        indices,
        "window_positions",
        lambda lengths, window: real["window_positions"]((lengths - 1).clamp(min=0), window),
    ),
    "entries newest first": (
        indices,
        "all_entries",
        lambda lengths, ratio, width: real["all_entries"](lengths, ratio, width).flip(1),
    ),
    "an entry a token early": (
        indices,
        "completes_entry",
        lambda lengths, ratio: real["completes_entry"](lengths + 1, ratio),
    ),
    "rows of a page and ring in reverse": (
        access,
        "map_items",
        lambda table, rows, items, page, per_page: real["map_items"](
            table,
            rows,
            (items // page.tokens_per_block * page.tokens_per_block
             + page.tokens_per_block - 1 - items % page.tokens_per_block).where(items >= 0, items),
            page,
            per_page,
        ),
    ),
    "rings begin one later": (
        access,
        "map_items",
        lambda table, rows, items, page, per_page: real["map_items"](
            table,
            rows,
            items if per_page == page.tokens_per_block
            else (items // per_page * per_page + (items + 1) % per_page).where(items >= 0, items),
            page,
            per_page,
        ),
    ),
    "imports one late": (
        manager_module,
        "first_item",
        lambda tokens, ratio, kind, count: max(
            0, tokens // (1 if kind is SWA or kind.is_state else ratio) - count - 1
        ) if count < tokens else 1,
    ),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("mutant", MUTANTS)
def test_code_that_errs_in_order_is_caught(
    mutant: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        program(Run(offload))


def test_a_fetch_that_is_missing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back to entries that happen to lie on the GPU."""
    run = Run(True)
    run.add(1, 500)
    run.manager.store.batch = Without(run.manager.store.batch, "fetch")
    with pytest.raises(AssertionError):
        run.step(2)


def test_an_entry_that_is_not_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(True)
    run.add(1, 500)
    monkeypatch.setattr(run.manager.access, "write_arena", lambda *arguments: None)
    with pytest.raises(AssertionError):
        run.step(5)


@MODES
def test_padding_has_no_rows_and_nothing_selected_is_left_out(offload: bool) -> None:
    """Coverage, as the reader checks it in every step, and masks of padding."""
    run = Run(offload)
    run.add(4, 500)
    run.step(2)
    run.open(padded=3)
    inputs = run.reader.inputs()
    for layer, kind in inputs:
        if kind == "selection":  # what an indexer leaves in rows of padding
            inputs[layer, kind][1:] = torch.arange(cases.TOP_K, dtype=torch.int32)
    found = cases.forward(run.manager, inputs)
    for layer in range(5):
        rows = found[layer, "rows"]
        assert bool((rows[1:] == -1).all())
        assert bool((rows[0, : cases.WINDOW] >= 0).all())
    for layer in run.manager.config.geometry.history_layers:
        chosen = inputs[layer, "selection"][0] >= 0
        assert torch.equal(found[layer, "rows"][0, cases.WINDOW :] >= 0, chosen)
        if offload:
            out = run.manager.resolved(layer)
            counts = [np.asarray(one)[1:] for one in (out.miss_counts, out.hit_counts, out.errors)]
            assert not np.concatenate(counts).any()
            trash = run.manager.store.manager.trash_slot
            assert (np.asarray(out.write_slots)[1:3] == trash).all()
    run.manager.end_step()
