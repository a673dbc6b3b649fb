"""The comparison with other engines: prompts, generation, sequences and memory, on the same file.

Each engine runs with each of its caches in its own process. Runs to be compared alternate, so that a machine that slows
down slows all of them. A context is computed once; every run continues from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from polarlm import model_loaders
from polarlm.bench.command import cache_types, model_named, numbers
from polarlm.bench.result import Output, Result, ResultWriter, about_gpu, digest_of_model, machine
from polarlm.bench.runner import WorkloadRunner
from polarlm.bench.speed import peers
from polarlm.bench.speed.child import Failed
from polarlm.bench.speed.contestants import OURS, Contestant, Subject, new_child, start
from polarlm.bench.speed.measure import DEEP_STEPS, SHORT_DEPTH, SHORT_STEPS, Measurement, Plan
from polarlm.bench.speed.options import PROGRAM, RATES, Options
from polarlm.bench.speed.tables import report_of
from polarlm.engine import EngineConfig
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.select import select
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import AUTO
from polarlm.engine.model.weights import file_bytes

_NONE = "none"  # --peer-types without any


def run(options: Options, destination: Output, argv: Sequence[str]) -> None:
    """Measure, write the JSON as figures come, and a page at the end; print the report. Raises FlagError,
    EngineError or LoadError."""
    runner = WorkloadRunner(math.inf if options.minutes is None else 60 * options.minutes)
    types, threads = cache_types(options.types), sorted(numbers("--threads", options.threads))
    prompts, depths = sorted(numbers("--prompt", options.prompt)), sorted(numbers("--depth", options.depth))
    paths = peer_paths(options.peer or peers.DEFAULT)
    caches = _peer_caches(options.peer_types, list(paths))
    device = _choose_device(options.device)
    gpu = about_gpu() if device == "cuda" else None
    source = model_loaders.load(model_named(options.weights, options.hf_repo), verbose=note)
    try:
        path, config, vocabulary = source.path, source.config, len(source.vocabulary)
        size, digest = file_bytes(source.weights), digest_of_model(source.weights.files())
        weights = _type_in_name(source)
        for cache_type in types:
            cache_type.check(config.attention.head_dim)
    finally:
        source.weights.close()
    about = machine(gpu)
    where = gpu["name"] if gpu else f"{about['cpu']} {about['cores']} cores"
    output = destination.path("speed", f"{source.name} {weights} {where}")
    writer = ResultWriter(output, "speed", argv, gpu, PROGRAM)

    attention = config.attention
    shape = len(config.layers), attention.kv_heads, attention.head_dim
    subject = Subject(path, device, *shape, paths, runner.end)
    threads = threads[:1] if gpu else threads
    contestants = [
        Contestant(OURS, one.label + ("" if bits == AUTO else f", {bits}{'-bit' * bits.isdigit()} inputs"), one, bits)
        for bits in options.input_bits.split(",")
        for one in types
    ]
    if options.replayable:
        contestants += [replace(one, cache=f"{one.cache}, replayable", replayable=True) for one in contestants]
    left_out: list[str] = []
    about_peers: list[dict[str, str]] = []
    for name in paths:
        about_peer, peer_contestants = _ask_peer(name, subject, caches[name])
        about_peers.append(about_peer)
        contestants += peer_contestants
        left_out += peer_contestants[0].peer.notes if peer_contestants else ()
    if any(not contestant.is_ours for contestant in contestants) and options.repeat < 2:
        raise FlagError("--repeat 1: a peer's figure counts if two runs agree; --peer-types none leaves peers out")
    lengths, depths = _that_fit(prompts, depths, config.max_context, left_out)
    for sentence in left_out:
        note(sentence)
    result = Result(
        {
            "model": source.name,
            "weights": weights,
            "file_bytes": size,
            "device": device,
            **digest,
            "peers": about_peers,
            "contestants": [str(contestant) for contestant in contestants],
            "types": {str(one): one.types.pair for one in contestants if one.types is not None},
            "threads": {"most": max(threads), "peers": threads, "chosen": {}, "tried": {}},
            "bytes_per_second": {},
            "left_out": left_out,
        }
    )
    plan = Plan(
        contestants, lengths, depths, threads, options.repeat, vocabulary, config.max_context, options.only == RATES
    )
    note(f"Figures are kept in {output} as they come")
    runner.write = lambda complete: writer.write(result, complete=complete)
    with runner.final_write():
        Measurement(plan, subject, result, runner).run()
    report_of(result).show(output)


def _type_in_name(source: model_loaders.Model) -> str:
    """The type of the weights that the name of a file ends with, such as Q4_K_M; else the type of most values."""
    return source.path.stem[len(source.name) :].lstrip("-.").partition("-")[0].upper() or source.dtype


def _choose_device(device: str) -> str:
    """The device to use, "cpu" or "cuda". Raises EngineError if a requested one is not available."""
    ops, sentence = select(device, 0)
    if sentence:
        note(sentence)
    return "cpu" if ops.name == NumpyOps.name else "cuda"


def peer_paths(text: str) -> dict[str, str]:
    """Name of a peer → its Python, from a list of NAME[=PATH]. Raises FlagError for an unknown name."""
    paths = {}
    for part in text.split(","):
        name, _, path = (each.strip() for each in part.partition("="))
        if name not in peers.every():
            raise FlagError(f"--peer {text}: {name!r} is not among {', '.join(peers.every())}")
        paths[name] = path or sys.executable
    return paths


def _peer_caches(text: str | None, names: Sequence[str]) -> dict[str, list[str]]:
    """Name of each peer → its caches, or those in a list separated by commas. Raises FlagError for an unknown cache."""
    caches_of = {name: list(peers.every()[name].caches) for name in names}
    if text is None:
        return caches_of
    wanted = [] if text == _NONE else [name.strip() for name in text.split(",")]
    every_cache = list(dict.fromkeys(cache for caches in caches_of.values() for cache in caches))
    for name in wanted:
        if name not in every_cache:
            raise FlagError(
                f"--peer-types {text}: {name!r} is not among {', '.join(every_cache)}; {_NONE} leaves all out"
            )
    return {name: [cache for cache in caches if cache in wanted] for name, caches in caches_of.items()}


def _ask_peer(name: str, subject: Subject, caches: Sequence[str]) -> tuple[dict[str, str], list[Contestant]]:
    """What a peer says about itself, with its version or the reason why it is absent, and its contestants."""
    contestants, built_with = [Contestant(name, cache) for cache in caches], ""
    if subject.device != "cpu":
        version = "on the CPU only"
    elif not subject.path.is_file():
        version = "needs a .gguf file"
    elif not caches:
        version = "left out"
    else:
        try:
            with closing(new_child(contestants[0], subject)) as child:
                start(child, contestants[0], subject, 1, SHORT_DEPTH)
                about = child.call("about")
            version, built_with = about["version"], about["built_with"]
        except Failed as reason:
            version = str(reason)
    if not built_with:
        note(f"{name} is not compared: {version}")
        contestants = []
    return {"name": name, "version_or_absence": version, "built_with": built_with}, contestants


def _that_fit(
    prompts: Sequence[int], depths: Sequence[int], most: int, left_out: list[str]
) -> tuple[list[int], list[int]]:
    """The lengths of prompts and contexts that fit into `most` tokens; sentences about others are added to `left_out`.

    A context without room for the steps is shortened to whole blocks. Raises FlagError if no prompt fits.
    """
    room, block = most - DEEP_STEPS - 1, EngineConfig.block_size
    lengths = [tokens for tokens in prompts if tokens <= room]
    if not lengths or most <= SHORT_DEPTH + SHORT_STEPS:
        raise FlagError(f"--prompt: the model's context of {most:,} tokens is too short for a prompt of {prompts[0]:,}")
    left_out += [
        f"A prompt of {tokens:,} does not fit into the model's {most:,} tokens" for tokens in prompts[len(lengths) :]
    ]
    fitting: list[int] = []
    for depth in depths:
        fit = depth if depth <= room else room // block * block
        if depth > most:
            left_out.append(f"Generation at {depth:,} is left out: the model's context has {most:,} tokens")
        elif fit not in fitting:
            fitting.append(fit)
            if fit != depth:
                left_out.append(f"Generation at {depth:,} is measured at {fit:,}, to leave room for the steps")
    return lengths, fitting
