"""Destinations of measurements, results that are read again, and reports."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from polarlm.bench import result
from polarlm.bench.report import Report, Section, Table
from polarlm.bench.result import Output, Result, ResultWriter
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.jit.isa import VARIABLE


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


def test_what_is_written_is_read_with_the_load_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.1, 3.25])
    monkeypatch.setattr(result, "load", lambda: next(loads))
    monkeypatch.delenv(VARIABLE, raising=False)
    file, made = tmp_path / "out.json", Result({"model": "tiny"})
    made.add("prompt of 5", "polarlm f16", "tokens/s", [3, 1, 2], threads=2)
    made.add("prompt of 5", "a peer", "tokens/s", failure="crashed")
    made.add_all("text", "f16", {"kl_mean": 0.0, "bits": None}, start=0)
    ResultWriter(file, "speed", ["-t", "2"]).write(made, complete=True)
    again = result.read(file)
    assert list(again.rows()) == list(made.rows())
    assert [row.value for row in again.rows()] == [2, None, 0]
    assert (again["load"], again["command"]) == ({"before": 0.1, "after": 3.25}, "python -m polarlm.bench.speed -t 2")
    assert result.load_in_words(again).startswith("0.1 before, 3.2 after")


def test_a_page_has_the_tables_of_the_terminal(tmp_path: Path) -> None:
    """Without columns in which nothing was measured; a terminal of few columns has the first ones."""
    table = Table(["type", "KL", "speed", "top-1"], [["f16", "0.1", "—", "9 %"], ["<q4>", "**0.2**", "", "8 %"]])
    sections = [Section("Costs", [table], "± is an error."), Section("Nothing", [Table(["type", "KL"], [])])]
    columns = {"KL": "how far", "speed": "how fast"}
    report = Report("A title", "lead", sections, [("load", "0.1")], ["A note."], "Partial.", columns)
    assert (
        report.terminal()
        == """A title
load: 0.1

Costs

| type |      KL | top-1 |
|:-----|--------:|------:|
| f16  |     0.1 |   9 % |
| <q4> | **0.2** |   8 % |

± is an error.

A note."""
    )
    assert "top-1" not in report.terminal(20)
    report.write_page(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    cells = [html.unescape(cell) for cell in re.findall("<t[hd][^>]*>([^<]*)</t[hd]>", page)]
    assert cells == ["type", "KL", "top-1", "f16", "0.1", "9 %", "<q4>", "0.2", "8 %"]
    for sentence in ("A title", "Partial.", "± is an error.", "A note.", "<dt>load</dt><dd>0.1</dd>"):
        assert page.count(sentence) >= 1, sentence
    assert "how far" in page
    assert "how fast" not in page
