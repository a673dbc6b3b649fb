"""Tokenizers: one file per kind of vocabulary, each with a `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polarlm.model_loaders.errors import LoadError, panics_told, stand_in
from polarlm.model_loaders.fields import read_json
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.repository import TOKENIZERS, companion_in
from polarlm.model_loaders.tokenizers import gguf_vocab, hf_json, tekken_file, tiktoken_file
from polarlm.model_loaders.tokenizers._base import Tokenizer
from polarlm.model_loaders.tokenizers._special import FolderSettings

__all__ = ["Tokenizer", "load_for_folder", "load_for_gguf"]

_OTHERS = ("vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")


def load_for_folder(folder: Path, config: Mapping[str, object], generation: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a model folder. `config` and `generation` are its config.json and generation_config.json.

    tokenizer.json is preferred to tokenizer.model, which may be SentencePiece's or tiktoken's, and that to Mistral's
    tekken.json and to Kimi's tiktoken.model. Raises LoadError if none exists or the one that is read is damaged.
    """
    files = [companion_in(folder, name) for name in TOKENIZERS]
    whole, _, tekken, kimi = files
    tokenizer_config = read_json(companion_in(folder, "tokenizer_config.json"), required=False)
    settings = FolderSettings(folder, config, generation, tokenizer_config)
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        others = [name for name in _OTHERS if (folder / name).is_file()]
        note = f" ({' and '.join(others)} cannot be read)" if others else ""
        raise LoadError(
            f"{folder} has no tokenizer: put the model's {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]} next to its "
            f"weights{note}."
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}.") from error
    if (problem := stand_in(file, content[:64])) is not None:
        raise problem
    with panics_told(f"Reading {file}"):
        if file == whole:
            return hf_json.load(file, content, settings)
        if file == tekken:
            return tekken_file.load(file, settings)
        if tiktoken_file.recognises(content):
            return tiktoken_file.load(file, content, settings, is_kimi=file == kimi)
        from polarlm.model_loaders.tokenizers import sentence_piece  # its library takes memory

        return sentence_piece.load(file, content, settings)


def load_for_gguf(gguf: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises LoadError if its vocabulary is of an unknown kind or incomplete."""
    with panics_told(f"Reading the vocabulary of {gguf.path}"):
        return gguf_vocab.load(gguf)
