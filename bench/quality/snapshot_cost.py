"""`polarlm quality --state`: what coded snapshots of recurrent layers cost on a model; it writes one page."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.bench.quality import snapshots
from polarlm.bench.quality.divergence import Divergence
from polarlm.bench.quality.inputs import PROGRAM, QualityConfig, name_of_text, opened, page_file, read_text
from polarlm.bench.quality.scores import windows
from polarlm.bench.quality.snapshots import AFTER, SNAPSHOT
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
from polarlm.engine.quantization.snapshot_codes import ALL, EXACT
from polarlm.model_loaders.config import ModelConfig, Recurrent

_WINDOW = 8 * snapshots.LENGTH  # tokens, as far as the model's context allows
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
    with opened(options) as model:
        _check(model.config, model.name)
        named = name_of_text(str(options.text))
        writer = Writer(page_file(options.output, f"{model.name} state {named}"), "quality", argv, program=PROGRAM)
        ops = arithmetic(model.source, options.threads)
    window = min(_WINDOW, model.config.max_context)
    note(f"Loading {model.name}")
    parts = assemble(settle(model.path, None, {**snapshots.SETTINGS, "ctx_size": window}), note, ops=ops)
    about = {"model": model.name, "weights": model.dtype, "text": named, **model.digest, **digest_of_text(text)}
    about |= {"arithmetic": "float32" if ops.backend == "numpy" else "compiled kernels", "window": window}
    result, divergences = Result(about), list[dict[str, Divergence]]()

    def write(complete: bool) -> bool:
        """Write the JSON, and the page of an incomplete result, once there is a snapshot."""
        if not divergences:
            return False
        result.about |= {"snapshots": len(divergences), "seconds": round(runner.seconds, 1)}
        snapshots.add_rows(result, parts.model, _CODINGS, divergences)
        writer.write(result, complete=complete)
        if not complete:
            report_of(result).write_page(writer.path.with_suffix(".html"))
        return True

    runner = Runner(60 * options.minutes, write, clock)
    note(f"{len(_CODINGS)} state types for {duration(runner.left())} at most; Ctrl-C keeps the figures")
    try:
        with runner.kept():
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
    if config.max_context < 2 * snapshots.LENGTH:
        raise FlagError(f"--state needs {2 * snapshots.LENGTH} tokens of context, and {name} has {config.max_context}")


def _continue_texts(
    parts: Parts, text: str, window: int, divergences: list[dict[str, Divergence]], runner: Runner
) -> None:
    """Add the divergences after each snapshot of the text, while there is time. Raises FlagError."""
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
                runner.keep()
                if not runner.left():
                    return


def table_of(result: Result) -> Table:
    """A line for each type and distance; one for exact snapshots, which have no errors."""
    lines: list[tuple[str, Figures]] = []
    for subject, name, figures in result.parts(AFTER):
        tokens = float(figures["kl_mean"].more["tokens"])
        if name != EXACT.name or tokens == snapshots.LENGTH:
            size = result.figures(SNAPSHOT, name)
            lines.append((name, {**size, "tokens": Row(subject, name, "tokens", value=tokens), **figures}))
    return Table.of("state type", COLUMNS, lines)


def report_of(result: Result) -> Report:
    float32 = result["arithmetic"] == "float32"
    arithmetic = "float32" if float32 else "compiled kernels (the weights as float32 do not fit)"
    length, count = snapshots.LENGTH, f"{result['snapshots']:,} snapshots"
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
