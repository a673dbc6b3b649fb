"""PyTorch's kernels, timed like ours: recorded, over more bytes than caches hold. Attention over an fp16 cache.

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
_MOST_SETS = 256

Calls = list[Callable[[], object]]
Make = Callable[[Any], Calls]  # from PyTorch to the calls of one graph


@dataclass(frozen=True)
class PeerTime:
    """Seconds of one call; None if it failed. note: the reason, or how the call was measured."""

    name: str
    context: int
    batch: int
    seconds: float | None
    note: str = ""


def half_attention(config: ModelConfig, context: int, batch: int, rotated: int, runs: int) -> list[PeerTime]:
    """The times of every peer at one shape. rotated: the least bytes that are read before any are read again."""

    def make(backend: str, layout: str, torch: Any) -> Calls:
        return _step(backend, layout, _Shape(torch, config, context, batch, rotated))

    kinds = itertools.product(_BACKENDS.values(), _LAYOUTS)
    makers = {name: partial(make, *kind) for name, kind in zip(NAMES, kinds, strict=True)}
    return [PeerTime(name, context, batch, *result) for name, result in timed(makers, runs).items()]


def timed(makers: Mapping[str, Make], runs: int) -> dict[str, tuple[float | None, str]]:
    """Name → the seconds of a call, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return dict.fromkeys(makers, (None, "PyTorch sees no GPU"))
    except ImportError:
        return dict.fromkeys(makers, (None, "PyTorch is not installed"))
    except Exception as error:  # its libraries may not work on this machine
        return dict.fromkeys(makers, (None, _short(error)))
    times: dict[str, tuple[float | None, str]] = {}
    for name, make in makers.items():
        try:
            times[name] = _seconds(torch, make(torch), runs)
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
