"""The tables and the picture of published measurements of speed, in the README and docs/speed.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.speed.plot import _lines, draw
from scripts import make_speed_table

PEER = "llama-cpp-python"


def cell(engine: str, cache: str, median: float, **more: Any) -> dict[str, Any]:
    return {"engine": engine, "cache": cache, "threads": 2, "median": median, "runs": [median] * 3, **more}


def measurement(date: str, rate: float, **changes: Any) -> dict[str, Any]:
    read = {"bytes_read": {"weights": 98_000_000, "cache": 4_000_000}, "bandwidth_share": 0.5}
    failed = {"engine": "polarlm", "cache": "f16", "failure": "crashed (SIGSEGV)"}

    def row(section: str, name: str, tokens: int, **more: Any) -> dict[str, Any]:
        cells = [cell("polarlm", "balanced", rate, **more), failed, cell(PEER, "q8_0", 50.0, **more)]
        return {"section": section, "name": name, "tokens": tokens, "cells": cells}

    streams = [
        {"section": "batches", "name": f"steps of {n}", "tokens": n, "cells": [cell("polarlm", "balanced", n**0.5)]}
        for n in (1, 16)
    ]
    memory = {"peak": 3 << 20, "now": 2 << 20, "private": 1 << 20, "file": 1 << 20, "cache_bytes": 512}
    contestants = [("polarlm", "balanced"), ("polarlm", "f16"), (PEER, "q8_0")]
    return {
        "date": date,
        "command": "python -m bench.speed",
        "machine": {"cpu": "AMD EPYC", "cores": 2, "system": "Linux x86_64"},
        "complete": True,
        "model": "SmolLM2-135M-Instruct",
        "weights": "Q4_1",
        "device": "cpu",
        "peer": {"name": PEER, "version_or_absence": "0.3.36"},
        "contestants": [{"engine": engine, "cache": cache} for engine, cache in contestants],
        "threads": {"most": 2, "chosen": {"polarlm": 2, PEER: 1}},
        "rows": [
            row("generation", "generation at 8", 8, **read),
            row("prompt", "prompt of 256", 256),
            row("generation", "generation at 2,048", 2048, **read),
            *streams,
        ],
        "memory": [memory, {"failure": "crashed (SIGSEGV)"}, {"now": 1 << 20}],
        "left_out": [],
        **changes,
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of results of a checkout at tmp_path."""
    for name, path in (("ROOT", "."), ("README", "README.md"), ("DOCUMENT", "docs/speed.md"), ("RESULTS", "results")):
        monkeypatch.setattr(make_speed_table, name, tmp_path / path)
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def publish(results: Path, name: str, measured: dict[str, Any]) -> None:
    (results / f"speed-{name}.json").write_text(json.dumps(measured), encoding="utf-8")


def test_without_a_measurement_the_pages_say_so(results: Path) -> None:
    publish(results, "stopped", measurement("2026-11-20", 75, complete=False))
    publish(results, "gpu", measurement("2026-11-20", 75, device="cuda"))
    assert make_speed_table.headline() == make_speed_table.all_tables() == make_speed_table.MISSING


def test_the_headline_is_the_newest_measurement_of_the_demonstration_model(results: Path) -> None:
    publish(results, "b", measurement("2026-11-20", 75))
    publish(results, "a", measurement("2026-11-21", 100))
    publish(results, "c", measurement("2026-11-22", 1000, model="tinyllama", weights="Q4_K"))
    text = make_speed_table.headline()
    assert [line.strip("|").split("|")[0].strip() for line in text.splitlines()[2:5]] == [
        "generation at 8",
        "generation at 2,048",
        "prompt of 256",
    ]
    assert text.splitlines()[2].split("|")[2:5] == ["  100 (2.00×) ", " crashed (SIGSEGV) ", "           50.0 "]
    assert "**balanced**" in text.splitlines()[0]
    assert "llama.cpp q8_0" in text.splitlines()[0]
    assert "medians of 3 runs; threads: 2 for prompts, for steps here 2, llama.cpp 1; measured on 2026-11-21" in text
    assert "![" not in text


def test_a_cpu_restricted_to_older_instructions_is_not_in_the_headline(results: Path) -> None:
    publish(results, "all", measurement("2026-11-20", 75))
    machine = {**measurement("", 0)["machine"], "restricted_to": "avx2"}
    publish(results, "avx2", measurement("2026-11-21", 100, machine=machine))
    assert "100 (2.00×)" not in make_speed_table.headline()
    assert [line for line in make_speed_table.all_tables().splitlines() if line.startswith("###")] == [
        "### SmolLM2-135M-Instruct, Q4_1",
        "### SmolLM2-135M-Instruct, Q4_1, with avx2 alone",
    ]


@pytest.mark.slow
def test_the_page_has_all_models_with_their_pictures(results: Path) -> None:
    publish(results, "a", measurement("2026-11-22", 1000, model="tinyllama", weights="Q4_K"))
    publish(results, "b", measurement("2026-11-20", 75))
    assert draw(measurement("2026-11-20", 75), results / "speed-b.json") == "Picture: speed-b.png"
    text = make_speed_table.all_tables()
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        "### SmolLM2-135M-Instruct, Q4_1",
        "### tinyllama, Q4_K",
    ]
    assert text.count("(../results/speed-b.png)") == 1
    assert "(results/speed-b.png)" in make_speed_table.headline()
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["generation at 8", "98 + 4 MB, 50%", "crashed (SIGSEGV)", "98 + 4 MB, 50%"] in lines
    assert ["**balanced**", "3.0 MiB", "2.0 MiB", "1.0 MiB", "1.0 MiB", "512 B"] in lines
    assert ["llama.cpp q8_0", "—", "1.0 MiB", "—", "—", "—"] in lines
    assert ["steps of 16", "`balanced`", "4.0", "4.00"] in lines


def test_a_line_of_the_picture_has_a_point_per_context() -> None:
    assert _lines(measurement("2026-11-20", 75)) == {
        ("polarlm", "balanced"): [(8, 75), (2048, 75)],
        ("polarlm", "f16"): [],
        (PEER, "q8_0"): [(8, 50.0), (2048, 50.0)],
    }
