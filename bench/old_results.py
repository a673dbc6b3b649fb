"""Reads the shapes of results that versions before the rows of subject, contestant and quantity have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polarlm.bench.result import Result

Old = Mapping[str, Any]


def rows_of(measured: Old, result: Result) -> None:
    """Add the rows of an older file to `result`, whose fields are the file's."""
    if "contestants" in measured:
        _speed(measured, result)
    elif "theirs" in next(iter(measured.get("rows", ())), {}):
        _embeddings(measured, result)


def _speed(measured: Old, result: Result) -> None:
    for row in measured["rows"]:
        for cell in row["cells"]:
            who, more = _who(cell), {"section": row["section"], "tokens": row["tokens"]}
            more |= {name: cell[name] for name in ("threads", "tried") if name in cell}
            result.add(row["name"], who, "tokens/s", cell.get("runs", ()), failure=cell.get("failure"), **more)
            read = {**cell.get("bytes_read", {}), "bandwidth": cell.get("bandwidth_share")}
            result.add_all(row["name"], who, read)
    for row in measured["memory"]:
        sizes = {name: row.get(name) for name in ("peak", "now", "private", "file")}
        result.add_all("memory", _who(row), sizes | {"cache": row.get("cache_bytes")})
        if "failure" in row:
            result.add("memory", _who(row), "peak", failure=row["failure"])
    for row in measured["starts"]:
        _start(result, "start", row, row)
        if "first" in row:
            result.add_all("the first start ever", _who(row), row["first"])
        if "mapped" in row:
            _start(result, "start with mapped weights", row, row["mapped"])
    result.about["contestants"] = [_who(one) for one in measured["contestants"]]


def _embeddings(measured: Old, result: Result) -> None:
    for row in measured["rows"]:
        more = {name: row[name] for name in ("weights", "texts", "tokens")}
        for who, runs in {"polarlm": row["ours"], **row["theirs"]}.items():
            result.add(f"{row['weights']}, texts of {row['texts']}", who, "tokens/s", runs, value=max(runs), **more)


def _start(result: Result, subject: str, row: Old, figures: Old) -> None:
    result.add(subject, _who(row), "seconds", figures.get("runs", ()), failure=row.get("failure"))
    result.add_all(subject, _who(row), {**figures.get("parts", {}), **figures.get("memory", {})})


def _who(row: Old) -> str:
    return f"{row['engine']} {row['cache']}"
