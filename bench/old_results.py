"""Reads the shapes of results that versions before the rows of subject, contestant and quantity have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polarlm.bench.result import Result
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS

Old = Mapping[str, Any]
Names = dict[str, str]
"""Quantity → its name in the file."""

_BY_AGE_SINCE = "2026-11-27"  # presets were of blocks that are all alike before
_CONTESTANT, _TYPED = "{engine} {cache}", "{engine} {cache_type}"


def rows_of(file: Old, result: Result) -> None:
    """Add the rows of an older file to `result`, whose fields are the file's."""
    rows = file.get("rows", ())
    first: Old = next(iter(rows), {})
    if "contestants" in file:
        _speed(file, result)
    elif "theirs" in first:
        for row in rows:
            for who, runs in {"polarlm": row["ours"], **row["theirs"]}.items():
                more = {name: row[name] for name in ("weights", "texts", "tokens")}
                result.add(f"{row['weights']}, texts of {row['texts']}", who, "tokens/s", runs, value=max(runs), **more)
    elif file.get("benchmark") == "gpu":
        _gpu(file, result)
    elif "latencies" in file or "turns" in file or "rounds" in first:
        _serving(file, result)
    elif "snapshots" in file:
        _add(result, rows, "snapshot", "{type}", _same("bytes bits"))
        for row in rows:
            for one in row["distances"]:
                _figures(result, f"tokens after it: {one['tokens']}", row["type"], one, tokens=one["tokens"])
    elif "exact_perplexity" in file:
        _quality(file, result)


def _same(names: str) -> Names:
    return {name: name for name in names.split()}


def _add(result: Result, rows: Iterable[Old], subject: str, who: str, names: Names, more: str = "") -> None:
    """Add the quantities of rows, whose fields are in the words for subject and contestant. A list is runs."""
    for row in rows:
        about: dict[str, Any] = {name: row[name] for name in more.split() if name in row}
        why = row.get("failure") or row.get("note")
        for quantity, name in names.items():
            value = row.get(name)
            if isinstance(value, list):
                result.add(subject.format(**row), who.format(**row), quantity, value, failure=why, **about)
            elif value is not None or why:
                result.add(subject.format(**row), who.format(**row), quantity, value=value, failure=why, **about)
            why = None  # of the first one


def _speed(file: Old, result: Result) -> None:
    cells = [{**row, **cell} for row in file["rows"] for cell in row["cells"]]
    rates = [cell for cell in cells if cell["section"] != "batches"]
    _add(result, rates, "{name}", _CONTESTANT, {"tokens/s": "runs"}, "section tokens threads tried")
    for cell in (cell for cell in cells if cell["section"] == "batches"):
        count, why = cell["tokens"], cell.get("failure")
        steps = [count / rate for rate in cell["runs"]]
        result.add(f"{count} sequences", _CONTESTANT.format(**cell), "step", steps, failure=why, sequences=count)
    read = [{**cell, **{f"{part}_read": size for part, size in cell.get("bytes_read", {}).items()}} for cell in cells]
    parts = {"weights": "weights_read", "cache": "cache_read", "bandwidth": "bandwidth_share"}
    _add(result, [one for one in read if "bytes_read" in one], "{name}", _CONTESTANT, parts)
    sizes = {**_same("peak now private file"), "cache": "cache_bytes"}
    _add(result, file["memory"], "memory", _CONTESTANT, sizes)
    for row in file["starts"]:
        who = {name: row[name] for name in ("engine", "cache")}
        parts = {**row.get("parts", {}), **row.get("memory", {})}
        names = {"seconds": "runs", **{name: name for name in parts}}
        _add(result, [{**row, **parts, **who}], "start", _CONTESTANT, names)
        if "first" in row:
            names = _same("seconds fit kernels compiling")
            _add(result, [{**row["first"], **who}], "the first start ever", _CONTESTANT, names)
    result.about["contestants"] = [_CONTESTANT.format(**one) for one in file["contestants"]]


def _gpu(file: Old, result: Result) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        return [{**row, "engine": row.get("engine", "polarlm")} for row in file.get(name, ())]

    for kind, subject in (("generation", "generation at {tokens:,}"), ("prompt", "prompt of {tokens:,}")):
        rates = [{**row, "section": kind} for row in rows("rates") if row["kind"] == kind]
        _add(result, rates, subject, _TYPED, {"tokens/s": "runs"}, "section tokens")
    for row in rows("prompts"):
        row = {name: value or None for name, value in row.items()}
        subject, who = f"prompt of {row['tokens']:,}", _TYPED.format(**row)
        if row["seconds"] and "tokens/s" not in result.figures(subject, who):
            about = {"section": "prompt", "tokens": row["tokens"]}
            result.add(subject, who, "tokens/s", [row["tokens"] / row["seconds"]], **about)
        _add(result, [row], subject, who, _same("seconds device"), "tokens")
    _add(
        result,
        rows("sequences"),
        "{sequences} sequences",
        _TYPED,
        _same("first seconds step"),
        "sequences prompt answer",
    )
    waits = {"tokens/s": "tokens_per_second", "first token": "first_token", "between two tokens": "between_tokens"}
    _add(result, rows("server"), "server", "polarlm", waits, "clients prompt answer")
    _add(result, rows("limits"), "device", "copy", {"bytes/s": "copy"})
    _add(result, rows("limits"), "device", "bf16 product", {"FLOP/s": "gemm"})
    place, of = "attention, {context} × {batch}", "context batch"
    _add(result, rows("attention_peers"), place, "{name}", _same("seconds"), of)
    _add(result, rows("attention"), place, "{cache_type}", _same("seconds bytes error"), of)
    _add(result, rows("matrices"), "product of {name}, {weights}", "{rows}", _same("seconds"), "bytes")
    _add(result, rows("encoding"), "encoding {blocks}", "{cache_type}", _same("seconds"), "blocks")


def _serving(file: Old, result: Result) -> None:
    for server in (file, *file.get("peers", ())) if "load" in file else ():
        threads = f", {counted(server['threads'], 'thread')}" if "threads" in server else ""
        who = f"{server['name']} {server.get('version', '')}".rstrip() + threads if "name" in server else "polarlm"
        errors = server.get("errors", {})
        result.add("load", who, "errors", value=sum(errors.values()), kinds=errors)
        names = {"tokens/s": "tokens_per_second", "requests/s": "requests_per_second", "cached": "prefix_hit_rate"}
        names |= {"prompt tokens": "prompt_tokens", "held": "peak_blocks", "running": "peak_running"}
        _add(result, [server], "load", who, names | _same("seconds requests blocks"))
        waits = {"first token": "first_token", "between two tokens": "between_tokens", "whole answer": "request"}
        for name, old in (waits | {"until a client was free": "behind_arrival"}).items():
            if "latencies" in server:
                result.add("load", who, name, server["latencies"][f"{old}_seconds"]["percentiles"])
    if "load" in file:
        result.about["load_options"] = result.about.pop("load")
    for when, turns in file.get("turns", {}).items():
        _turns(result, when, "polarlm", turns)
    for row in file.get("rows", ()):
        turns, who = row["rounds"][-1], row["cache_type"] + (" and a disk" if row["disk"] else "")
        _turns(result, f"{len(turns)} conversations, {row['times']:g}×", who, turns)


def _turns(result: Result, subject: str, who: str, turns: Sequence[Old]) -> None:
    tiers = [turn["cached_from"] for turn in turns]
    result.add(subject, who, "first token", [turn["seconds"] for turn in turns], cached_from=tiers)
    result.add(subject, who, "prompt tokens", [turn["prompt_tokens"] for turn in turns])


def _quality(file: Old, result: Result) -> None:
    result.about["model"] = file["model"].removesuffix(f".{file['weights']}")  # it was named by its file
    types = result.about["types"] = dict[str, dict[str, str]]()
    for row in file["rows"]:
        name, scoring = row["type"], row["scored_as"]
        if file["date"] < _BY_AGE_SINCE and name in PRESETS:
            name = "/".join(PRESETS[name].uniform)
        who = name if scoring == "as served" else f"{name}, {scoring}"
        types[who] = {"type": name, "pair": row.get("pair", name.removesuffix(":plain")), "scored_as": scoring}
        errors = {**(row["errors"] or {}), "perplexity": row.get("perplexity_error")} if "errors" in row else {}
        _figures(result, "text", who, {**row, "errors": errors})
        for one in row.get("by_position", ()):
            errors = {"kl_mean": one.get("kl_error"), "same_top1": one.get("top1_error")}
            more = {name: one[name] for name in ("start", "end", "positions")}
            subject = f"positions {one['start']:,} to {one['end'] - 1:,}"
            _figures(result, subject, who, {**one, "errors": errors}, **more)
        if row.get("answer"):
            _figures(result, "texts of its own", who, row["answer"])
        _add(result, filter(None, [row.get("speed")]), "speed", name, _same("prompt generation"))
        _add(result, filter(None, [row.get("fit")]), "room", name, _same("bytes_per_token tokens"))


_FIGURES = (
    "kl_mean kl_median kl_90th_percentile kl_99th_percentile kl_999th_percentile kl_max same_top1 draft_acceptance"
)


def _figures(result: Result, subject: str, who: str, row: Old, **more: Any) -> None:
    for name in f"{_FIGURES} perplexity nll_per_token bits_per_value tokens".split():
        if row.get(name) is not None:
            error = (row.get("errors") or {}).get(name)
            result.add(subject, who, name, value=row[name], error=error, **({} if name in more else more))
