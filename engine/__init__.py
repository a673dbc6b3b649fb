"""A local inference engine whose KV cache is stored as polar codes.

>>> from polarlm.engine import Engine, SamplingParams  # doctest: +SKIP
>>> with Engine.load("./llama3") as engine:  # doctest: +SKIP
...     for chunk in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
...         print(chunk.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import polarlm  # noqa: F401 - `engine` alone is an alias

if TYPE_CHECKING:
    from polarlm.engine.async_engine import AsyncEngine
    from polarlm.engine.config import EngineConfig
    from polarlm.engine.engine import Engine
    from polarlm.engine.errors import EngineError
    from polarlm.engine.outputs import CacheStats, Chunk, Completion, Embedding, Score, TokenLogprob, Usage
    from polarlm.engine.params import PromptOptions, SamplingParams
    from polarlm.engine.storage.sessions import Session

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


_MODULES = {
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineError": "errors",
    "PromptOptions": "params",
    "SamplingParams": "params",
    "Session": "storage.sessions",
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: a command that loads no model starts without them."""
    if name not in __all__:
        raise AttributeError(f"module 'polarlm.engine' has no attribute {name!r}")
    return getattr(import_module(f"polarlm.engine.{_MODULES.get(name, 'outputs')}"), name)
