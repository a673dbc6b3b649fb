"""`python -m polarlm.bench.quality`: perplexity and divergence from full precision of each cache type.

A text is cut into consecutive windows of tokens, and every token of a window is predicted from the earlier ones. "As
served" reads what steps read: complete blocks as codes, the first and the current one in full precision. "Every token
coded" reads the current block as codes, too. The reference is a prefill in float32 without quantization.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, LAYERS_HELP, TYPES_HELP, WEIGHTS_HELP, CacheType, at_least, model_named
from polarlm.bench.quality import angles, needle, peers, plots
from polarlm.bench.quality.arithmetic import (
    ArithmeticRow,
    compiled_ops,
    format_arithmetic_table,
    measure_arithmetic,
    one_arithmetic_line,
)
from polarlm.bench.quality.encoding_cost import LEAST, EncodingCost, format_costs, measure_costs
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.scores import (
    SCORINGS,
    Quality,
    format_table,
    kl_by_position,
    measure,
    one_line,
    passes,
    top1_by_position,
    windows,
)
from polarlm.bench.quality.types import FULL_PRECISION, all_types, chosen_types
from polarlm.bench.quality.weight_types import (
    WeightQuality,
    chosen_weight_types,
    format_weight_table,
    measure_weights,
    one_weight_line,
)
from polarlm.bench.report import Output
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.select import select
from polarlm.engine.cli.commands import note, run
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import setting


@dataclass(frozen=True)
class Options:
    """The flags: the text, the model and the cache types to score."""

    text: str | None = setting(None, "--text", metavar="FILE", help="UTF-8 text to score; this flag is needed")
    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    types: str | None = setting(None, "--types", metavar="TYPES", help=f"{TYPES_HELP}{LAYERS_HELP}; all, if not given")
    windows: int = setting(4, "--windows", metavar="N", help="windows to score at most, from the start of the text")
    window: int = setting(2048, "--window", metavar="N", help="tokens in a window, the one that starts it included")
    key_conditioning: bool = setting(
        True, "--no-key-conditioning", help="quantize keys without conditioning in every type, as :plain does for one"
    )
    ablate: str | None = setting(
        None, "--ablate", metavar="TYPE", help="one type with parts of the encoding switched off, each alone and all"
    )
    key_bias: float = setting(
        0.0, "--key-bias", metavar="X", help="measure the model with X times the keys' RMS added to its keys"
    )
    weight_types: str | None = setting(
        None,
        "--weight-types",
        metavar="TYPES",
        help="measure weight types, such as q8_0,q4_0, in the place of cache types: what converting the weights costs",
    )
    arithmetic: bool = setting(
        False,
        "--arithmetic",
        help="measure what the CPU's compiled kernels cost, next to each cache type: half of a window is a prompt, and "
        "the rest are steps",
    )
    needle: bool = setting(False, "--needle", help="also hide a sentence in the text and ask for it; takes minutes")
    needle_lengths: str = setting(
        "512,1024,2048,4096", "--needle-lengths", metavar="N,N", help="tokens of the prompts that hide one"
    )
    needle_depths: str = setting(
        "0,25,50,75,100", "--needle-depths", metavar="P,P", help="its place in the text, in percent"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes JSON and pictures, prints the tables; returns the exit code."""
    with peers.while_measured():
        return run(_measure_and_report, argv)


def _measure_and_report(argv: Sequence[str]) -> None:
    options, destination = parse(
        argv,
        {"Quality": Options, "Output": Output},
        prog="python -m polarlm.bench.quality",
        description="Perplexity, and divergence from full precision, of each cache type on a text.",
        checks={"windows": at_least(1), "window": at_least(2), "key_bias": _times},
    )
    types = chosen_types(options.types, options.ablate, key_conditioning=options.key_conditioning)
    of_weights = [] if options.weight_types is None else chosen_weight_types(options.weight_types)
    if of_weights and (types or options.needle or options.key_bias):
        raise FlagError("--weight-types measures weights alone; leave --types, --ablate, --needle and --key-bias out")
    if options.arithmetic:
        if of_weights or options.needle or options.ablate:
            raise FlagError("--arithmetic measures cache types; leave --weight-types, --ablate and --needle out")
        compiled_ops()
    text = _read(options.text)
    with Reference(model_named(options.weights, options.hf_repo), options.window) as reference:
        name = reference.model.name + (f" with key bias {options.key_bias:g}" if options.key_bias else "")
        kind = "weights" if of_weights else "arithmetic" if options.arithmetic else "quality"
        output = destination.path(kind, name)
        _check_context("--window", options.window, reference)
        ids = reference.tokenize(text)
        cut = windows(ids, options.window, reference.model.tokenizer.bos_id)[: options.windows]
        if not cut:
            raise FlagError(f"--text {options.text} is too short: there is no token to predict")
        about = {
            "model": name,
            "weights": reference.model.dtype,
            "text": Path(str(options.text)).name,
            "threads": report.blas_threads(),
            "window": options.window,
            "windows": len(cut),
        }
        if of_weights:
            _measure_weights(reference, of_weights, cut, output, argv, about)
            return
        types = types or all_types(reference.model.config.attention.head_dim, key_conditioning=options.key_conditioning)
        prompts = _prompts(options, reference, ids)
        if options.key_bias:
            reference.bias_keys(options.key_bias, cut[0])
        if options.arithmetic:
            _measure_arithmetic(reference, types, cut, output, argv, about)
            return
        started = time.perf_counter()
        recording = reference.record(cut[0])
        seconds = time.perf_counter() - started
        expected = report.duration(seconds * len(types) * passes(len(cut)))
        note(
            f"{len(types)} cache types on {len(cut)} windows of {len(cut[0]):,} tokens, {about['threads']} threads: "
            f"about {expected}. Figures are kept in {output} as they come"
        )
        result: dict[str, Any] = {"angles": angles.histograms(recording.keys)}

        def keep(quality: Quality) -> None:
            report.write(output, "quality", argv, {**about, **result, **asdict(quality)}, complete=False)
            for row in quality.rows[-len(SCORINGS) :]:
                note(one_line(row, quality.exact_perplexity))

        quality = measure(reference, types, cut, recording, keep)
        result |= asdict(quality)
        del recording
        cells = needle.find(reference, _with_full_precision(types), prompts) if prompts else []
        result["needle"] = [asdict(cell) for cell in cells]
        costs = _encoding_costs(reference, chosen_types(None, options.ablate, key_conditioning=True), cut[0])
        result["encoding"] = [asdict(cost) for cost in costs]
    report.write(output, "quality", argv, {**about, **result})
    note(f"Written to {output}")
    note(plots.draw_all(result, name, output))
    _print(quality, cells, about)
    if costs:
        print(
            "\nEncoding keys and values of a block of one KV head, with one thread; instructions on vectors of the "
            f"loops over codes, and of attention's whole kernel, at {costs[0].level}.\n"
        )
        print(format_costs(costs))


def _encoding_costs(reference: Reference, types: Sequence[CacheType], ids: Sequence[int]) -> list[EncodingCost]:
    """What the types of --ablate cost compiled kernels; nothing, with a note, where there is none to measure."""
    if not types:
        return []
    ops, why = select("cpu", 1, compiled=True)
    if isinstance(ops, NumpyOps):
        note(f"Times of encoding are those of compiled kernels. {why}")
        return []
    if len(ids) < LEAST:
        note(f"Times of encoding need a window of {LEAST} tokens")
        return []
    return measure_costs(reference, types, ids, ops)


def _measure_weights(
    reference: Reference,
    types: Sequence[str],
    cut: Sequence[Sequence[int]],
    output: Path,
    argv: Sequence[str],
    about: dict[str, Any],
) -> None:
    """Measures weight types, writes JSON and prints the table."""
    note(f"{len(types)} weight types on {len(cut)} windows of {len(cut[0]):,} tokens. Figures are kept in {output}")

    def keep(quality: WeightQuality) -> None:
        report.write(output, "quality", argv, {**about, **asdict(quality)}, complete=False)
        note(one_weight_line(quality.weight_rows[-1], quality.exact_perplexity))

    quality = measure_weights(reference, types, cut, keep)
    report.write(output, "quality", argv, {**about, **asdict(quality)})
    note(f"Written to {output}")
    print(
        f"{about['model']} on {about['text']}: {about['windows']} windows of up to {about['window']} tokens, "
        f"{quality.scored_tokens} tokens scored in full precision.\n"
        "KL: of the distributions with the weights as stored against those with the weight type, nats. Bits/weight: of "
        "all matrices.\n"
    )
    print(format_weight_table(quality, about["weights"]))


def _measure_arithmetic(
    reference: Reference,
    types: Sequence[CacheType],
    cut: Sequence[Sequence[int]],
    output: Path,
    argv: Sequence[str],
    about: dict[str, Any],
) -> None:
    """Measures compiled kernels, writes JSON and prints the table."""
    note(f"{len(types)} cache types on {len(cut)} windows of {len(cut[0]):,} tokens. Figures are kept in {output}")
    kept: list[dict[str, Any]] = []

    def keep(row: ArithmeticRow) -> None:
        kept.append(asdict(row))
        report.write(output, "quality", argv, {**about, "arithmetic": kept}, complete=False)
        note(one_arithmetic_line(row))

    rows = measure_arithmetic(reference, types, cut, keep)
    report.write(output, "quality", argv, {**about, "arithmetic": kept})
    note(f"Written to {output}")
    print(
        f"{about['model']} ({about['weights']} weights) on {about['text']}: {about['windows']} windows of up to "
        f"{about['window']} tokens, a prompt and as many steps.\n"
        "KL: of the distributions of float32 in full precision against those of steps with the cache type, in float32 "
        "and with compiled kernels; and of float32 against compiled kernels, both with the cache type. Nats.\n"
    )
    print(format_arithmetic_table(rows))


def _prompts(options: Options, reference: Reference, ids: Sequence[int]) -> list[needle.Prompt]:
    """The prompts of all cells of the needle's grid; none without --needle. Raises FlagError."""
    if not options.needle:
        return []
    lengths = _numbers("--needle-lengths", options.needle_lengths, 2**31)
    depths = _numbers("--needle-depths", options.needle_depths, 100)
    _check_context("--needle-lengths", max(lengths), reference)
    return [needle.hide(reference, ids, length, depth) for length in lengths for depth in depths]


def _numbers(flag: str, text: str, most: int) -> list[int]:
    numbers = [int(word) if word.strip().isdecimal() else -1 for word in text.split(",")]
    if not all(0 <= number <= most for number in numbers):
        limit = f" up to {most}" if most <= 100 else ""
        raise FlagError(f"{flag} takes whole numbers{limit}, separated by commas, not {text!r}")
    return sorted(set(numbers))


def _times(number: float) -> str | None:
    return None if 0 <= number <= 1000 else "must be from 0 to 1000"


def _check_context(flag: str, tokens: int, reference: Reference) -> None:
    context = reference.model.config.max_context
    if tokens > context:
        raise FlagError(f"{flag} {tokens} is more than the {context} tokens of context that {reference.model.name} has")


def _with_full_precision(types: Sequence[CacheType]) -> list[CacheType]:
    """The types, with full precision first: a needle that it misses is not the fault of a cache type."""
    rest = [one for one in types if one.label != FULL_PRECISION]
    return [CacheType.read(FULL_PRECISION), *rest]


def _print(quality: Quality, cells: Sequence[needle.Cell], about: dict[str, Any]) -> None:
    if cells:
        print(
            "The number in the haystack: whether each token of the answer is the most likely one, and the "
            f"log-probability of all of them, nats. With {FULL_PRECISION}, as served, it is found at "
            f"{needle.retrieved(cells, FULL_PRECISION)} tokens.\n"
        )
        print(needle.format_grid(cells), end="\n\n")
    print(
        f"{about['model']} ({about['weights']} weights, float32 arithmetic) on {about['text']}: {about['windows']} "
        f"windows of up to {about['window']} tokens, {quality.scored_tokens} tokens scored.\n"
        "KL: of the float32 prefill's distributions against the cache type's, nats. Bits/value: of complete blocks.\n"
        "Attention error: relative, of each layer's attention given the reference's input; the mean of all layers.\n"
    )
    print(format_table(quality), end="\n\n")
    stretches = [(f"{row.type}, {row.scored_as}", asdict(row)["by_position"]) for row in quality.rows]
    print(report.table(*kl_by_position(stretches)), end="\n\n")
    print(report.table(*top1_by_position(stretches)))


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


if __name__ == "__main__":
    sys.exit(main())
