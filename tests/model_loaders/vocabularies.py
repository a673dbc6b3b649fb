"""Vocabularies for tests: real ones from the data folder, and tiny ones made on the spot."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers

from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_folder, load_for_gguf
from polarlm.model_loaders.tokenizers._pieces import SPELLING
from tests.shared_data import shared

# Words of tiny vocabularies whose merges go by ranks.
RANKED = ("he", "ll", "hell", "hello", " w", "or", " wor", "ld", " world", "\u4e16", "12")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

BYTE_LEVEL = ("llama3-gguf", "llama3-json", "llama3-tiktoken", "qwen2-gguf", "qwen2.5-json")
SENTENCE_PIECE = ("llama2-gguf", "llama2-json", "llama2-model", "stories15M-json", "stories260K-json")
REAL = (*BYTE_LEVEL, *SENTENCE_PIECE)

_PLACES = {
    "llama3-gguf": ("tokenizers", "llama.cpp-vocab", "ggml-vocab-llama-bpe.gguf"),
    "llama3-json": ("tokenizers", "llama3"),
    "llama3-tiktoken": ("tokenizers", "llama3", "tokenizer.tiktoken.model"),
    "qwen2-gguf": ("tokenizers", "llama.cpp-vocab", "ggml-vocab-qwen2.gguf"),
    "qwen2.5-json": ("tokenizers", "qwen2_5"),
    "llama2-gguf": ("tokenizers", "llama.cpp-vocab", "ggml-vocab-llama-spm.gguf"),
    "llama2-json": ("tokenizers", "llama2"),
    "llama2-model": ("tokenizers", "llama2", "tokenizer.model"),
    "stories15M-json": ("models", "stories15M"),
    "stories260K-json": ("models", "stories260K"),
}


@cache
def _load(place: Path, config: str) -> Tokenizer:
    if place.suffix == ".gguf":
        return load_for_gguf(GgufFile(place))
    if place.is_dir():
        return load_for_folder(place, json.loads(config), {})
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(place, Path(folder, "tokenizer.model"))
        return load_for_folder(Path(folder), json.loads(config), {})


def real(name: str, **config: object) -> Tokenizer:
    """A real tokenizer, loaded once; skips the calling test where the data folder is absent."""
    return _load(shared(*_PLACES[name]), json.dumps(config))


@cache
def metadata(name: str) -> dict[str, Any]:
    """What a real GGUF file says."""
    return dict(GgufFile(shared(*_PLACES[name])).metadata)


@cache
def library(name: str) -> tokenizers.Tokenizer:
    """The `tokenizers` library's own object for a real tokenizer.json."""
    return tokenizers.Tokenizer.from_file(str(shared(*_PLACES[name], "tokenizer.json")))


def tiny_bpe(*more: tuple[str, int], **metadata: object) -> SimpleNamespace:
    """A GGUF with a byte-level vocabulary: the bytes, one merge, and `more` tokens (spelling, type) from id 257."""
    tokens = [*(SPELLING[byte] for byte in range(256)), "he", *(token for token, _ in more)]
    return SimpleNamespace(
        path=Path("tiny.gguf"),
        metadata={
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [NORMAL] * 257 + [kind for _, kind in more],
            "tokenizer.ggml.merges": ["h e"],
            **metadata,
        },
    )


def tiny_spm(*more: tuple[str, int], **metadata: object) -> SimpleNamespace:
    """A GGUF with a SentencePiece vocabulary: unknown, <s>, </s>, the bytes, "▁", "h", "e", "he", and `more`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "he"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 4]
    return SimpleNamespace(
        path=Path("tiny.gguf"),
        metadata={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens + [token for token, _ in more],
            "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens) + len(more))],
            "tokenizer.ggml.token_type": types + [kind for _, kind in more],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **metadata,
        },
    )
