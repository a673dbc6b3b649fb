"""What coded snapshots of a recurrent state cost: texts continued from them, compared with the same from exact ones.

A text is read as a prompt. Every 256 tokens it is continued by the next 256, once from the exact snapshot that the
prefix cache has of this place, and once from each coding of it. Keys and values are in half precision both times, so
that the state alone differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from polarlm.bench.quality.divergence import Divergence, add_figures
from polarlm.bench.quality.inputs import PROGRAM, QualityConfig, name_of_text, open_model, page_file, read_text
from polarlm.bench.quality.scores import windows
from polarlm.bench.quality.states import divergence, forward, hidden_of
from polarlm.bench.quality.survey import arithmetic
from polarlm.bench.quality.tables import kl_columns, two_digits
from polarlm.bench.report import Column, Report, Section, Table, provenance, size_text
from polarlm.bench.result import Figures, Result, Row, Writer, digest_of_text, duration
from polarlm.bench.runner import Clock, Runner
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.loading.assembly import Parts, assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.quantization.snapshot_codes import ALL, EXACT, SnapshotCodes
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.recurrent.delta import DeltaShape, DeltaState
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders.config import ModelConfig, Recurrent

SNAPSHOT, AFTER = "snapshot", "tokens after it:"  # subjects
DISTANCES = (1, 16, 64, 256)  # tokens after a snapshot
LENGTH = DISTANCES[-1]
SETTINGS = {"cache_type": "f16", "state_type": EXACT.name, "kept_sequences": 2, "parallel": 2}
"""Of the engine that is measured."""


def continuations(
    model: Transformer, ids: Sequence[int], codings: Sequence[SnapshotCodes]
) -> Iterator[dict[str, Divergence]]:
    """Yield, for each snapshot of a text `ids` (T,), the divergence of LENGTH tokens after it by coding.

    model: made with SETTINGS. T is at least twice LENGTH.
    """
    store, prefixes = model.store, PrefixCache(model.store)
    prompt = store.new_sequence()
    try:
        while prompt.length + 2 * LENGTH <= len(ids):
            here = prompt.length + LENGTH
            forward(model, store.open(prompt, LENGTH), ids[prompt.length : here])
            prefixes.insert(prompt, ids)
            more = ids[here : here + LENGTH]
            exact = _continue(model, prefixes.match_prefix(ids[:here]), more, EXACT)
            yield {
                one.name: divergence(model, exact, _continue(model, prefixes.match_prefix(ids[:here]), more, one))
                for one in codings
            }
    finally:
        store.release(prompt)


def _continue(model: Transformer, sequence: SequenceKV, ids: Sequence[int], codes: SnapshotCodes) -> np.ndarray:
    """Hidden states (T, E) of `ids` (T,) after a sequence whose last block is a snapshot, coded before it is read."""
    last = sequence.length // model.store.shape.block_size - 1
    kept = list[tuple[DeltaState, list[int], BlockArrays]]()
    for group, table in zip(model.store.groups, sequence.tables, strict=True):
        if isinstance(group, DeltaState):
            block = table.block(last)
            assert block is not None
            kept.append((group, [block], group.read_blocks([block])))
    try:
        for group, blocks, arrays in kept:
            matrices = {place: array for place, array in arrays.items() if place[1] == "matrices"}
            coded = {place: codes.decode(codes.encode(array)) for place, array in matrices.items()}
            group.write_blocks(blocks, {**arrays, **coded})
        return hidden_of(model, sequence, ids)
    finally:
        for group, blocks, arrays in kept:  # others continue from it, too
            group.write_blocks(blocks, arrays)
        model.store.release(sequence)


def add_rows(
    result: Result,
    model: Transformer,
    codings: Sequence[SnapshotCodes],
    divergences: Sequence[Mapping[str, Divergence]],
) -> None:
    """Add the rows of exact snapshots, then of each coding: the bytes of a snapshot, all layers, the bits per number of
    a matrix, and figures of the first tokens after the snapshots, whose errors are over these.

    divergences: what `continuations` yielded.
    """
    store = model.store.shape
    same = Divergence(np.zeros(LENGTH), np.ones(LENGTH, bool), np.ones(LENGTH))
    for codes in (EXACT, *codings):
        shapes = [replace(layer, codes=codes) for layer in store.layers if isinstance(layer, DeltaShape)]
        mixer = shapes[0].mixer
        sizes = codes.fields(mixer.key_dim, mixer.value_dim).values()
        bits = 8 * sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in sizes)
        nbytes = sum(one.quantized_bytes(store.block_size) for one in shapes)
        size = {"bytes": nbytes, "bits": bits / (mixer.key_dim * mixer.value_dim)}
        result.add_all(SNAPSHOT, codes.name, size)
        after = [same if codes == EXACT else each[codes.name] for each in divergences]
        for tokens in DISTANCES:
            add_figures(result, f"{AFTER} {tokens}", codes.name, [one[:tokens] for one in after], tokens=tokens)


_WINDOW = 8 * LENGTH  # tokens, as far as the model's context allows
_CODINGS = [one for one in ALL.values() if one != EXACT]
_EXACT = "that after an exact snapshot"
_MEAN = f"how far the next token's distribution is from {_EXACT}, in nats; 0 is the same"
_AFTER = "the figures beside it are of so many tokens after each snapshot"
COLUMNS = [
    Column.of("one snapshot", "bytes", size_text, "bytes of a snapshot, all layers together"),
    Column.of("bits", "bits", "{:.2f}".format, "for each number of a matrix, scales or norms included"),
    Column.of("tokens after it", "tokens", "{:.0f}".format, _AFTER),
    *kl_columns("token", _MEAN),
    Column.of("same top-1", "same_top1", two_digits, f"tokens for which the most likely one is {_EXACT}"),
]


def measure(options: QualityConfig, argv: Sequence[str], clock: Clock) -> None:
    """Measure for `options.minutes`, write the page and its JSON, also after Ctrl-C, and print the table."""
    text = read_text(str(options.text))
    with open_model(options) as model:
        _check(model.config, model.name)
        text_name = name_of_text(str(options.text))
        writer = Writer(page_file(options.output, f"{model.name} state {text_name}"), "quality", argv, program=PROGRAM)
        ops = arithmetic(model.source, options.threads)
    window = min(_WINDOW, model.config.max_context)
    note(f"Loading {model.name}")
    parts = assemble(settle(model.path, None, {**SETTINGS, "ctx_size": window}), note, ops=ops)
    about = {"model": model.name, "weights": model.dtype, "text": text_name, **model.digest, **digest_of_text(text)}
    about |= {"arithmetic": "float32" if ops.backend == "numpy" else "compiled kernels", "window": window}
    result, divergences = Result(about), list[dict[str, Divergence]]()

    def write(complete: bool) -> bool:
        """Write the JSON, and the page of an incomplete result, once there is a snapshot."""
        if not divergences:
            return False
        result.about |= {"snapshots": len(divergences), "seconds": round(runner.seconds, 1)}
        add_rows(result, parts.model, _CODINGS, divergences)
        writer.write(result, complete=complete)
        if not complete:
            report_of(result).write_page(writer.path.with_suffix(".html"))
        return True

    runner = Runner(60 * options.minutes, write, clock)
    note(f"{len(_CODINGS)} state types for {duration(runner.seconds_left())} at most; Ctrl-C keeps the figures")
    try:
        with runner.final_write():
            _continue_texts(parts, text, window, divergences, runner)
    finally:
        parts.close()
    report_of(result).show(writer.path)


def _check(config: ModelConfig, name: str) -> None:
    if not any(isinstance(layer.mixer, Recurrent) for layer in config.layers):
        raise FlagError(
            f"--state: {name} has no recurrent layers whose snapshots could be coded; without --state, its cache types "
            "are measured"
        )
    if config.max_context < 2 * LENGTH:
        raise FlagError(f"--state needs {2 * LENGTH} tokens of context, and {name} has {config.max_context}")


def _continue_texts(
    parts: Parts, text: str, window: int, divergences: list[dict[str, Divergence]], runner: Runner
) -> None:
    """Add the divergences after each snapshot of the text, while there is time. Raises FlagError."""
    tokenizer = parts.source.tokenizer
    cut = [ids for ids in windows(tokenizer.tokenize(text), window, tokenizer.bos_id) if len(ids) >= 2 * LENGTH]
    if not cut:
        raise FlagError(f"TEXT has fewer than {2 * LENGTH} tokens: give a longer text")
    with counting("Continuing", "snapshot") as count:
        for ids in cut:
            for one in continuations(parts.model, ids, _CODINGS):
                divergences.append(one)
                count("")
                runner.keep()
                if not runner.seconds_left():
                    return


def table_of(result: Result) -> Table:
    """A line for each type and distance; one for exact snapshots, which have no errors."""
    lines: list[tuple[str, Figures]] = []
    for subject, name, figures in result.parts(prefix=AFTER):
        tokens = float(figures["kl_mean"].more["tokens"])
        if name != EXACT.name or tokens == LENGTH:
            size = result.figures(SNAPSHOT, name)
            lines.append((name, {**size, "tokens": Row(subject, name, "tokens", value=tokens), **figures}))
    return Table.of("state type", COLUMNS, lines)


def report_of(result: Result) -> Report:
    float32 = result["arithmetic"] == "float32"
    arithmetic = "float32" if float32 else "compiled kernels (the weights as float32 do not fit)"
    length, count = LENGTH, f"{result['snapshots']:,} snapshots"
    text = (
        f"The text is read as a prompt. Every {length} tokens it is continued by the next {length}, from the exact "
        "snapshot and from each coding of it. The recurrent layers forget the error with every token."
    )
    return Report(
        title=f"What a snapshot costs: {result['model']}",
        lead=f"Measured on {result['text']}, {count}, on {result['date']}",
        partial="" if result["complete"] else "This page is partial: the measurement was interrupted.",
        sections=[Section("All state types", [table_of(result)], text)],
        about=[
            ("model", f"{result['model']}, {result['weights']} weights"),
            ("text", f"{result['text']}: {count} in windows of up to {result['window']:,} tokens"),
            ("arithmetic", f"{arithmetic}; keys and values in half precision"),
            ("time", duration(result["seconds"])),
            *provenance(result, is_timed=False),
        ],
        columns={
            "state type": "how snapshots keep the matrices of recurrent layers; f32 is exact",
            **{column.name: column.says for column in COLUMNS},
        },
        brief=1,
    )
