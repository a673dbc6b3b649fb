"""The costs of work on one machine: measured by `bench.speed` or `bench.serving`, or predicted by
`bench.gpu.predict`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.engine import EngineError, codecs
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape

_MEASURED_CACHE = "balanced"  # the column to read of a speed file
_BLOCK = 64  # tokens
_ANY = 1024  # sequences of a step, if nothing limits them
_PREDICTED_SHAPES = {"8b": (32, 8, 128)}  # layers, KV heads, head dim
_NEEDED = "bench.speed and bench.gpu.predict write such files"


@dataclass(frozen=True)
class Costs:
    """The costs of work in seconds. A prefill of n tokens after h tokens: prompt_token × n + pair × n (h + n / 2). A
    step of b sequences with c tokens in all: step + sequence × b + context_token × c.
    """

    name: str
    source: str  # where they come from: "measured: …" or "PREDICTED, …"
    cache: str  # the cache type
    prompt_token: float
    pair: float
    step: float
    sequence: float
    context_token: float
    bytes_per_token: float  # bytes of keys and values
    most_sequences: int  # most sequences of a step that was measured or predicted

    def prefill(self, tokens: int, before: int) -> float:
        """Seconds of a prefill of `tokens` tokens after `before` tokens."""
        return self.prompt_token * tokens + self.pair * tokens * (before + tokens / 2)


def read(path: Path) -> Costs:
    """The costs in a result file, for its cache type, or for the default one if it has several. Raises EngineError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("benchmark") == "speed":
            return _measured(found)
        if found.get("benchmark") == "gpu.predict":
            return _predicted(found)
        if found.get("benchmark") == "serving":
            return _alone(found)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"--costs {path}: no costs can be read from it ({error!r}); {_NEEDED}") from None
    raise EngineError(f"--costs {path}: this is a file of another benchmark; {_NEEDED}")


def _measured(found: dict[str, Any]) -> Costs:
    """Costs fitted to rows of prompts, of generation at a depth, and of steps of several sequences."""
    prompts: list[tuple[float, float]] = []  # tokens, seconds
    steps: list[tuple[float, float, float]] = []  # sequences, tokens of all of them, seconds
    ours = "polarlm", _MEASURED_CACHE
    for row in found["rows"]:
        cell = next((c for c in row["cells"] if (c.get("engine"), c.get("cache")) == ours), None)
        if cell is None:
            continue
        if row["section"] == "prompt":
            prompts.append((row["tokens"], row["tokens"] / cell["median"]))
        elif row["section"] == "generation":
            steps.append((1, row["tokens"], 1 / cell["median"]))
        else:
            count = int(row["name"].split()[2])  # "steps of 16 at 128"
            steps.append((count, count * row["tokens"], count / cell["median"]))
    memory = next((m for m in found["memory"] if (m["engine"], m["cache"]) == ours), None)
    if memory is None:
        raise EngineError(f"--costs: of a result of bench.speed, this needs one of the cache type {_MEASURED_CACHE}")
    machine = f"{found['machine']['cores']} cores of {found['machine']['cpu']}"
    source = f"measured: {found['model']}, {found['weights']}, on {machine}, {found['date']}"
    return _fitted(found["model"], source, _MEASURED_CACHE, prompts, steps, memory["cache_bytes"] / memory["tokens"])


def _alone(found: dict[str, Any]) -> Costs:
    """Costs from requests that ran one at a time, valid for their lengths; a step of several counts as long as of
    one."""
    load, waits = found["load"], found["latencies"]
    if load["clients"] != 1:
        raise EngineError("--costs: of a result of bench.serving, this needs one with --clients 1")
    first = float(np.median(waits["first_token_seconds"]["percentiles"]))
    step = float(np.mean(waits["between_tokens_seconds"]["percentiles"]))
    source = f"measured: {found['model']}, one request at a time, {found['date']}"
    return Costs(found["model"], source, _MEASURED_CACHE, first / load["prompt_tokens"], 0.0, step, 0.0, 0.0, 1.0, _ANY)


def _predicted(found: dict[str, Any]) -> Costs:
    """Costs fitted to predicted steps and prompts."""
    layers, heads, dim = _PREDICTED_SHAPES[found["model"]]
    prompts = [(prompt["tokens"], prompt["seconds"]) for prompt in found["prompts"]]
    steps = [(step["batch"], step["batch"] * step["context"], step["seconds"]) for step in found["steps"]]
    chosen = CacheType.read(found["cache"])
    layer = LayerShape(codecs.get(chosen.key), codecs.get(chosen.value), heads, dim, mean_bits=8)
    nbytes = CacheShape(_BLOCK, (layer,) * layers).bytes_per_token
    gpu = found["gpu"]["name"]
    source = f"PREDICTED, not measured: Llama's {found['model']}, weights {found['weights']}, on an {gpu}"
    return _fitted(f"{found['model']} {gpu}", source, found["cache"], prompts, steps, nbytes)


def _fitted(
    name: str,
    source: str,
    cache: str,
    prompts: Sequence[tuple[float, float]],
    steps: Sequence[tuple[float, float, float]],
    bytes_per_token: float,
) -> Costs:
    """Costs by least squares of relative errors, with no negative term. Raises EngineError."""
    tokens, seconds = np.array(prompts).T
    sequences, together, step_seconds = np.array(steps).T
    if len(set(tokens)) < 2 or len(set(sequences)) < 2:
        raise EngineError(f"--costs: {name} needs prompts of two lengths, and steps of one and of several sequences")
    prompt_token, pair = _positive(np.stack([tokens, tokens * tokens / 2], 1), seconds)
    fixed, sequence, token = _positive(np.stack([np.ones_like(sequences), sequences, together], 1), step_seconds)
    most = int(sequences.max())
    return Costs(name, source, cache, prompt_token, pair, fixed, sequence, token, bytes_per_token, most)


def _positive(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    """The factors ≥ 0 of the terms that fit `seconds` best; terms that would get negative factors are left out."""
    used = list(range(terms.shape[1]))
    while True:
        factors = np.linalg.lstsq(terms[:, used] / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
        if factors.min() >= 0:
            break
        used.remove(used[int(factors.argmin())])
    whole = np.zeros(terms.shape[1])
    whole[used] = factors
    return whole.tolist()
