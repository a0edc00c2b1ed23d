"""Page tables in forward order: only what changed is rewritten, and all of that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
from sparse_kvcm.adapter.forward_table import ForwardTable  # noqa: E402

ROWS, PAGES, SCALE = 4, 3, 5


@given(st.data())
def test_a_table_shows_its_rows_whatever_changed_before(data: st.DataObject) -> None:
    """Also a row that changed while its place was not in use."""
    table = ForwardTable(ROWS, PAGES, SCALE, "cpu")
    base = np.full((ROWS, PAGES), -1, np.int32)
    for _ in range(8):
        changed = data.draw(st.sets(st.integers(0, ROWS - 1)))
        for row in changed:
            base[row] = data.draw(st.lists(st.integers(-1, 9), min_size=PAGES, max_size=PAGES))
        order = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS))
        rows = order + [-1] * data.draw(st.integers(0, ROWS - len(order)))
        table.refresh(torch.from_numpy(base), rows, changed)
        for place, row in enumerate(rows):
            want = [-1 if row < 0 or slot < 0 else slot * SCALE for slot in base[row]]
            assert table.indices[place].tolist() == want


def test_places_that_show_the_same_are_left_alone() -> None:
    table = ForwardTable(ROWS, PAGES, SCALE, "cpu")
    base = torch.zeros(ROWS, PAGES, dtype=torch.int32)
    assert table.refresh(base, [2, 0, -1], set()) == [0, 1]
    assert table.refresh(base, [2, 0, -1], set()) == []
    assert table.refresh(base, [2, 0, -1], {0, 3}) == [1]
    assert table.refresh(base, [2, 1], set()) == [1]
