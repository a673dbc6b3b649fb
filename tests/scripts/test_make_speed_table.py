"""The tables and the picture of published measurements of speed, in docs/speed.md and docs/prefix-tiers.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.speed.plot import _lines, draw
from scripts import make_speed_table
from scripts.make_quality_table import with_tables

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
    for name, path in (("ROOT", "."), ("DOCUMENT", "docs/speed.md"), ("RESULTS", "results")):
        monkeypatch.setattr(make_speed_table, name, tmp_path / path)
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def publish(results: Path, name: str, measured: dict[str, Any], kind: str = "speed") -> None:
    (results / f"{kind}-{name}.json").write_text(json.dumps(measured), encoding="utf-8")


def starts(
    model: str, gib: int, ours: float, theirs: float | None, mapped: float | None = None, **changes: Any
) -> dict[str, Any]:
    """A measurement of starts alone, of a file of `gib` GiB. theirs: None for one without the peer; mapped: with mapped
    weights."""
    first = {"seconds": 10 * ours, "fit": 4 * ours, "kernels": 26, "compiling": 2.5}
    memory = {"peak": (gib << 30) + (512 << 20), "weights": gib << 30}
    rows = [{"engine": "polarlm", "median": ours, "runs": [ours] * 3, "memory": memory, "first": first}]
    if mapped is not None:
        rows[0]["mapped"] = {"median": mapped}
    if theirs is not None:
        rows.append({"engine": PEER, "median": theirs, "runs": [theirs] * 3, "memory": {"peak": 2 * gib << 30}})
    changes = {
        "rows": [],
        "memory": [],
        "starts": rows,
        "file_bytes": gib << 30,
        "command": f"polarlm speed -m {model}",
        **changes,
    }
    return measurement("2026-11-23", 0, model=model, **changes)


def test_the_documents_have_the_tables_of_the_published_results() -> None:
    for document, tables in make_speed_table.TABLES.items():
        text = document.read_text(encoding="utf-8")
        assert text == with_tables(text, tables), "run `make readme`"


def test_without_a_measurement_the_pages_say_so(results: Path) -> None:
    publish(results, "stopped", measurement("2026-11-20", 75, complete=False, memory=[]))
    publish(results, "gpu", measurement("2026-11-20", 75, device="cuda"))
    assert make_speed_table.all_tables() == make_speed_table.MISSING


def test_a_cpu_restricted_to_older_instructions_has_tables_of_its_own(results: Path) -> None:
    publish(results, "all", measurement("2026-11-20", 75))
    machine = {**measurement("", 0)["machine"], "restricted_to": "avx2"}
    publish(results, "avx2", measurement("2026-11-21", 100, machine=machine))
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
    source = "medians of 3 runs; threads: 2 for prompts, for steps here 2, llama.cpp 1; measured on 2026-11-20 with"
    assert source in text
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


def test_without_starts_the_pages_say_how_to_measure_them(results: Path) -> None:
    publish(results, "whole", measurement("2026-11-20", 75))
    assert make_speed_table.starts() == make_speed_table.MISSING_STARTS


def test_a_table_of_starts_has_a_line_for_each_file_and_the_smallest_first(results: Path) -> None:
    publish(results, "a", starts("large", 4, 6.0, 4.0, mapped=3.0), "starts")
    publish(results, "b", starts("small", 1, 1.5, 1.0), "starts")
    publish(results, "c", starts("folder", 2, 3.0, None), "starts")
    publish(results, "d", starts("stopped", 2, 3.0, None, complete=False), "starts")
    *lines, _, source, command = make_speed_table.starts().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:7] for row in cells] == [
        ["", "file", "here", "llama.cpp", "times", "mapped", "times"],
        cells[1][:7],  # the rule
        ["small, Q4_1", "1.0 GiB", "1.50 s", "1.00 s", "1.50", "—", "—"],
        ["folder, Q4_1", "2.0 GiB", "3.00 s", "—", "—", "—", "—"],
        ["large, Q4_1", "4.0 GiB", "6.00 s", "4.00 s", "1.50", "3.00 s", "0.75"],
    ]
    assert [row[7:] for row in (cells[0], *cells[2:])] == [
        ["peak", "llama.cpp's peak", "weights", "first ever", "fit", "compiling"],
        ["1.5 GiB", "2.0 GiB", "1.0 GiB", "15.0 s", "6.0 s", "2.5 s"],
        ["2.5 GiB", "—", "2.0 GiB", "30.0 s", "12.0 s", "2.5 s"],
        ["4.5 GiB", "8.0 GiB", "4.0 GiB", "60.0 s", "24.0 s", "2.5 s"],
    ]
    assert source.startswith(
        "On 2 cores of an AMD EPYC, Linux x86_64, 2 threads; llama-cpp-python 0.3.36; medians of 3 "
    )
    assert command == "`polarlm speed -m large`."


def test_a_start_that_failed_has_its_reason_in_the_table(results: Path) -> None:
    failed = starts("small", 1, 1.5, 1.0)
    failed["starts"][1] = {"engine": PEER, "failure": "too little memory"}
    publish(results, "a", failed, "starts")
    cells = [cell.strip() for cell in make_speed_table.starts().splitlines()[2].strip("|").split("|")]
    assert cells[2:10] == ["1.50 s", "too little memory", "—", "—", "—", "1.5 GiB", "—", "1.0 GiB"]


def test_each_machine_has_its_table_of_starts(results: Path) -> None:
    publish(results, "a", starts("small", 1, 1.5, 1.0), "starts")
    other = {"cpu": "Xeon", "cores": 8, "system": "Linux x86_64"}
    publish(results, "b", starts("small", 1, 1.0, 1.0, machine={**other, "restricted_to": "avx2"}), "starts")
    text = make_speed_table.starts()
    assert text.count("| small, Q4_1 |") == 2
    assert "On 2 cores of an AMD EPYC, Linux x86_64, 2 threads" in text
    assert "On 8 cores of an Xeon, Linux x86_64 with avx2 alone, 2 threads" in text
