"""Where measurements go: never over the published ones unless that is asked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import report
from bench.report import Output
from engine.flags import FlagError


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of published figures."""
    monkeypatch.setattr(report, "_RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "_LOCAL", tmp_path / "results" / "local")
    return tmp_path / "results"


def test_results_lie_under_a_name_that_says_what_they_are(results: Path) -> None:
    path = Output().path("quality", "SmolLM2-135M Instruct")
    assert path == results / "local" / f"quality-smollm2-135m-instruct-{report.today()}.json"


def test_published_figures_are_written_where_that_is_asked_for(results: Path) -> None:
    assert Output(publish=True).path("speed", "AMD EPYC").parent == results


def test_a_place_is_named_once(results: Path) -> None:
    with pytest.raises(FlagError, match="--output and --publish both say where"):
        Output("out.json", publish=True).path("speed", "AMD EPYC")


def test_git_ignores_what_is_not_published() -> None:
    root = Path(report.__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    file = report._LOCAL / "speed.json"
    assert report._LOCAL.parent == root / "bench" / "results"
    assert subprocess.run(["git", "check-ignore", "-q", str(file)], cwd=root, check=False).returncode == 0
    assert subprocess.run(["git", "check-ignore", "-q", str(file.parents[1] / "speed.json")], cwd=root).returncode == 1
