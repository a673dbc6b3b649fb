"""`python -m polarlm.bench.gpu.predict`: predicted times of a step on a GPU that is not there.

The kernels that the engine would launch are compiled, and their instructions and bytes are counted. What is printed is
a prediction, next to the least time that the bytes take; `python -m polarlm.bench.gpu` measures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.gpu.cards import MACHINES, Machine
from polarlm.bench.gpu.cost import Prediction, overlapped, predict
from polarlm.bench.gpu.launches import BLOCK_SIZE
from polarlm.bench.gpu.measured import (
    Pair,
    Predicted,
    Run,
    furthest_off,
    pairs,
    runs_of,
    times_of_prompt,
    times_of_step,
)
from polarlm.bench.gpu.model import default_type
from polarlm.bench.gpu.parts import known_weights, prompt_parts, step_parts
from polarlm.bench.gpu.shapes import (
    GPT_OSS_20B,
    GRANITE_4_H_TINY,
    LLAMA_8B,
    LLAMA_70B,
    NEMOTRON_3_NANO,
    QWEN3_5_0_8B,
    QWEN3_5_4B,
    QWEN3_30B_A3B,
)
from polarlm.bench.report import Output
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import setting
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.config import ModelConfig

MODELS = {
    "8b": LLAMA_8B,
    "70b": LLAMA_70B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "qwen3.5-0.8b": QWEN3_5_0_8B,
    "qwen3.5-4b": QWEN3_5_4B,
    "granite-4.0-h-tiny": GRANITE_4_H_TINY,
    "nemotron-3-nano": NEMOTRON_3_NANO,
}
_FURTHEST = 3  # kernels that the report names
_LEAST_CONTEXT = 3 * BLOCK_SIZE  # a sink, a quantized block, and a current block
# The largest batch whose products are the engine's own kernels in one launch.
_MOST_BATCH = launch_configs.SMALL_ROWS
_LEAST_PROMPT = 2 * launch_configs.SMALL_ROWS  # products of fewer rows are not a library's
_NOT_COUNTED = (
    "Estimated: the speed of the L2 cache, from which each block of a product reads its activations, and, in prompts, "
    "0.75 of the\ndata sheet's speed for products of a library.\n"
    "Not counted: bank conflicts, multiprocessors that wait for the last blocks of a product, barriers in a prompt's "
    "attention and in the\nblocks of recurrent layers, encoding, and the end of a block in such layers. Overlapped "
    "launches are predicted at their\nbest."
)


@dataclass(frozen=True)
class Options:
    """What to predict."""

    gpu: str = setting("h200", "--gpu", choices=tuple(MACHINES), help="the GPU")
    model: str = setting(
        "8b", "--model", choices=tuple(MODELS), help="the shape of the model: of Llama 3, and of others"
    )
    weights: str = setting(
        "bf16",
        "--weights",
        metavar="TYPE",
        help="bf16, f16, q4_k_m, mxfp4_moe, or a GGUF type for all matrices, such as q8_0",
    )
    cache: str = setting("balanced", "--cache", metavar="TYPE", help="the cache type, such as balanced or f16")
    batch: str = setting("1", "--batch", metavar="N,N", help=f"sequences of a step, at most {_MOST_BATCH}")
    context: str = setting("2048", "--context", metavar="N,N", help="tokens that each sequence has")
    prompt: str = setting("8192", "--prompt", metavar="N,N", help="tokens of a first prompt")


@dataclass(frozen=True)
class Pass:
    """The predicted parts of a forward pass."""

    parts: Sequence[Prediction]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def floor(self) -> float:
        return sum(part.floor for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "floor": self.floor}


@dataclass(frozen=True)
class Step(Pass):
    """overlapped: least seconds with overlapped launches; None where the GPU has none."""

    context: int
    batch: int
    overlapped: float | None


@dataclass(frozen=True)
class Prompt(Pass):
    """A first prompt up to its first token."""

    tokens: int


@command
def main(argv: Sequence[str]) -> None:
    """Predicts, writes the JSON, prints the tables."""
    options, destination = parse(
        argv,
        {"Prediction": Options, "Output": Output},
        prog="python -m polarlm.bench.gpu.predict",
        description="Predicted times of a step on a GPU that is not there, from its compiled kernels.",
        checks={},
    )
    machine, config = MACHINES[options.gpu], MODELS[options.model]
    known = known_weights()
    if options.weights not in known:
        raise FlagError(f"--weights {options.weights}: there is no such type; choose from {', '.join(sorted(known))}")
    cache_type = CacheType.read(options.cache)
    cache_type.check(config.attention.head_dim)
    contexts = _numbers("--context", options.context, _LEAST_CONTEXT, config.max_context)
    batches = _numbers("--batch", options.batch, 1, _MOST_BATCH)
    prompts = _numbers("--prompt", options.prompt, _LEAST_PROMPT, config.max_context)
    output = destination.path("gpu-predict", f"{options.gpu}-{options.model}-{options.weights}-{options.cache}")
    steps = [
        _step(machine, config, options.weights, cache_type, context, batch) for context in contexts for batch in batches
    ]
    runs = runs_of(options.gpu, (report.RESULTS, report.LOCAL))
    shape = config, options.weights, cache_type
    first = [_prompt(machine, config, options.weights, cache_type, tokens) for tokens in prompts]
    times = [
        time for step in steps for time in times_of_step(*shape, step.context, step.batch, step.parts, step.overlapped)
    ]
    times += [time for prompt in first for time in times_of_prompt(*shape, prompt.tokens, prompt.parts)]
    measured = pairs(runs, times)
    result: dict[str, Any] = {
        "kind": "prediction: no GPU was measured",
        "gpu": asdict(machine),
        "model": options.model,
        "weights": options.weights,
        "cache": options.cache,
        "steps": [step.as_json() for step in steps],
        "prompts": [prompt.as_json() for prompt in first],
        "measured": [asdict(pair) for pair in measured],
    }
    report.write(output, "gpu.predict", argv, result)
    note(f"Written to {output}")
    print(format_steps(machine, options, steps))
    print(f"\n{format_prompts(first)}")
    print(f"\n{format_measured(machine, runs, measured)}")


def beside(gpu: str, config: ModelConfig, file: Path) -> str:
    """The measured steps and prompts of a file of `bench.gpu` next to their predictions, as a table; a sentence where
    they cannot be predicted. gpu: the GPU's name; config: of the measured model."""
    words = report.slug(gpu).split("-")
    found = [name for name in MACHINES if name in words]
    if not found:
        return f"Not predicted: {gpu} is none of {', '.join(MACHINES)}."
    machine, runs = MACHINES[found[0]], [run for run in runs_of(found[0], [file.parent]) if run.file == file.name]
    cache_type, times = CacheType.read("/".join(default_type())), list[Predicted]()
    steps = {
        (row["weights"], row["context"], row["batch"])
        for run in runs
        for row in run.rows["steps"]
        if row["context"] == row["shortest"] and row["batch"] <= _MOST_BATCH
    }
    least, seen = min((context for _, context, _ in steps), default=0), {(kind, batch) for kind, _, batch in steps}
    products = {(row["weights"], row["rows"]) for run in runs for row in run.rows["matrices"]}
    steps |= {(kind, least, rows) for kind, rows in products - seen if least and rows <= _MOST_BATCH}
    prompts = {(row["weights"], row["tokens"]) for run in runs for row in run.rows["prefill"]}
    try:
        for weights, context, batch in sorted(steps):
            step = _step(machine, config, weights, cache_type, context, batch)
            times += times_of_step(config, weights, cache_type, context, batch, step.parts, step.overlapped)
        for weights, tokens in sorted(prompts):
            prompt = _prompt(machine, config, weights, cache_type, tokens)
            times += times_of_prompt(config, weights, cache_type, tokens, prompt.parts)
    except EngineError as error:
        return f"Not predicted: {error}."
    once = {(pair.what, pair.measured): pair for pair in pairs(runs, times)}  # a product is the same in every context
    return format_measured(machine, runs, list(once.values()))


def _numbers(flag: str, text: str, least: int, most: int) -> list[int]:
    """Raises FlagError."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < least or max(numbers) > most:
        raise FlagError(f"{flag} takes numbers from {least} to {most}, separated by commas, not {text!r}")
    return list(dict.fromkeys(numbers))


def _step(machine: Machine, config: ModelConfig, weights: str, cache_type: CacheType, context: int, batch: int) -> Step:
    """Raises EngineError for a cache type without kernels, and where the compiler or nvdisasm is missing."""
    parts = step_parts(config, weights, cache_type, context, batch, machine.processors, machine.shared_memory)
    predicted = predict(parts, machine, config)
    return Step(predicted, context, batch, overlapped(predicted, machine))


def _prompt(machine: Machine, config: ModelConfig, weights: str, cache_type: CacheType, tokens: int) -> Prompt:
    """Raises EngineError as `_step` does."""
    given = config, weights, cache_type, tokens, machine.processors, machine.shared_memory
    return Prompt(predict(prompt_parts(*given), machine, config), tokens)


def format_steps(machine: Machine, options: Options, steps: Sequence[Step]) -> str:
    """The parts of every step, and then a table of the steps."""
    about = f"PREDICTION, not measured: {machine.name} ({machine.source}), {options.model}, weights {options.weights}"
    titles = [f"A step of {step.batch} × {step.context:,} tokens, predicted" for step in steps]
    tables = [f"{about}, cache {options.cache}", _NOT_COUNTED, *map(_parts, titles, steps)]
    rows = [
        (
            f"{step.context:,} × {step.batch}",
            f"{1e3 * step.seconds:.2f}",
            f"{1e3 * step.floor:.2f}",
            f"{step.floor / step.seconds:.2f}",
            "—" if step.overlapped is None else f"{1e3 * step.overlapped:.2f}",
            f"{step.batch / step.seconds:,.0f}",
        )
        for step in steps
    ]
    header = ("context × batch", "predicted ms", "byte floor ms", "floor / predicted", "overlapped ms", "tokens/s")
    tables.append(f"Steps, predicted\n\n{report.table(header, rows)}")
    return "\n\n".join(tables)


def format_prompts(prompts: Sequence[Prompt]) -> str:
    """The parts of every prompt, and its time next to that of its products and bytes."""
    tables = []
    for prompt in prompts:
        title = (
            f"A prompt of {prompt.tokens:,} tokens, predicted: {1e3 * prompt.seconds:,.1f} ms, of "
            f"which products and bytes alone take {1e3 * prompt.floor:,.1f}"
        )
        tables.append(_parts(title, prompt))
    return "\n\n".join(tables)


def _parts(title: str, whole: Pass) -> str:
    rows = [
        (
            part.part,
            f"{part.repeats}",
            f"{1e6 * part.seconds / part.repeats:.1f}",
            f"{1e6 * part.floor / part.repeats:.1f}",
            part.limit,
            f"{part.instructions:.2f}" if part.instructions else "—",
            f"{part.registers}" if part.registers else "—",
        )
        for part in whole.parts
    ]
    header = ("part", "times", "predicted µs", "floor µs", "limited by", "instructions a value", "registers")
    return f"{title}\n\n{report.table(header, rows)}"


def format_measured(machine: Machine, runs: Sequence[Run], measured: Sequence[Pair]) -> str:
    """Measured times next to predicted ones, or a sentence if there are none."""
    if not runs:
        return f"Not measured: there are no results of {machine.name}; python -m polarlm.bench.gpu makes them."
    if not measured:
        return f"Not measured: the results of {runs[0].gpu} have none of these steps."
    rows = [
        (
            pair.what,
            f"{1e6 * pair.predicted:,.1f}",
            f"{1e6 * pair.measured:,.1f}",
            f"{pair.ratio:.2f}",
            pair.file,
        )
        for pair in measured
    ]
    header = ("time of", "predicted µs", "measured µs", "measured / predicted", "measured in")
    table = f"Measured on {runs[0].gpu}, next to the predictions\n\n{report.table(header, rows)}"
    off = [
        f"{pair.what} ({', '.join(pair.kernels)}) takes {pair.ratio:.2f} times as long as predicted"
        for pair in furthest_off(measured, _FURTHEST)
    ]
    return "\n\n".join([table, *(["\n".join(["Furthest off, of single kernels:", *off])] if off else [])])


if __name__ == "__main__":
    sys.exit(main())
