"""A local inference engine whose KV cache is stored as polar codes.

>>> from polarlm.engine import Engine, SamplingParams  # doctest: +SKIP
>>> with Engine.load("./llama3") as engine:  # doctest: +SKIP
...     for chunk in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
...         print(chunk.text, end="", flush=True)
"""

from polarlm.engine.async_engine import AsyncEngine
from polarlm.engine.config import EngineConfig, PromptOptions, SamplingParams
from polarlm.engine.engine import Engine
from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import CacheStats, Chunk, Completion, Embedding, Score, TokenLogprob, Usage
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
