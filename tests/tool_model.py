"""A model with random weights, a vocabulary of bytes, and a chat template of the caller's choice."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

from polarlm.engine import Engine
from scripts.make_random_model import write
from scripts.random_models.shapes import Shape
from tests.model_loaders.checkpoints import finish

_SHAPE = Shape("llama", 2, 64, 128, 2, 1, 300, 16384)
_CONTROL = ("<|endoftext|>", "<s>", "<|im_end|>", "<|im_start|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|eot_id|>")
_CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_GEMMA = (
    *(
        "<|turn>",
        "<turn|>",
        "<|think|>",
        "<|channel>",
        "<channel|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)
_TEXT = ("<think>", "</think>", "<tool_call>", "</tool_call>", "th", "he")  # added, but not control tokens


def tool_model(folder: Path, template: str, text: Collection[str] = ()) -> Path:
    """The path of a model with this chat template. text: those of its tokens that are text, not control tokens."""
    tokenizer, path = folder / "tokenizer.gguf", folder / "model-Q8_0.gguf"
    writer = gguf.GGUFWriter(tokenizer, "llama")
    spelt = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "he"]
    added = list(_TEXT[:4])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    further = {"<|channel|>": _CHANNELS, "<|turn>": _GEMMA}
    control = (*_CONTROL, *(name for part, names in further.items() if part in template for name in names))
    writer.add_token_list([*control, *added, *spelt])
    kinds = [
        gguf.TokenType.USER_DEFINED if name in (*text, *added) else gguf.TokenType.CONTROL
        for name in [*control, *added]
    ]
    writer.add_token_types([int(kind) for kind in kinds] + [int(gguf.TokenType.NORMAL)] * len(spelt))
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(template)
    finish(writer)
    write(path, "tools", _SHAPE, "q8_0", tokenizer)
    return path


def tool_engine(folder: Path, template: str, text: Collection[str] = (), **settings: Any) -> Engine:
    """An engine with such a model."""
    plain: dict[str, Any] = {"device": "cpu", "cache_type": "f16", "calibration": False, "ctx_size": 8192}
    return Engine.load(tool_model(folder, template, text), **plain | settings)
