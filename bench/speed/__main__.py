"""`python -m bench.speed`: tokens a second, compared with reading the weights alone and with llama-cpp-python.

Every run has its own prompt of random tokens, so that none is found in the cache. Runs to be compared alternate, so
that a machine that slows down slows all of them. A figure is the median of its runs with the best number of threads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from bench import report
from bench.command import TYPES_HELP, WEIGHTS_HELP, CacheType, at_least, cache_types, note, run
from bench.gpu.setup import about_gpu
from bench.report import Output
from bench.speed.figures import Figure, Speed, format_table
from bench.speed.peer import NAME as PEER_NAME
from bench.speed.peer import NoPeer, Peer
from bench.speed.timing import Rates, Streams, generation_rate, prompt_rate, weights_rate
from engine import Engine, EngineConfig
from engine.assembly import assemble, settle
from engine.backends.numpy.ops import NumpyOps
from engine.backends.select import select
from engine.config import setting
from engine.flags import FlagError, parse
from engine.model.forward import Transformer

# Short generation: from this context up to 64 tokens.
_SHORT_PROMPT, _SHORT_STEPS = 8, 56
_DEEP_STEPS = 32
# Steps of several sequences together, after prompts of their own.
_BATCHES = (1, 8, 16)
_BATCH_DEPTH, _BATCH_STEPS = 128, 24
# Idle threads of a library may spin for a moment, which would slow the next run.
_REST_SECONDS = 0.1

# Rates to add to, and a function that measures one run with a number of threads.
Contestant = tuple[Rates, Callable[[int], float]]


@dataclass(frozen=True)
class Options:
    """The measurements."""

    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    types: str = setting(
        "f16,polarquant,ring4/ring3.5", "--types", metavar="TYPES", help=f"measured at --depth: {TYPES_HELP}"
    )
    device: str = setting(
        "auto", "--device", choices=("auto", "cpu", "cuda"), help="where the model runs; auto takes a GPU if it can"
    )
    threads: str = setting("1,2", "--threads", metavar="N,N", help="numbers of CPU threads; the best one counts")
    prompt: int = setting(256, "--prompt", metavar="N", help="tokens in the prompt whose prefill is measured")
    depth: int = setting(2048, "--depth", metavar="N", help="tokens of context behind which each type generates")
    repeat: int = setting(3, "--repeat", metavar="N", help="runs of each kind; their median counts")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the JSON, prints the table; returns the exit code."""
    return run(_measure_and_report, argv)


def _measure_and_report(argv: Sequence[str]) -> None:
    options, destination = parse(
        argv,
        {"Speed": Options, "Output": Output},
        prog="python -m bench.speed",
        description="Tokens a second, beside what the weights alone allow and beside llama-cpp-python.",
        checks={"prompt": at_least(1), "depth": at_least(1), "repeat": at_least(1)},
    )
    types, threads = cache_types(options.types), _thread_counts(options.threads)
    options = replace(options, device=_chosen(options.device))
    gpu = about_gpu() if options.device == "cuda" else None
    about = report.machine(gpu)
    subject = gpu["name"] if gpu else f"{about['cpu']} {about['cores']} cores"
    output = destination.path("speed", subject)

    def keep(speed: Speed) -> None:
        report.write(output, "speed", argv, speed.as_json(), gpu=gpu, complete=False)

    speed = measure(options, types, threads[:1] if gpu else threads, keep)
    report.write(output, "speed", argv, speed.as_json(), gpu=gpu)
    note(f"Written to {output}")
    place = (
        f"the {gpu['name']}"
        if gpu
        else f"{about['cpu']}, {about['cores']} cores, numpy {about['numpy']}, {about['blas']}"
    )
    best = "" if gpu else f" with the best of {options.threads} threads"
    print(
        f"{speed.model} ({speed.weights} weights{'' if gpu else ', float32 arithmetic'}) on {place}.\n"
        f"Tokens/s: median of {options.repeat}{best}. {PEER_NAME}: {speed.peer}.\n"
    )
    print(format_table(speed))


def _chosen(device: str) -> str:
    """ "cpu" or "cuda". Raises EngineError where that one cannot be had."""
    ops, sentence = select(device, 0)
    if sentence:
        note(sentence)
    return "cpu" if ops.name == NumpyOps.name else "cuda"


def _thread_counts(text: str) -> list[int]:
    """Raises FlagError."""
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise FlagError(f"--threads takes numbers from 1 up, separated by commas, not {text!r}")
    return list(dict.fromkeys(counts))


def measure(
    options: Options, types: Sequence[CacheType], threads: Sequence[int], on_progress: Callable[[Speed], None]
) -> Speed:
    """Everything, one engine at a time. Raises FlagError, LoadError or EngineError.

    on_progress: called with all results so far after each line, those of batches together.
    """
    referee = _Referee(threads, options.repeat)
    referee.expect(3 + len(_BATCHES) + 2 * len(types))
    with referee.bar:
        speed = _measure_short(options, types, referee, on_progress)
        _add(speed, _measure_batches(options, referee), on_progress)
        for cache_type in types:
            _add(speed, [_measure_deep(options, cache_type, referee)], on_progress)
    return speed


def _add(speed: Speed, figures: Sequence[Figure], on_progress: Callable[[Speed], None]) -> None:
    speed.figures += figures
    for figure in figures:
        note(f"{figure.name}, {figure.cache_type}: {figure.ours.median:,.1f} tokens/s")
    on_progress(speed)


class _Referee:
    """Alternates runs of contestants: one unmeasured run each, then `repeat` runs with every number of threads."""

    def __init__(self, threads: Sequence[int], repeat: int) -> None:
        self.threads, self.repeat = threads, repeat
        self.bar = tqdm(total=0, desc="Measuring", unit="run")

    def expect(self, contestants: int) -> None:
        """Add their runs to the total of the progress bar."""
        self.bar.total += contestants * (1 + self.repeat * len(self.threads))
        self.bar.refresh()

    def runs(self, name: str, contestants: Sequence[Contestant]) -> None:
        self.bar.set_postfix_str(name)
        for _, run_once in contestants:
            self._run(run_once, self.threads[0])
        for _ in range(self.repeat):
            for threads in self.threads:
                for rates, run_once in contestants:
                    rates.add(threads, self._run(run_once, threads))

    def _run(self, run_once: Callable[[int], float], threads: int) -> float:
        time.sleep(_REST_SECONDS)
        with threadpool_limits(threads, user_api="blas"):
            rate = run_once(threads)
        self.bar.update()
        return rate


@contextmanager
def _loaded(options: Options, context: int, **settings: Any) -> Iterator[tuple[Engine, Transformer]]:
    """An engine that keeps no finished prompt, and its model. Raises FlagError if the model's context is too short."""
    threads = _thread_counts(options.threads)[0]  # an engine keeps a number that is set
    settings = {"device": options.device, "ctx_size": context, "kept_sequences": 0, "threads": threads, **settings}
    parts = assemble(settle(options.weights, None, settings), None)
    with Engine(parts) as engine:
        if context > parts.source.config.max_context:
            raise FlagError(
                f"--prompt and --depth: {context} tokens of context are needed, but {parts.source.name} has "
                f"{parts.source.config.max_context}"
            )
        yield engine, parts.model


def _measure_short(
    options: Options, types: Sequence[CacheType], referee: _Referee, on_progress: Callable[[Speed], None]
) -> Speed:
    """Prompt and short generation with an f16 cache, compared with the peer."""
    f16, context = CacheType.read("f16"), max(options.prompt, _SHORT_PROMPT + _SHORT_STEPS) + 1
    prompt = Figure(f"prompt of {options.prompt}", f16.label)
    short = Figure("generation, depth ≤ 64", f16.label, weights_alone=Rates())
    with ExitStack() as stack:
        engine, model = stack.enter_context(_loaded(options, context, **f16.settings()))
        for cache_type in types:
            cache_type.check(model.config.head_dim)
        new_ids = _Ids(engine)
        prompts: list[Contestant] = [(prompt.ours, lambda threads: prompt_rate(engine, new_ids(options.prompt)))]
        steps: list[Contestant] = [
            (short.ours, lambda threads: generation_rate(engine, new_ids(_SHORT_PROMPT), _SHORT_STEPS)),
        ]
        try:
            if options.device != "cpu":
                raise NoPeer("on the CPU only")
            peer = stack.enter_context(closing(Peer(engine.model, context)))
        except NoPeer as reason:
            about_peer = prompt.peer = short.peer = str(reason)
        else:
            about_peer = peer.version
            prompt.peer, short.peer, following = Rates(), Rates(), new_ids(_SHORT_STEPS)
            prompts.append((prompt.peer, lambda threads: peer.prompt_rate(new_ids(options.prompt), threads)))
            steps.append((short.peer, lambda threads: peer.generation_rate(new_ids(_SHORT_PROMPT), following, threads)))
            referee.expect(2)
        steps.append(_weights_alone(short, model, _SHORT_STEPS))
        note(f"Takes about {report.duration(_expected_seconds(options, types, referee, prompts, steps))}")
        speed = Speed(engine.model.name, engine.model.dtype, about_peer, [])
        referee.runs(prompt.name, prompts)
        _add(speed, [prompt], on_progress)
        referee.runs(short.name, steps)
        _add(speed, [short], on_progress)
        return speed


def _expected_seconds(
    options: Options,
    types: Sequence[CacheType],
    referee: _Referee,
    prompts: Sequence[Contestant],
    steps: Sequence[Contestant],
) -> float:
    """An estimate of the seconds of the whole measurement, from one run of a prompt and one of steps."""
    token, step = (1 / run_once(referee.threads[0]) for _, run_once in (prompts[0], steps[0]))
    short = len(prompts) * options.prompt * token + len(steps) * _SHORT_STEPS * step
    batches = 3 * len(_BATCHES) * _BATCH_STEPS * step  # a step of many takes longer than one alone
    deep = len(types) * (1.5 * options.depth * token + 2 * _DEEP_STEPS * step)
    return (1 + referee.repeat * len(referee.threads)) * (short + batches + deep)


def _measure_batches(options: Options, referee: _Referee) -> list[Figure]:
    """Steps of several sequences at once, compared with one alone, with an f16 cache."""
    f16, most, context = CacheType.read("f16"), max(_BATCHES), _BATCH_DEPTH + _BATCH_STEPS
    figures = [Figure(f"steps of {batch} at {_BATCH_DEPTH}", f16.label) for batch in _BATCHES]
    # Room for two sequences each: its prompt, which stays, and its continuation.
    room = {**f16.settings(), "ctx_size": most * (context + EngineConfig.block_size), "parallel": 2 * most}
    with _loaded(options, context, **room) as (engine, model):
        new_ids = _Ids(engine)
        streams = Streams(model, [new_ids(_BATCH_DEPTH) for _ in range(most)])

        def contestant(figure: Figure, batch: int) -> Contestant:
            return figure.ours, lambda threads: streams.rate(batch, _BATCH_STEPS)

        referee.runs("batches", [contestant(figure, batch) for figure, batch in zip(figures, _BATCHES, strict=True)])
    for figure in figures[1:]:
        figure.one_stream = figures[0].ours
    return figures


def _measure_deep(options: Options, cache_type: CacheType, referee: _Referee) -> Figure:
    """Generation after --depth tokens with one cache type."""
    deep = Figure(f"generation at {options.depth}", cache_type.label, weights_alone=Rates())
    with _loaded(options, options.depth + _DEEP_STEPS + 1, **cache_type.settings()) as (engine, model):
        new_ids = _Ids(engine)
        ours: Contestant = (deep.ours, lambda threads: generation_rate(engine, new_ids(options.depth), _DEEP_STEPS))
        referee.runs(f"{deep.name}, {cache_type.label}", [ours, _weights_alone(deep, model, _DEEP_STEPS)])
    return deep


def _weights_alone(figure: Figure, model: Transformer, steps: int) -> Contestant:
    assert figure.weights_alone is not None
    return figure.weights_alone, lambda threads: weights_rate(model, steps)


class _Ids:
    """New random tokens with each call, the same in every measurement."""

    def __init__(self, engine: Engine) -> None:
        self._vocabulary = min(engine.model.tokenizer.vocab_size, engine.model.config.vocab_size)
        self._rng = np.random.default_rng(0)

    def __call__(self, count: int) -> list[int]:
        return self._rng.integers(self._vocabulary, size=count).tolist()


if __name__ == "__main__":
    sys.exit(main())
