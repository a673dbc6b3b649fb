"""A model with random weights, a vocabulary of bytes, and a chat template of the caller's choice."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from polarlm.bench.shapes import llama
from polarlm.engine import Engine
from scripts.make_random_model import write
from tests.random_model import tokenizer_file

_CONFIG = llama(2, 64, 128, 2, 1, 32, 300, 16384, 10_000.0)
_CONTROL = ("<|endoftext|>", "<s>", "<|im_end|>", "<|im_start|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|eot_id|>")
_CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_GEMMA = (
    *("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>"),
    *("<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
_KEYS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PYTHON = ("<|tool_call_start|>", "<|tool_call_end|>")
_TEXT = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but not control tokens


def tool_model(folder: Path, template: str, text: Collection[str] = ()) -> Path:
    """The path of a model with this chat template. text: names of its tokens that are text, not control tokens."""
    further = {"<|channel|>": _CHANNELS, "<|turn>": _GEMMA, "<arg_key>": _KEYS, "<|tool_call_start|>": _PYTHON}
    control = (*_CONTROL, *(name for part, names in further.items() if part in template for name in names))
    text = [name for name in control if name in text]
    path = folder / "model-Q8_0.gguf"
    write(path, "tools", _CONFIG, "q8_0", tokenizer_file(folder, control, [*text, *_TEXT], template))
    return path


def tool_engine(folder: Path, template: str, text: Collection[str] = (), **settings: Any) -> Engine:
    plain: dict[str, Any] = {"device": "cpu", "cache_type": "f16", "calibration": False, "ctx_size": 8192}
    return Engine.load(tool_model(folder, template, text), **plain | settings)
