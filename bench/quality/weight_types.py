"""The cost of a weight type in quality: matrices converted on loading, compared with those that the file stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.quality.divergence import Divergence, compare, perplexity
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.scores import kept_scores, small
from polarlm.engine import EngineError
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import AS_STORED
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.file_matrix import nearest
from polarlm.engine.weight_formats import get
from polarlm.model_loaders.files.weights import WeightSource


@dataclass(frozen=True)
class WeightRow:
    """The figures of one weight type over all windows."""

    type: str
    bits_per_weight: float  # over all matrices with the embedding, in the formats that `type` gives them
    perplexity: float
    kl_mean: float  # divergence from the weights as stored, nats
    kl_99th_percentile: float
    same_top1: float  # share of positions


@dataclass(frozen=True)
class WeightQuality:
    """The results of a measurement. stored_bits, exact_perplexity: of the weights as stored."""

    scored_tokens: int
    stored_bits: float
    exact_perplexity: float
    weight_rows: list[WeightRow]


def chosen_weight_types(text: str) -> list[str]:
    """The distinct weight types in a list separated by commas. Raises FlagError for an unknown one."""
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        try:
            settle(None, None, {"weight_type": name})
        except EngineError as error:
            raise FlagError(str(error).replace("weight_type=", "--weight-types ", 1)) from None
    return names


def measure_weights(
    reference: Reference,
    names: Sequence[str],
    cut: Sequence[Sequence[int]],
    on_progress: Callable[[WeightQuality], None] = lambda quality: None,
) -> WeightQuality:
    """Score the windows `cut` (ids with BOS) with each weight type, and keys and values in full precision.

    on_progress: called after each type with all results so far. Raises EngineError.
    """
    source, rows = reference.model.weights, []
    stored_bits = bits_per_weight(source, AS_STORED)
    expected = kept_scores(reference, cut)
    with tqdm(total=len(names) * len(cut), desc="Scoring", unit="window", disable=None) as bar:
        for name in names:
            bar.set_postfix_str(name)
            exact, given, divergences = [], [], []
            with reference.open_exact(weight_type=name) as engine:
                for window, ids in enumerate(cut):
                    wanted, score = expected(window), engine.score(ids, logits=True)
                    exact.append(wanted.logprobs)
                    given.append(score.logprobs)
                    # The logits after the last id predict nothing of the text.
                    divergences.append(compare(wanted.logits[:-1], score.logits[:-1]))
                    bar.update()
            exact_perplexity = perplexity(np.concatenate(exact))
            rows.append(_row(name, bits_per_weight(source, name), np.concatenate(given), divergences))
            quality = WeightQuality(sum(map(len, exact)), stored_bits, exact_perplexity, list(rows))
            on_progress(quality)
    return quality


def bits_per_weight(source: WeightSource, name: str) -> float:
    """Bits of all matrices, loaded with the weight type `name`, divided by the number of their values."""
    bits = values = 0
    for tensor in source.names():
        if len(shape := source.shape(tensor)) > 1:
            stored = source.stored_dtype(tensor)
            if name == AS_STORED:
                block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored]]
            else:
                format = nearest(get(name), stored, shape[1])
                block, nbytes = format.values, format.nbytes
            bits += 8 * prod(shape) // block * nbytes
            values += prod(shape)
    return bits / values


def _row(name: str, bits: float, logprobs: np.ndarray, divergences: Sequence[Divergence]) -> WeightRow:
    kl = np.concatenate([window.kl for window in divergences])
    return WeightRow(
        type=name,
        bits_per_weight=bits,
        perplexity=perplexity(logprobs),
        kl_mean=float(kl.mean()),
        kl_99th_percentile=float(np.quantile(kl, 0.99)),
        same_top1=float(np.mean(np.concatenate([window.same_top1 for window in divergences]))),
    )


def one_weight_line(row: WeightRow, exact_perplexity: float) -> str:
    """A row as a line of text."""
    change = 100 * (row.perplexity / exact_perplexity - 1)
    return f"{row.type}: {row.bits_per_weight:.2f} bits/weight, perplexity {change:+.2f} %, KL {small(row.kl_mean)}"


def format_weight_table(quality: WeightQuality, stored: str) -> str:
    """A table of all figures. The change of perplexity is relative to the weights as stored. stored: their type."""
    header = ["weight type", "bits/weight", "PPL", "change", "KL mean", "KL 99 %", "same top-1"]
    full = quality.exact_perplexity
    first = (f"as stored ({stored})", f"{quality.stored_bits:.2f}", f"{full:.3f}", "—", "0", "0", "100.0 %")
    rows = [
        (
            row.type,
            f"{row.bits_per_weight:.2f}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / full - 1):+.2f} %",
            small(row.kl_mean),
            small(row.kl_99th_percentile),
            f"{100 * row.same_top1:.1f} %",
        )
        for row in quality.weight_rows
    ]
    return report.table(header, [first, *rows])
