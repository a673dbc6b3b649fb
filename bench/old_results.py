"""Reads the shapes of results that versions before the rows of subject, contestant and quantity have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarlm.bench.result import Result
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS

Old = Mapping[str, Any]
_BY_AGE_SINCE = "2026-11-27"
_FIGURES: tuple[str, ...] = (
    "kl_mean",
    "kl_median",
    "kl_90th_percentile",
    "kl_99th_percentile",
    "kl_999th_percentile",
    "kl_max",
)
_FIGURES += ("same_top1", "draft_acceptance")


def rows_of(measured: Old, result: Result) -> None:
    """Add the rows of an older file to `result`, whose fields are the file's."""
    if "contestants" in measured:
        _speed(measured, result)
    elif "theirs" in next(iter(measured.get("rows", ())), {}):
        _embeddings(measured, result)
    elif measured.get("benchmark") == "gpu":
        _gpu(measured, result)
    elif "latencies" in measured or "turns" in measured or "rounds" in next(iter(measured.get("rows", ())), {}):
        _serving(measured, result)
    elif "snapshots" in measured:
        _snapshots(measured, result)
    elif "exact_perplexity" in measured:
        _quality(measured, result)


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


def _gpu(measured: Old, result: Result) -> None:
    for row in measured.get("rates", ()):
        _gpu_rate(result, row["kind"], row["tokens"], f"{row['engine']} {row['cache_type']}", row["runs"])
    for row in measured.get("prompts", ()):
        who, subject = f"polarlm {row['cache_type']}", f"prompt of {row['tokens']:,}"
        times = {name: row[name] or None for name in ("seconds", "device")}
        result.add_all(subject, who, times, tokens=row["tokens"])
        if row["seconds"] and "tokens/s" not in result.figures(subject, who):
            _gpu_rate(result, "prompt", row["tokens"], who, [row["tokens"] / row["seconds"]])
    for row in measured.get("sequences", ()):
        more = {name: row[name] for name in ("sequences", "prompt", "answer")}
        times = {name: row[name] for name in ("first", "seconds", "step")}
        result.add_all(f"{row['sequences']} sequences", f"{row['engine']} {row['cache_type']}", times, **more)
    for row in measured.get("server", ()):
        more = {name: row[name] for name in ("clients", "prompt", "answer")}
        result.add("server", "polarlm", "tokens/s", value=row["tokens_per_second"], **more)
        for name, old in (("first token", "first_token"), ("between two tokens", "between_tokens")):
            result.add("server", "polarlm", name, row[old], value=row[old][0])
    for row in measured.get("limits", ()):
        result.add("device", "copy", "bytes/s", value=row["copy"])
        result.add("device", "bf16 product", "FLOP/s", value=row["gemm"])
    for row in (*measured.get("attention_peers", ()), *measured.get("attention", ())):
        more = {name: row[name] for name in ("context", "batch")}
        subject, who = f"attention, {row['context']} × {row['batch']}", row.get("name") or row["cache_type"]
        result.add(subject, who, "seconds", value=row["seconds"], failure=row.get("note"), **more)
        result.add_all(subject, who, {name: row.get(name) for name in ("bytes", "error")})
    for row in measured.get("matrices", ()):
        subject, why = f"product of {row['name']}, {row['weights']}", row.get("note")
        result.add(subject, str(row["rows"]), "seconds", value=row["seconds"], failure=why, bytes=row["bytes"])
    for row in measured.get("encoding", ()):
        who, more = row["cache_type"], {"blocks": row["blocks"]}
        result.add(f"encoding {row['blocks']}", who, "seconds", value=row["seconds"], **more)


def _gpu_rate(result: Result, kind: str, tokens: int, who: str, runs: Sequence[float]) -> None:
    subject = f"{kind} {'at' if kind == 'generation' else 'of'} {tokens:,}"
    result.add(subject, who, "tokens/s", runs, section=kind, tokens=tokens)


_WAITS = {
    "first_token_seconds": "first token",
    "between_tokens_seconds": "between two tokens",
    "request_seconds": "whole answer",
    "behind_arrival_seconds": "until a client was free",
}


def _serving(measured: Old, result: Result) -> None:
    if "load" in measured:
        result.about["load_options"] = result.about.pop("load")
        _load(measured, result, "polarlm")
    for peer in measured.get("peers", ()):
        threads = f", {counted(peer['threads'], 'thread')}" if "threads" in peer else ""
        _load(peer, result, f"{peer['name']} {peer.get('version', '')}".rstrip() + threads)
    for when, turns in measured.get("turns", {}).items():
        _turns(result, when, "polarlm", turns)
    for row in measured.get("rows", ()):
        turns, who = row["rounds"][-1], row["cache_type"] + (" and a disk" if row["disk"] else "")
        _turns(result, f"{len(turns)} conversations, {row['times']:g}×", who, turns)


def _load(measured: Old, result: Result, who: str) -> None:
    result.add("load", who, "tokens/s", value=measured.get("tokens_per_second"), failure=measured.get("failure"))
    if "failure" not in measured:
        result.add("load", who, "errors", value=sum(measured["errors"].values()), kinds=measured["errors"])
        counts = {"requests/s": "requests_per_second", "prompt tokens": "prompt_tokens", "cached": "prefix_hit_rate"}
        counts |= {"seconds": "seconds", "requests": "requests", "held": "peak_blocks", "running": "peak_running"}
        result.add_all("load", who, {name: measured.get(old) for name, old in {**counts, "blocks": "blocks"}.items()})
        for old, name in _WAITS.items():
            result.add("load", who, name, measured["latencies"][old]["percentiles"])


def _turns(result: Result, subject: str, who: str, turns: Sequence[Old]) -> None:
    found = [turn["cached_from"] for turn in turns]
    result.add(subject, who, "first token", [turn["seconds"] for turn in turns], cached_from=found)
    result.add(subject, who, "prompt tokens", [turn["prompt_tokens"] for turn in turns])


def _quality(measured: Old, result: Result) -> None:
    """Presets were of blocks that are all alike before _BY_AGE_SINCE; the model was named by its file."""
    result.about["model"] = measured["model"].removesuffix(f".{measured['weights']}")
    types = result.about["types"] = dict[str, dict[str, str]]()
    for row in measured["rows"]:
        name, scoring = row["type"], row["scored_as"]
        if measured["date"] < _BY_AGE_SINCE and name in PRESETS:
            name = "/".join(PRESETS[name].alike)
        who = name if scoring == "as served" else f"{name}, {scoring}"
        types[who] = {"type": name, "pair": row.get("pair", name.removesuffix(":plain")), "scored_as": scoring}
        errors = {"perplexity": row.get("perplexity_error"), **(row.get("errors") or {})}
        _figures(result, "text", who, row, errors, ("perplexity", "nll_per_token", "bits_per_value"))
        for one in row.get("by_position", ()):
            more = {name: one[name] for name in ("start", "end", "positions")}
            errors = {"kl_mean": one.get("kl_error"), "same_top1": one.get("top1_error")}
            _figures(result, f"positions {one['start']:,} to {one['end'] - 1:,}", who, one, errors, **more)
        if answer := row.get("answer"):
            _figures(result, "texts of its own", who, answer, answer["errors"] or {}, ("tokens",))
        if speed := row.get("speed"):
            result.add_all("speed", name, {kind: speed[kind] for kind in ("prompt", "generation")})
        if (fit := row.get("fit")) and not fit["problem"]:
            result.add_all("room", name, {kind: fit[kind] for kind in ("bytes_per_token", "tokens")})


def _snapshots(measured: Old, result: Result) -> None:
    for row in measured["rows"]:
        result.add_all("snapshot", row["type"], {name: row[name] for name in ("bytes", "bits")})
        for one in row["distances"]:
            subject, errors = f"tokens after it: {one['tokens']}", one["errors"] or {}
            _figures(result, subject, row["type"], one, errors, tokens=one["tokens"])


def _figures(
    result: Result, subject: str, who: str, row: Old, errors: Old, names: Sequence[str] = (), **more: Any
) -> None:
    for name in (*_FIGURES, *names):
        if row.get(name) is not None:
            result.add(subject, who, name, value=row[name], error=errors.get(name), **more)


def _start(result: Result, subject: str, row: Old, figures: Old) -> None:
    result.add(subject, _who(row), "seconds", figures.get("runs", ()), failure=row.get("failure"))
    result.add_all(subject, _who(row), {**figures.get("parts", {}), **figures.get("memory", {})})


def _who(row: Old) -> str:
    return f"{row['engine']} {row['cache']}"
