"""Destinations of measurements; published ones are overwritten only with --publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm.bench import result
from polarlm.bench.result import Output
from polarlm.engine.cli.flags import FlagError


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(result, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(result, "LOCAL", tmp_path / "results" / "local")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_file_names_describe_the_measurement(results: Path) -> None:
    path = Output().path("quality", "SmolLM2-135M Instruct")
    assert path == results / "local" / f"quality-smollm2-135m-instruct-{result.today()}.json"
    with pytest.raises(FlagError, match="--output and --publish both say where"):
        Output("out.json", publish=True).path("speed", "AMD EPYC")


def test_without_a_checkout_results_go_to_the_current_folder(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package has no folder of results, and none is made among the packages."""
    results.rmdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert Output().path("speed", "AMD EPYC") == tmp_path / "mine" / f"speed-amd-epyc-{result.today()}.json"
    with pytest.raises(FlagError, match="--publish writes to bench/results of a checkout"):
        Output(publish=True).path("speed", "AMD EPYC")
    assert not results.exists()
