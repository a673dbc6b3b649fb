"""A tiny model whose vocabulary has tokens for filling in."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from polarlm.engine import Engine
from tests.tiny import make_model

FILLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")


def with_fills(folder: Path) -> Path:
    """The tiny model, whose digits are tokens for filling in."""
    make_model(folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = described["model"]["vocab"]
    for digit, name in enumerate(FILLS):
        vocabulary[name] = vocabulary.pop(str(digit))
    library = tokenizers.Tokenizer.from_str(json.dumps(described))
    library.add_special_tokens(list(FILLS))
    file.write_text(library.to_str(), encoding="utf-8")
    return folder


def token(engine: Engine, name: str) -> int:
    (token_id,) = engine.tokenize(name, control=True)
    return token_id
