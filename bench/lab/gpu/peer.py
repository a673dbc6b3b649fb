"""PyTorch's kernels, timed like ours: recorded, over more bytes than caches hold. Attention over an fp16 cache.

PyTorch is no dependency: if it is missing or a kernel of it does not work, its row says so.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from polarlm.bench.lab.gpu.setup import WARM_SECONDS
from polarlm.bench.result import Result
from polarlm.model_loaders.config import ModelConfig

# Backends of PyTorch's scaled_dot_product_attention. Its own choice among them is not always the fastest.
_BACKENDS = {"torch flash": "FLASH_ATTENTION", "torch cuDNN": "CUDNN_ATTENTION"}
NAMES = tuple(_BACKENDS)
_MOST_SETS = 256

Calls = list[Callable[[], object]]
Make = Callable[[Any], Calls]  # from PyTorch to the calls of one graph


def attention_at(context: int, batch: int) -> str:
    """The subject of attention over so many tokens in each of so many sequences."""
    return f"attention, {context} × {batch}"


def half_attention(result: Result, config: ModelConfig, context: int, batch: int, rotated: int, runs: int) -> None:
    """Add the seconds of every peer at one shape. rotated: the least bytes that are read before any are read again."""
    c = config.attention
    shape = batch, c.kv_heads, context, c.head_dim

    def make(backend: str, torch: Any) -> Calls:
        size = 2 * 2 * batch * c.kv_heads * context * c.head_dim
        sets = min(_MOST_SETS, -(-rotated // size), int(0.9 * torch.cuda.mem_get_info()[0]) // size)
        if sets < 1:
            raise MemoryError("there is too little memory for an fp16 cache of this size")
        random = partial(torch.randn, device="cuda", dtype=torch.float16)
        q, module = random(batch, c.heads, 1, c.head_dim), importlib.import_module("torch.nn.attention")

        def attend(k: Any, v: Any) -> object:
            with module.sdpa_kernel(getattr(module.SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return [partial(attend, random(*shape), random(*shape)) for _ in range(sets)]

    makers = {name: partial(make, backend) for name, backend in _BACKENDS.items()}
    for name, (seconds, why) in call_seconds(makers, runs).items():
        subject = attention_at(context, batch)
        result.add(subject, name, "seconds", value=seconds, failure=why, context=context, batch=batch)


def call_seconds(makers: Mapping[str, Make], runs: int) -> dict[str, tuple[float | None, str]]:
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
            times[name] = _seconds(torch, make(torch), runs), ""
        except Exception as error:
            times[name] = None, _short(error)
        torch.cuda.empty_cache()
    return times


def _short(error: Exception) -> str:
    """The beginning of an error's message, for a table."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"does not work: {line[:60]}"


def _seconds(torch: Any, calls: Calls, runs: int) -> float:
    """The median seconds of one call, in a graph of all."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    started = time.monotonic()
    while True:  # warm up like our own kernels
        graph.replay()
        torch.cuda.synchronize()
        if time.monotonic() - started >= WARM_SECONDS:
            break
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 2)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    events[-1].synchronize()
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
    return statistics.median(times[1:]) / 1e3 / len(calls)
