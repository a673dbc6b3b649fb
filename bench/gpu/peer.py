"""Other libraries' attention of one token over an fp16 cache, timed like ours: recorded, over more bytes than caches
hold.

They are not dependencies: if one is missing or does not work, its row says so.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from polarlm.bench.gpu.setup import WARM_SECONDS
from polarlm.model_loaders.config import ModelConfig

# Backends of PyTorch's scaled_dot_product_attention. Its own choice among them is not always the fastest.
_BACKENDS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
_LAYOUTS = ("enable_gqa", "group as rows")
TORCH = tuple(f"torch {backend}, {layout}" for backend in _BACKENDS for layout in _LAYOUTS)
# FlashAttention's modules, the version for Hopper first.
_FLASH_MODULES = {"FlashAttention 3": "flash_attn_interface", "FlashAttention 2": "flash_attn"}
FLASH = tuple(_FLASH_MODULES)
FLASHINFER = "flashinfer batch decode"
NAMES = (*TORCH, *FLASH, FLASHINFER)
_MOST_SETS = 256
_PAGE = 16  # tokens
_WORKSPACE = 128 << 20  # bytes

Call = Callable[[], object]


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
    timed = _timed(NAMES, _makers(), config, context, batch, rotated, runs)
    return [PeerTime(name, context, batch, *result) for name, result in zip(NAMES, timed, strict=True)]


def prompt_attention(config: ModelConfig, tokens: int, runs: int) -> list[PromptPeerTime]:
    """The times of every peer for one prompt, whose data may fit into caches."""
    names = (*_BACKENDS, *FLASH)
    torch = [partial(_sdpa_prompt, backend) for backend in _BACKENDS.values()]
    makers = [*torch, *(partial(_flash_prompt, module) for module in _FLASH_MODULES.values())]
    timed = _timed(names, makers, config, tokens, 1, 1, runs)
    # Two products; each row attends to itself and all earlier rows.
    flops = 4.0 * config.attention.heads * config.attention.head_dim * tokens * (tokens + 1) / 2
    full = [f"torch {name}" if name in _BACKENDS else name for name in names]
    return [
        PromptPeerTime(name, tokens, seconds, flops, note) for name, (seconds, note) in zip(full, timed, strict=True)
    ]


def _timed(
    names: Sequence[str], makers: Sequence[Make], config: ModelConfig, context: int, batch: int, rotated: int, runs: int
) -> list[tuple[float | None, str]]:
    """For each name the seconds of a call, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return [(None, "PyTorch sees no GPU") for _ in names]
    except ImportError:
        return [(None, "PyTorch is not installed") for _ in names]
    except Exception as error:  # its libraries may not work on this machine
        return [(None, _short(error)) for _ in names]
    shape = _Shape(torch, config, context, batch, rotated)
    times: list[tuple[float | None, str]] = []
    for make in makers:
        try:
            times.append(_seconds(torch, make(shape), runs))
        except ImportError:
            times.append((None, "not installed"))
        except Exception as error:
            times.append((None, _short(error)))
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


Make = Callable[[_Shape], list[Call]]


def _makers() -> list[Make]:
    """For each of NAMES a function that makes its calls, one for each set of keys and values."""
    torch = [partial(_sdpa, backend, layout) for backend in _BACKENDS.values() for layout in _LAYOUTS]
    return [*torch, *(partial(_flash, module) for module in _FLASH_MODULES.values()), _flashinfer]


def _sdpa(backend: str, layout: str, shape: _Shape) -> list[Call]:
    """PyTorch's attention with one backend. Its calls raise RuntimeError if it does not support the shape."""
    c, module = shape.config.attention, importlib.import_module("torch.nn.attention")
    attention, chosen = shape.torch.nn.functional.scaled_dot_product_attention, getattr(module.SDPBackend, backend)
    gqa = layout == "enable_gqa"
    heads = (c.heads, 1) if gqa else (c.kv_heads, c.heads // c.kv_heads)
    q = shape.random(shape.batch, *heads, c.head_dim)

    def call(k: Any, v: Any) -> object:
        with module.sdpa_kernel(chosen):
            return attention(q, k, v, enable_gqa=True) if gqa else attention(q, k, v)

    return [partial(call, k, v) for k, v in _keys_and_values(shape)]


def _sdpa_prompt(backend: str, shape: _Shape) -> list[Call]:
    c, module = shape.config.attention, importlib.import_module("torch.nn.attention")
    attention, chosen = shape.torch.nn.functional.scaled_dot_product_attention, getattr(module.SDPBackend, backend)
    q = shape.random(1, c.heads, shape.context, c.head_dim)
    k, v = (shape.random(1, c.kv_heads, shape.context, c.head_dim) for _ in "kv")

    def call() -> object:
        with module.sdpa_kernel(chosen):
            return attention(q, k, v, is_causal=True, enable_gqa=True)

    return [call]


def _flash_prompt(module: str, shape: _Shape) -> list[Call]:
    attention, c = importlib.import_module(module).flash_attn_func, shape.config.attention
    q, k, v = (shape.random(1, shape.context, heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads))
    return [partial(attention, q, k, v, causal=True)]


def _flash(module: str, shape: _Shape) -> list[Call]:
    """FlashAttention's kernel for decoding; its caches are (B, T, K, D)."""
    attention, c = importlib.import_module(module).flash_attn_with_kvcache, shape.config.attention
    q = shape.random(shape.batch, 1, c.heads, c.head_dim)
    size = shape.batch, shape.context, c.kv_heads, c.head_dim
    sets = [(shape.random(*size), shape.random(*size)) for _ in range(shape.sets)]
    return [partial(attention, q, k, v, cache_seqlens=shape.context) for k, v in sets]


def _keys_and_values(shape: _Shape) -> list[tuple[Any, Any]]:
    size = shape.batch, shape.config.attention.kv_heads, shape.context, shape.config.attention.head_dim
    return [(shape.random(*size), shape.random(*size)) for _ in range(shape.sets)]


def _flashinfer(shape: _Shape) -> list[Call]:
    library = importlib.import_module("flashinfer")
    torch, c, batch = shape.torch, shape.config.attention, shape.batch
    pages = -(-shape.context // _PAGE)

    def integers(values: Any) -> Any:
        return torch.tensor(list(values), dtype=torch.int32, device="cuda")

    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=c.heads > c.kv_heads
    )
    last = shape.context - (pages - 1) * _PAGE
    wrapper.plan(
        *(integers(range(0, batch * pages + 1, pages)), integers(range(batch * pages)), integers([last] * batch)),
        *(c.heads, c.kv_heads, c.head_dim, _PAGE),
    )
    q = shape.random(batch, c.heads, c.head_dim)
    caches = [shape.random(batch * pages, 2, _PAGE, c.kv_heads, c.head_dim) for _ in range(shape.sets)]
    return [partial(wrapper.run, q, cache) for cache in caches]


def _seconds(torch: Any, calls: Sequence[Call], runs: int) -> tuple[float, str]:
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
        work: Call = graph.replay
    except Exception:  # the time then includes that of the host
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
