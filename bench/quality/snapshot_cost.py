"""`polarlm quality --state`: what coded snapshots of recurrent layers cost on a model; it writes one page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.command import model_files, model_named
from polarlm.bench.quality import page, snapshots
from polarlm.bench.quality.divergence import Divergence
from polarlm.bench.quality.inputs import QualityConfig, page_file, read_text
from polarlm.bench.quality.scores import windows
from polarlm.bench.quality.survey import arithmetic
from polarlm.bench.quality.tables import kl_cells, two_digits, with_error
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.loading.assembly import Parts, assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.quantization.snapshot_codes import ALL, EXACT
from polarlm.engine.state.plan import format_bytes
from polarlm.model_loaders import load_weights
from polarlm.model_loaders.config import ModelConfig, Recurrent

_WINDOW = 8 * snapshots.LENGTH  # tokens, as far as the model's context allows
_CODINGS = [one for one in ALL.values() if one != EXACT]
# Column → its explanation, for the page and docs/quality.md.
COLUMNS = {
    "state type": "how snapshots keep the matrices of recurrent layers; f32 is exact",
    "one snapshot": "bytes of a snapshot, all layers together",
    "bits": "for each number of a matrix, scales or norms included",
    "tokens after it": "the figures beside it are of so many tokens after each snapshot",
    "KL mean": "how far the next token's distribution is from that after an exact snapshot, in nats; 0 is the same",
    "KL median": "half of the tokens are further off than this, in nats",
    "KL 90 %": "one token in ten is further off than this, in nats",
    "KL 99 %": "one token in a hundred is further off than this, in nats",
    "KL 99.9 %": "one token in a thousand is further off than this, in nats",
    "KL max": "the token that is furthest off, in nats",
    "same top-1": "tokens for which the most likely one is that after an exact snapshot",
}


def measure(options: QualityConfig, argv: Sequence[str], clock: Callable[[], float]) -> None:
    """Measure for `options.minutes`, write the page and its JSON, also after Ctrl-C, and print the table."""
    started = clock()
    text = read_text(str(options.text))
    path, name = model_files(model_named(options.weights, options.hf_repo))
    config, source, dtype = load_weights(path)
    try:
        digests = report.digest_of_model(source.files())
        _check(config, name)
        file = page_file(options.output, f"{name}-state")
        ops = arithmetic(source, options.threads)
    finally:
        source.close()
    window = min(_WINDOW, config.max_context)
    note(f"Loading {name}")
    parts = assemble(settle(path, None, {**snapshots.SETTINGS, "ctx_size": window}), note, ops=ops)
    about = {
        "model": name,
        "weights": dtype,
        "text": "standard input" if options.text == "-" else Path(str(options.text)).name,
        **digests,
        **report.digest_of_text(text),
        "arithmetic": "float32" if ops.backend == "numpy" else "compiled kernels",
        "window": window,
    }

    divergences: list[dict[str, Divergence]] = []
    limit, kept = 60 * options.minutes, -math.inf

    def keep(*, complete: bool) -> dict[str, Any]:
        """Write the page and its JSON, and return what was written."""
        nonlocal kept
        rows = [asdict(row) for row in snapshots.rows_of(parts.model, _CODINGS, divergences)]
        more = {"snapshots": len(divergences), "rows": rows, "seconds": round(clock() - started, 1)}
        whole, program = {**about, **more}, ("polarlm", "quality")
        written = report.write(file.with_suffix(".json"), "quality", argv, whole, complete=complete, program=program)
        _write_page(file, written)
        kept = clock()
        return written

    def go_on() -> bool:
        """Write what there is now and then; whether there is time for more."""
        if clock() - kept >= report.WRITTEN_EVERY:
            keep(complete=False)
        return clock() - started < limit

    note(f"{len(_CODINGS)} state types for {report.duration(limit)} at most; Ctrl-C keeps the figures")
    try:
        try:
            _continue_texts(parts, text, window, divergences, go_on)
        except BaseException:
            if divergences:
                keep(complete=False)
            raise
        result = keep(complete=True)
    finally:
        parts.close()
    print(report.with_origin(report.table(list(COLUMNS), cells(result["rows"])), result))
    note(f"The page: {file}, its figures: {file.with_suffix('.json')}")


def _check(config: ModelConfig, name: str) -> None:
    if not any(isinstance(layer.mixer, Recurrent) for layer in config.layers):
        raise FlagError(
            f"--state: {name} has no recurrent layers whose snapshots could be coded; without --state, its cache types "
            "are measured"
        )
    if config.max_context < 2 * snapshots.LENGTH:
        raise FlagError(f"--state needs {2 * snapshots.LENGTH} tokens of context, and {name} has {config.max_context}")


def _continue_texts(
    parts: Parts, text: str, window: int, divergences: list[dict[str, Divergence]], go_on: Callable[[], bool]
) -> None:
    """Add the divergences after each snapshot of the text, while `go_on` says so. Raises FlagError."""
    tokenizer = parts.source.tokenizer
    cut = [
        ids for ids in windows(tokenizer.tokenize(text), window, tokenizer.bos_id) if len(ids) >= 2 * snapshots.LENGTH
    ]
    if not cut:
        raise FlagError(f"TEXT has fewer than {2 * snapshots.LENGTH} tokens: give a longer text")
    with counting("Continuing", "snapshot") as count:
        for ids in cut:
            for one in snapshots.continuations(parts.model, ids, _CODINGS):
                divergences.append(one)
                count("")
                if not go_on():
                    return


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of cells for each type and distance. rows: `SnapshotRow`s as dictionaries."""
    return [
        [
            row["type"],
            format_bytes(row["bytes"]),
            f"{row['bits']:.2f}",
            f"{one['tokens']}",
            *kl_cells(one),
            with_error(one["same_top1"], (one["errors"] or {}).get("same_top1"), two_digits),
        ]
        for row in rows
        for one in (row["distances"][-1:] if row["type"] == EXACT.name else row["distances"])
    ]


def _write_page(file: Path, result: Mapping[str, Any]) -> None:
    arithmetic = (
        "float32" if result["arithmetic"] == "float32" else "compiled kernels (the weights as float32 do not fit)"
    )
    about = [
        ("model", f"{result['model']}, {result['weights']} weights"),
        (
            "text",
            f"{result['text']}: {result['snapshots']:,} snapshots in windows of up to {result['window']:,} tokens",
        ),
        ("arithmetic", f"{arithmetic}; keys and values in half precision"),
        ("date", f"{result['date']}, {report.duration(result['seconds'])}"),
        ("command", result["command"]),
    ]
    length = snapshots.LENGTH
    text = (
        f"The text is read as a prompt. Every {length} tokens it is continued by the next {length}, from the exact "
        "snapshot and from each coding of it. The recurrent layers forget the error with every token."
    )
    table = list(COLUMNS), cells(result["rows"])
    whole = page.Page(
        title=f"What a snapshot costs: {result['model']}",
        lead=f"Measured on {result['text']}, {result['snapshots']:,} snapshots, on {result['date']}",
        partial="" if result["complete"] else "This page is partial: the measurement was interrupted.",
        sections=[page.Section("All state types", {"Table of all state types": table}, text)],
        about=about,
        origin=report.origin(result),
        columns=COLUMNS,
    )
    page.render(file, whole)
