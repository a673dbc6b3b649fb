"""PyTorch's attention over an fp16 cache, timed like ours: recorded, over more bytes than caches hold.

PyTorch is no dependency: if it is missing or a kernel of it does not work, its row says so.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from polarlm.bench.gpu.setup import WARM_SECONDS
from polarlm.model_loaders.config import ModelConfig

# Backends of PyTorch's scaled_dot_product_attention. Its own choice among them is not always the fastest.
_BACKENDS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
_LAYOUTS = ("enable_gqa", "group as rows")
NAMES = tuple(f"torch {backend}, {layout}" for backend in _BACKENDS for layout in _LAYOUTS)
PROMPT_NAMES = tuple(f"torch {backend}" for backend in _BACKENDS)
_MOST_SETS = 256

Calls = list[Callable[[], object]]
Make = Callable[["_Shape"], Calls]


@dataclass(frozen=True)
class PeerTime:
    """Seconds of one call; None if it failed. note: the reason, or how the call was measured."""

    name: str
    context: int
    batch: int
    seconds: float | None
    note: str = ""


@dataclass(frozen=True)
class PromptPeerTime:
    """Seconds of causal attention over one prompt in half precision; None if it failed. note: as in `PeerTime`."""

    name: str
    tokens: int
    seconds: float | None
    flops: float
    note: str = ""


def half_attention(config: ModelConfig, context: int, batch: int, rotated: int, runs: int) -> list[PeerTime]:
    """The times of every peer at one shape. rotated: the least bytes that are read before any are read again."""
    kinds = itertools.product(_BACKENDS.values(), _LAYOUTS)
    makers = {name: partial(_step, *kind) for name, kind in zip(NAMES, kinds, strict=True)}
    timed = _timed(makers, config, context, batch, rotated, runs)
    return [PeerTime(name, context, batch, *result) for name, result in timed.items()]


def prompt_attention(config: ModelConfig, tokens: int, runs: int) -> list[PromptPeerTime]:
    """The times of every peer for one prompt, whose data may fit into caches."""
    makers = {name: partial(_prompt, kind) for name, kind in zip(PROMPT_NAMES, _BACKENDS.values(), strict=True)}
    timed = _timed(makers, config, tokens, 1, 1, runs)
    # Two products; each row attends to itself and all earlier rows.
    flops = 4.0 * config.attention.heads * config.attention.head_dim * tokens * (tokens + 1) / 2
    return [PromptPeerTime(name, tokens, seconds, flops, note) for name, (seconds, note) in timed.items()]


def _timed(
    makers: Mapping[str, Make], config: ModelConfig, context: int, batch: int, rotated: int, runs: int
) -> dict[str, tuple[float | None, str]]:
    """Name → the seconds of a call, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return dict.fromkeys(makers, (None, "PyTorch sees no GPU"))
    except ImportError:
        return dict.fromkeys(makers, (None, "PyTorch is not installed"))
    except Exception as error:  # its libraries may not work on this machine
        return dict.fromkeys(makers, (None, _short(error)))
    shape = _Shape(torch, config, context, batch, rotated)
    times: dict[str, tuple[float | None, str]] = {}
    for name, make in makers.items():
        try:
            times[name] = _seconds(torch, make(shape), runs)
        except Exception as error:
            times[name] = None, _short(error)
        torch.cuda.empty_cache()
    return times


def _short(error: Exception) -> str:
    """The beginning of an error's message, for a table."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"does not work: {line[:60]}"


class _Shape:
    """Random K/V of one shape, in several sets that are read in turn."""

    def __init__(self, torch: Any, config: ModelConfig, context: int, batch: int, rotated: int):
        self.torch, self.config, self.context, self.batch = torch, config, context, batch
        size = 2 * 2 * batch * config.attention.kv_heads * context * config.attention.head_dim
        room = int(0.9 * torch.cuda.mem_get_info()[0]) // size
        self.sets = min(_MOST_SETS, -(-rotated // size), room)

    def random(self, *shape: int) -> Any:
        if self.sets < 1:
            raise MemoryError("there is too little memory for an fp16 cache of this size")
        return self.torch.randn(shape, device="cuda", dtype=self.torch.float16)

    def attention(self, backend: str, q: Any, k: Any, v: Any, **options: Any) -> object:
        """PyTorch's attention with one backend. Raises RuntimeError if it does not support the shape."""
        module = importlib.import_module("torch.nn.attention")
        with module.sdpa_kernel(getattr(module.SDPBackend, backend)):
            return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def _step(backend: str, layout: str, shape: _Shape) -> Calls:
    """Calls for one token of each sequence, one for each set of keys and values."""
    c, is_grouped = shape.config.attention, layout == "enable_gqa"
    heads = (c.heads, 1) if is_grouped else (c.kv_heads, c.heads // c.kv_heads)
    q, size = shape.random(shape.batch, *heads, c.head_dim), (shape.batch, c.kv_heads, shape.context, c.head_dim)
    options = {"enable_gqa": True} if is_grouped else {}
    sets = [(shape.random(*size), shape.random(*size)) for _ in range(shape.sets)]
    return [partial(shape.attention, backend, q, *kv, **options) for kv in sets]


def _prompt(backend: str, shape: _Shape) -> Calls:
    """A call for all tokens of a prompt."""
    c = shape.config.attention
    q, k, v = (shape.random(1, heads, shape.context, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads))
    return [partial(shape.attention, backend, q, k, v, is_causal=True, enable_gqa=True)]


def _seconds(torch: Any, calls: Calls, runs: int) -> tuple[float, str]:
    """The median seconds of one call, and a note about how they were measured."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    note = ""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        work: Callable[[], object] = graph.replay
    except Exception:  # the time then includes the host's work
        torch.cuda.synchronize()
        note = "not recorded"

        def work() -> None:
            for call in calls:
                call()

    started = time.monotonic()
    while True:  # warm up like our own kernels
        work()
        torch.cuda.synchronize()
        if time.monotonic() - started >= WARM_SECONDS:
            break
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 2)]
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    events[-1].synchronize()
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
    return statistics.median(times[1:]) / 1e3 / len(calls), note
