"""The picture of a measurement of speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm.bench.plot_style import can_draw
from polarlm.bench.speed.plot import draw
from scripts.speed_tables import published


@pytest.mark.skipif(not can_draw(), reason="needs matplotlib, which the extra `bench` has")
def test_a_published_measurement_has_a_picture(tmp_path: Path) -> None:
    measured = next(iter(published().values()))
    assert draw(measured, tmp_path / "speed.json") == "Picture: speed.png"
    assert (tmp_path / "speed.png").stat().st_size > 10_000
