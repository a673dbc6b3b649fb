"""A local inference engine whose KV cache is stored as polar codes.

>>> from polarlm.engine import Engine, SamplingParams  # doctest: +SKIP
>>> with Engine.load("./llama3") as engine:  # doctest: +SKIP
...     for chunk in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
...         print(chunk.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from polarlm.engine.config import EngineConfig
from polarlm.engine.engine import Engine
from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import CacheStats, Chunk, Completion, Embedding, Score, TokenLogprob, Usage
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.storage.sessions import Session

if TYPE_CHECKING:
    from polarlm.engine.async_engine import AsyncEngine

__all__ = [
    "AsyncEngine",
    "CacheStats",
    "Chunk",
    "Completion",
    "Embedding",
    "Engine",
    "EngineConfig",
    "EngineError",
    "PromptOptions",
    "SamplingParams",
    "Score",
    "Session",
    "TokenLogprob",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """AsyncEngine is imported when it is first used: asyncio takes a tenth of the time of importing this package."""
    if name != "AsyncEngine":
        raise AttributeError(f"module 'polarlm.engine' has no attribute {name!r}")
    from polarlm.engine.async_engine import AsyncEngine

    return AsyncEngine
