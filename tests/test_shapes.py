"""What `benchmarks/shapes.py` draws."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def shapes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import shapes

    yield shapes
    sys.modules.pop("shapes", None)


def test_drawn_rows_load_what_their_level_says(shapes):
    """At every shape; where the draw is near enough by itself, it stays as it is."""
    moved = 0
    for n, k in (*shapes.LARGE, *shapes.SMALL):
        row, bits = shapes.draw_rows(1, k, "cpu"), shapes.draw_map(n, k)
        for level, shares in shapes.LEVEL_SHARES.items():
            thresholds, drawn = shapes.thresholds_counted(level, row, bits), shapes.thresholds_for(level)
            if shares is not None:
                assert abs(shapes.loaded_bits(row, thresholds, bits) - float(level)) <= shapes.BITS_APART, (n, k, level)
            factor = (thresholds / drawn).unique()
            assert len(factor) == 1 or bool((factor[1:] - factor[:1]).abs().max() < 1e-6)
            near = shares is None or abs(shapes.loaded_bits(row, drawn, bits) - float(level)) <= shapes.BITS_APART
            assert near == bool((thresholds == drawn).all()), (n, k, level)
            moved += not near
    assert moved  # or the test shows nothing
