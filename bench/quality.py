"""`python -m bench.quality`: what each cache type costs in perplexity and in divergence from full precision.

A text is cut into consecutive windows of tokens, and every token of a window is predicted from those before it. "As
served" is what steps see: complete blocks as codes, the first and the current one exact. "Every token coded" reads
the current block as codes too. The reference is a plain prefill in float32 that never meets a code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import report
from bench.command import TYPES_HELP, WEIGHTS_HELP, CacheType, at_least, cache_types, note, run
from bench.divergence import Divergence, compare, perplexity
from engine import Engine
from engine.config import setting
from engine.flags import FlagError, parse

# The name of a way of scoring → `every_token_coded` of Engine.score.
SCORINGS = {"as served": False, "every token coded": True}


@dataclass(frozen=True)
class Options:
    """What is scored, and with which cache types."""

    text: str | None = setting(None, "--text", metavar="FILE", help="UTF-8 text to score; this flag is needed")
    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    types: str = setting("f16,polarquant", "--types", metavar="TYPES", help=TYPES_HELP)
    windows: int = setting(4, "--windows", metavar="N", help="windows to score at most, from the start of the text")
    window: int = setting(2048, "--window", metavar="N", help="tokens in a window, the one that starts it included")
    key_conditioning: bool = setting(
        True, "--no-key-conditioning", help="quantize the keys of every type as they come, as :plain does for one"
    )
    output: str | None = setting(
        None, "--output", metavar="FILE", help="where the JSON goes; else bench/results/quality-<model>-<date>.json"
    )


@dataclass(frozen=True)
class Row:
    """Figures of one cache type, scored in one way, over all windows. `type` is the label of a CacheType."""

    type: str
    bits_per_value: float  # of complete blocks, as stored
    scored_as: str
    perplexity: float
    nll_per_token: float
    kl_mean: float  # nats
    kl_99th_percentile: float
    same_top1: float  # share of positions


@dataclass(frozen=True)
class Quality:
    """A whole measurement."""

    scored_tokens: int
    exact_perplexity: float  # of the plain prefill
    rows: list[Row]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the JSON, prints the table; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run(lambda: _measure_and_report(argv))


def _measure_and_report(argv: Sequence[str]) -> None:
    (options,) = parse(
        argv,
        {"Quality": Options},
        prog="python -m bench.quality",
        description="Perplexity, and divergence from full precision, of each cache type on a text.",
        checks={"windows": at_least(1), "window": at_least(2)},
    )
    types = cache_types(options.types, key_conditioning=options.key_conditioning)
    text = _read(options.text)
    with load_exact(options.weights, options.window) as exact:
        output = report.output_path(options.output, "quality", exact.model.name)
        if options.window > exact.model.config.max_context:
            raise FlagError(
                f"--window {options.window} is more than the {exact.model.config.max_context} tokens of context that "
                f"{exact.model.name} has"
            )
        cut = windows(exact.tokenize(text), options.window, exact.model.tokenizer.bos_id)[: options.windows]
        if not cut:
            raise FlagError(f"--text {options.text} is too short: there is no token to predict")
        quality = measure(exact, types, cut)
        about = {"model": exact.model.name, "weights": exact.model.dtype, "text": Path(str(options.text)).name}
    size = {"window": options.window, "windows": len(cut)}
    report.write(output, "quality", argv, {**about, **size, **asdict(quality)})
    note(f"Written to {output}")
    print(
        f"{about['model']} ({about['weights']} weights, float32 arithmetic) on {about['text']}: {len(cut)} windows of "
        f"up to {options.window} tokens, {quality.scored_tokens} tokens scored.\n"
        "KL: of the float32 prefill's distributions against the cache type's, nats. Bits/value: of complete blocks.\n"
    )
    print(format_table(quality))


def _read(file: str | None) -> str:
    """The text of --text with plain line ends. Raises FlagError."""
    if file is None:
        raise FlagError("--text is missing: give a UTF-8 text file to score, such as the test part of WikiText-2")
    try:
        return Path(file).read_text(encoding="utf-8")  # universal newlines: CRLF becomes LF
    except OSError as error:
        raise FlagError(f"--text {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FlagError(f"--text {file} is not UTF-8 text") from None


def windows(ids: Sequence[int], window: int, bos_id: int | None) -> list[list[int]]:
    """Consecutive windows of at most `window` ids; the last may be shorter, and each has an id to predict.

    With a BOS every window begins with one and has one text id less, so that every text id is predicted; without, the
    first id of a window is only read.
    """
    start = [] if bos_id is None else [bos_id]
    step = window - len(start)
    cut = [[*start, *ids[first : first + step]] for first in range(0, len(ids), step)]
    return [one for one in cut if len(one) >= 2]


def load_exact(weights: str | None, window: int) -> Engine:
    """An engine that scores up to `window` tokens without a code: all are in the first block, which stays exact."""
    return Engine.load(
        weights,
        verbose=note,
        cache_type_k="f16",
        cache_type_v="f16",
        ctx_size=window,
        block_size=-(-window // 4) * 4,
        kept_sequences=0,
    )


def measure(exact: Engine, types: Sequence[CacheType], cut: Sequence[Sequence[int]]) -> Quality:
    """Score the windows `cut` (ids, BOS included) with every type. `exact` is an engine of `load_exact`.

    Each type gets an engine of its own, one after the other, and exact logits are computed again for each: two sets of
    logits (window, V) float32 are held at a time, and two copies of the weights. Raises FlagError or EngineError.
    """
    for cache_type in types:
        cache_type.check(exact.model.config.head_dim)
    rows: list[Row] = []
    with tqdm(total=len(types) * len(cut) * (1 + len(SCORINGS)), desc="Scoring", unit="window") as bar:
        for cache_type in types:
            bar.set_postfix_str(cache_type.label)
            exact_logprobs, of_type = _measure_type(exact, cache_type, cut, bar.update)
            rows += of_type
    return Quality(len(exact_logprobs), perplexity(exact_logprobs), rows)


@dataclass(frozen=True)
class _Scored:
    """One window, scored in one way: what every predicted token got."""

    logprobs: np.ndarray  # (T − 1,) float32
    divergence: Divergence


def _measure_type(
    exact: Engine, cache_type: CacheType, cut: Sequence[Sequence[int]], progress: Callable[[], Any]
) -> tuple[np.ndarray, list[Row]]:
    """Exact log-probabilities of every predicted token, and the type's rows."""
    exact_logprobs: list[np.ndarray] = []
    scored: dict[str, list[_Scored]] = {name: [] for name in SCORINGS}
    with Engine.load(
        exact.model.path, ctx_size=max(map(len, cut)), kept_sequences=0, **cache_type.settings()
    ) as engine:
        for ids in cut:
            reference = exact.score(ids)
            exact_logprobs.append(reference.logprobs)
            progress()
            for name in SCORINGS:
                scored[name].append(_score(engine, ids, name, reference.logits))
                progress()
            del reference  # its logits, before the next ones are made
        bits = engine.cache_stats().bits_per_value
    return np.concatenate(exact_logprobs), [_row(cache_type, bits, name, scored[name]) for name in SCORINGS]


def _score(engine: Engine, ids: Sequence[int], scoring: str, exact_logits: np.ndarray) -> _Scored:
    """The logits behind the last id predict nothing of the text and are left out."""
    score = engine.score(ids, every_token_coded=SCORINGS[scoring])
    return _Scored(score.logprobs, compare(exact_logits[:-1], score.logits[:-1]))


def _row(cache_type: CacheType, bits_per_value: float, scoring: str, scored: Sequence[_Scored]) -> Row:
    logprobs = np.concatenate([window.logprobs for window in scored])
    kl = np.concatenate([window.divergence.kl for window in scored])
    return Row(
        type=cache_type.label,
        bits_per_value=bits_per_value,
        scored_as=scoring,
        perplexity=perplexity(logprobs),
        nll_per_token=float(-np.mean(logprobs, dtype=np.float64)),
        kl_mean=float(kl.mean()),
        kl_99th_percentile=float(np.quantile(kl, 0.99)),
        same_top1=float(np.mean(np.concatenate([window.divergence.same_top1 for window in scored]))),
    )


def format_table(quality: Quality) -> str:
    """All figures; the change of perplexity is against the float32 prefill."""
    header = ("cache type", "scored", "bits/value", "PPL", "change", "KL mean", "KL 99 %", "same top-1")
    exact = ("float32 prefill", "exact", "—", f"{quality.exact_perplexity:.3f}", "—", "0", "0", "100.0 %")
    rows = [
        (
            row.type,
            row.scored_as,
            f"{row.bits_per_value:.3f}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / quality.exact_perplexity - 1):+.2f} %",
            _nats(row.kl_mean),
            _nats(row.kl_99th_percentile),
            f"{100 * row.same_top1:.1f} %",
        )
        for row in quality.rows
    ]
    return report.table(header, [exact, *rows])


def _nats(kl: float) -> str:
    return f"{kl:.1e}" if kl < 1e-3 else f"{kl:.4f}"


if __name__ == "__main__":
    sys.exit(main())
