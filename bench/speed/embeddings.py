"""`polarlm speed --only embeddings`: tokens per second of the texts of an embedding model, beside llama.cpp.

Ids in, vectors out. Both engines take turns, round after round, and the best round of each counts. llama.cpp computes
several texts in a batch; its batches have 512 tokens by default, and the best of four sizes is named as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.report import Table
from polarlm.bench.result import Result, digest_of_model
from polarlm.bench.runner import in_turn
from polarlm.bench.speed import peers
from polarlm.bench.speed.child import Child, Failed
from polarlm.bench.speed.compare import peer_paths
from polarlm.bench.speed.contestants import OURS, RATE
from polarlm.bench.speed.options import Options
from polarlm.bench.speed.peers import llama_cpp_python
from polarlm.engine import Engine, EngineError
from polarlm.engine.cli.commands import note

_DEFAULT_BATCH = 512  # tokens; llama.cpp's default
_BATCHES = 128, 256, _DEFAULT_BATCH, 1024
_LENGTHS = {"32 tokens": (32, 32), "8 to 128 tokens": (8, 128)}
_FIRST_ID = 1000  # in BERT's vocabulary, control tokens and unused ones come before it


def measure(options: Options) -> Result:
    """What llama.cpp says about itself, and the rows of all models. Raises FlagError, EngineError or LoadError."""
    paths = [part.strip() for part in (options.weights or "").split(",") if part.strip()]
    if not paths:
        raise EngineError("--weights names no .gguf file of an encoder")
    python = peer_paths(options.peer).get(peers.DEFAULT)
    if python is None:
        raise EngineError(f"--peer {options.peer}: texts are compared with {peers.DEFAULT}")
    result = Result(digest_of_model(map(Path, paths)))
    try:
        for path in paths:
            result.about["peer"] = _measure(result, path, python, options)
    except Failed as reason:
        raise EngineError(f"{peers.DEFAULT} of --peer {python}: {reason}") from None
    return result


def _measure(result: Result, path: str, python: str, options: Options) -> dict[str, str]:
    """Add the rows of a model; what llama.cpp says about itself. Raises Failed."""
    threads = options.thread_count(1)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.load(path, threads=threads))
        if not engine.model.config.is_encoder:
            raise EngineError(f"{path} is no encoder, such as BERT")
        children = {size: stack.enter_context(closing(Child(llama_cpp_python.__name__, python))) for size in _BATCHES}
        for size, child in children.items():
            child.call("start", path, size, threads, llama_cpp_python.EMBEDDINGS)
        for name in _LENGTHS:
            _add(result, name, engine, children, options)
        return dict(children[_DEFAULT_BATCH].call("about"))


def _add(result: Result, lengths: str, engine: Engine, children: Mapping[int, Child], options: Options) -> None:
    """Add the tokens per second of texts of some lengths in all rounds of each engine, and the least cosine between the
    vectors of both engines, of the first text."""
    texts = _texts(*_LENGTHS[lengths], options.token_count(), len(engine.model.vocabulary))
    count = sum(map(len, texts))
    for child in children.values():
        child.call("take", texts)

    def ours() -> dict[str, Any]:
        began = time.perf_counter()
        vector = engine.embed_each(texts)[0].vector
        return {"seconds": time.perf_counter() - began, "first": vector}

    contestants: dict[str, Callable[[], dict[str, Any]]] = {OURS: ours}
    contestants |= {str(size): partial(child.call, "vectors") for size, child in children.items()}
    rounds = in_turn(contestants, options.repeat)
    vector = rounds[OURS][0]["first"]
    cosine = min(float(vector @ np.asarray(run["first"])) for runs in rounds.values() for run in runs)
    dtype = engine.model.dtype
    subject, best = f"{dtype}, texts of {lengths}", {}
    for name, runs in rounds.items():
        rates = [count / run["seconds"] for run in runs]
        best[name] = max(rates)
        result.add(subject, name, RATE, rates, value=best[name], weights=dtype, texts=lengths, tokens=count)
    result.add(subject, OURS, "cosine", value=cosine)
    note(f"{subject}: {best.pop(OURS):,.0f} tokens/s, llama.cpp {max(best.values()):,.0f}")


def _texts(shortest: int, longest: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random ids: texts of random lengths, of about `tokens` tokens together."""
    rng = np.random.default_rng(0)
    count = max(1, round(2 * tokens / (shortest + longest)))
    lengths = rng.integers(shortest, longest, count, endpoint=True)
    return [rng.integers(min(_FIRST_ID, vocabulary - 1), vocabulary, length).tolist() for length in lengths]


def table_of(result: Result) -> Table:
    lines = []
    for subject, who, figures in result.parts():
        if who == OURS:
            more, ours = figures[RATE].more, figures[RATE].value or 0.0
            theirs = {size: result.value(subject, str(size), RATE) or 0.0 for size in _BATCHES}
            best = max(theirs, key=theirs.__getitem__)
            lines.append([more["weights"], more["texts"], f"{ours:,.0f}", f"{theirs[_DEFAULT_BATCH]:,.0f}"])
            lines[-1] += [f"{theirs[best]:,.0f} ({best})", f"{ours / theirs[best]:.1f}"]
    header = ["Weights", "Texts of", "polarlm", f"llama.cpp, {_DEFAULT_BATCH}", "llama.cpp, best", "polarlm / best"]
    return Table(header, lines)
