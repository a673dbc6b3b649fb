"""Llama 3's original `tokenizer.model`, and Kimi's `tiktoken.model`: lines of base64 and rank, as `tiktoken` reads
them."""

from __future__ import annotations

import base64
import re
from itertools import count
from pathlib import Path

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.tokenizers import patterns
from polarlm.model_loaders.tokenizers._pieces import SPELLING
from polarlm.model_loaders.tokenizers._special import FolderSettings, for_folder
from polarlm.model_loaders.tokenizers.hf_json import LibraryTokenizer

# The file holds no special tokens: Llama 3 numbers 256 of them after the ranks. Those not named here are reserved. Kimi
# numbers two more, whatever tokenizer_config.json calls them.
_SPECIAL_COUNT, _KIMIS_COUNT = 256, 258
_SPECIAL_NAMES = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def recognises(content: bytes) -> bool:
    """Whether a tokenizer.model is in this format."""
    return _LINE.match(content) is not None


def load(file: Path, content: bytes, settings: FolderSettings, *, is_kimi: bool = False) -> LibraryTokenizer:
    """Reads a tiktoken vocabulary. is_kimi: whether it is Kimi's. Raises LoadError if a line is damaged."""
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        added, first = settings.added_tokens(), 1 + max(ranks.values())
        if is_kimi:
            names, numbers = {number: name for name, (number, _) in added.items()}, range(first, first + _KIMIS_COUNT)
            control = {names.get(number, f"<|reserved_token_{number}|>"): number for number in numbers}
        else:
            control = {name: number for name, (number, special) in added.items() if special} or _special_tokens(first)
        bos = control.get(_SPECIAL_NAMES[0])
        special = for_folder(settings, control, control.get, adds_bos=not is_kimi, default_bos=bos)
        size = 1 + max(*ranks.values(), *control.values())
        library = bpe_of_ranks(ranks, 0, patterns.pre_tokenizer("kimi-k2" if is_kimi else "llama3"))
        return LibraryTokenizer(library, control, special, byte_level=True, vocab_size=size)
    except ValueError as error:
        raise LoadError(f"{file} is a damaged tiktoken vocabulary ({error}): download it again.") from error


def bpe_of_ranks(ranks: dict[bytes, int], first: int, pre_tokenizer: PreTokenizer | None) -> tokenizers.Tokenizer:
    """The library's object for a byte-level BPE that is given by ranks alone: any two tokens that make a third are
    merged, in the order of the ranks of what they make. first: the id of rank 0."""
    spellings = {token: "".join(map(SPELLING.__getitem__, token)) for token in ranks}
    cuts = ((token[:at], token[at:], rank) for token, rank in ranks.items() for at in range(1, len(token)))
    merges = [(rank, ranks[a], ranks[b], a, b) for a, b, rank in cuts if a in ranks and b in ranks]
    ids = {spellings[token]: first + rank for token, rank in ranks.items()}
    pairs = [(spellings[a], spellings[b]) for *_, a, b in sorted(merges)]
    library = tokenizers.Tokenizer(BPE(ids, pairs, ignore_merges=True))
    library.pre_tokenizer = pre_tokenizer
    return library


def _special_tokens(first: int) -> dict[str, int]:
    numbers = count()
    names = (_SPECIAL_NAMES.get(i) or f"<|reserved_special_token_{next(numbers)}|>" for i in range(_SPECIAL_COUNT))
    return {name: first + i for i, name in enumerate(names)}
