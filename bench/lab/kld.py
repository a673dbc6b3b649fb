"""`python -m polarlm.bench.lab.kld FILE`: cache types against full precision from a file that llama.cpp's
`llama-perplexity --kl-divergence-base` writes.

A file has the tokens of a text in windows of the same length, and for the second half of each window the distribution
of the token after it:

| bytes | what |
|---|---|
| 8 | `_logits_` |
| 4 × 3 | tokens of a window n, vocabulary V, number of windows, as int32 |
| 4·n·windows | the tokens of the text, as int32 |
| 2·(V + 4) for each row, V rounded up to even | scale and least log-probability as float32, V codes as uint16 |

A window has n − 1 − ⌊n/2⌋ rows, a row for each token from ⌊n/2⌋ on but the last; the log-probability of a token is
least + scale · code. Log-probabilities more than 16 below the largest are stored as if they were 16 below. All numbers
are little-endian. Where a model begins texts with BOS, the first token of a window is read as BOS, whatever it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import TYPES_HELP, CacheType, at_least, cache_types
from polarlm.bench.quality.divergence import Divergence, add_figures, joined, softmax
from polarlm.bench.quality.inputs import Model, open_model, page_file
from polarlm.bench.quality.scores import TEXT
from polarlm.bench.quality.states import logits_of, served_states
from polarlm.bench.quality.survey import arithmetic
from polarlm.bench.quality.tables import DIVERGENCES, TYPE
from polarlm.bench.report import Report, Section, Table, provenance
from polarlm.bench.result import Result, ResultWriter
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import AS_STORED, hub_setting, model_setting, setting
from polarlm.engine.loading.assembly import assemble, replace_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.sizes import weight_format
from polarlm.engine.model.forward import Transformer

LEAST_STORED = -16.0
"""Nats: what is less likely is not compared with a file's log-probabilities."""
_MAGIC = b"_logits_"
_HEAD = len(_MAGIC) + 12
_LEAST_WINDOW = 4  # tokens: a window of three has no rows


@dataclass(frozen=True)
class Options:
    """The flags."""

    file: str = setting("", "FILE", help="log-probabilities, as llama-perplexity --kl-divergence-base writes them")
    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    types: str = setting("f16,balanced", "--types", metavar="TYPES", help=TYPES_HELP)
    weight_type: str = setting(
        AS_STORED, "--weight-type", metavar="TYPE", help="convert the weights, as the engine does"
    )
    output: str | None = setting(None, "--output", "-o", metavar="FILE", help="where the page goes, and its JSON")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads; 0 as in the chat")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the page and its JSON, prints the table."""
    (options,) = parse(
        argv,
        {"Log-probabilities": Options},
        prog="python -m polarlm.bench.lab.kld",
        description="Cache types against the log-probabilities of a file.",
        checks={"threads": at_least(0)},
    )
    with open_model(options.weights, options.hf_repo) as model:
        base, types = _base_of(options.file, model), cache_types(options.types)
        writer = ResultWriter(page_file(options.output, f"{model.name} {Path(options.file).stem}"), "lab.kld", argv)
        result = Result({"model": model.name, "weights": model.dtype, "base": options.file, **model.digest})
        _score(result, options, model, base, types)
    writer.write(result, complete=True)
    lines = ((who, figures) for _, who, figures in result.parts(TEXT))
    sections = [Section("", [Table.of(TYPE, DIVERGENCES, lines)], "The second half of each window is scored.")]
    Report(f"{model.name} against {options.file}", "", sections, provenance(result, is_timed=False)).show(writer.path)


def _score(result: Result, options: Options, model: Model, base: KldFile, types: Sequence[CacheType]) -> None:
    """Add the figures of each type. Raises FlagError or EngineError."""
    length = base.ids.shape[1]
    converted = weight_format(settle(None, None, {"weight_type": options.weight_type}))
    ops = arithmetic(model.source, options.threads, converted)
    settings: dict[str, Any] = {"ctx_size": length, "kept_sequences": 0, "parallel": 1, "input_bits": "16"}
    settings["weight_type"] = options.weight_type
    note(f"Loading {model.name}")
    parts = assemble(settle(model.path, None, {**settings, "cache_type": "f16"}), note, ops=ops)
    cut = windows(base.ids, parts.source.tokenizer.bos_id)
    try:
        with counting("Scoring", "window", len(types) * len(cut)) as count:
            for one in types:
                config = settle(None, None, {**settings, **one.settings()})
                other = replace_cache(parts, config, note, encoding=one.encoding)
                scores = []
                for number, window in enumerate(cut):
                    scores.append(divergence_from(base, number, other.model, window))
                    count(one.label)
                add_figures(result, TEXT, one.label, scores)
                result.add(TEXT, one.label, "bits_per_value", value=other.plan.shape.bits_of_text(length))
    finally:
        parts.close()


def divergence_from(base: KldFile, window: int, model: Transformer, ids: Sequence[int]) -> Divergence:
    """The divergence of a model's steps from a file's rows of a window, ids (T,), as `llama-perplexity --kl-divergence`
    computes it."""
    hidden = served_states(model, ids)[base.first : -1]
    parts, first = [], 0
    for logits in logits_of(model, hidden):
        parts.append(compare_stored(base.logprobs(window, first, first + len(logits)), logits))
        first += len(logits)
    return joined(parts)


def compare_stored(log_p: np.ndarray, logits: np.ndarray) -> Divergence:
    """The divergence of `logits` (T, V) float32 from log-probabilities (T, V) float32 of a file.

    A file has log-probabilities in 16 bits, and none below −16. These tokens are left out, and the others'
    probabilities add up to 1 but for the rounding. So a sum can be slightly negative.
    """
    stored, (log_q, q) = log_p.astype(np.float64), softmax(logits)
    p = np.exp(stored)
    kl = (p * (stored - log_q)).sum(axis=-1, where=stored > LEAST_STORED)
    return Divergence(kl, log_p.argmax(axis=-1) == logits.argmax(axis=-1), np.minimum(p, q).sum(axis=-1))


def _base_of(path: str, model: Model) -> KldFile:
    """Open a file for a model. Raises EngineError, and FlagError if it is of another one."""
    base, config = read(path), model.config
    if base.vocabulary != config.vocab_size:
        raise FlagError(
            f"{path} is of a model with {base.vocabulary:,} tokens in its vocabulary, and {model.name} has "
            f"{config.vocab_size:,}"
        )
    if base.ids.shape[1] > config.max_context:
        raise FlagError(
            f"{path} has windows of {base.ids.shape[1]:,} tokens, and {model.name} a context of {config.max_context:,}"
        )
    return base


def windows(ids: np.ndarray, bos_id: int | None) -> list[list[int]]:
    """The windows of a file's ids (windows, tokens) as the model reads them: BOS replaces the first id."""
    cut = [window.tolist() for window in ids]
    return cut if bos_id is None else [[bos_id, *window[1:]] for window in cut]


# -- the file ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KldFile:
    """An open file. Rows are mapped, not read."""

    path: Path
    vocabulary: int
    ids: np.ndarray  # (windows, tokens) int32, the text's
    codes: np.ndarray  # (windows, rows, 4 + V or one more) uint16, the first four two float32

    @property
    def first(self) -> int:
        """The position in a window whose row is the first."""
        return self.ids.shape[1] // 2

    def logprobs(self, window: int, first: int, last: int) -> np.ndarray:
        """Log-probabilities (last − first, V) float32 of rows of a window."""
        rows = self.codes[window, first:last]
        heads = np.ascontiguousarray(rows[:, :4]).view("<f4")
        return heads[:, :1] * rows[:, 4 : 4 + self.vocabulary].astype(np.float32) + heads[:, 1:]


def read(path: str | Path) -> KldFile:
    """Open a file. Raises EngineError with a sentence for one that cannot be read, or is not a whole file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if len(head) < _HEAD or not head.startswith(_MAGIC):
                raise EngineError(
                    f"{path} is no file of log-probabilities: llama-perplexity --kl-divergence-base writes them"
                )
            tokens, vocabulary, windows = (int(number) for number in np.frombuffer(head, "<i4", 3, len(_MAGIC)))
            if tokens < _LEAST_WINDOW or vocabulary < 1 or windows < 1:
                raise EngineError(
                    f"{path} is damaged: it names {windows} windows of {tokens} tokens, and a vocabulary of "
                    f"{vocabulary}"
                )
            rows, words = _rows(tokens), _words(vocabulary)
            if size != (expected := nbytes(windows, tokens, vocabulary)):
                raise EngineError(
                    f"{path} is damaged: it has {size:,} bytes, and {windows} windows of {tokens} tokens take "
                    f"{expected:,}; let llama-perplexity write it to its end"
                )
            ids = np.frombuffer(file.read(4 * windows * tokens), "<i4").reshape(windows, tokens)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise EngineError(f"{path} is damaged: it has token ids outside of its vocabulary of {vocabulary}")
    codes = np.memmap(path, "<u2", "r", _HEAD + ids.nbytes, (windows, rows, words))
    return KldFile(path, vocabulary, ids, codes)


def nbytes(windows: int, tokens: int, vocabulary: int) -> int:
    """The bytes of a file."""
    return _HEAD + windows * (4 * tokens + 2 * _rows(tokens) * _words(vocabulary))


def _rows(tokens: int) -> int:
    return tokens - 1 - tokens // 2


def _words(vocabulary: int) -> int:
    return 4 + vocabulary + vocabulary % 2


if __name__ == "__main__":
    sys.exit(main())
