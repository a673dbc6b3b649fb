"""Llama 3's original `tokenizer.model`: lines of base64 and rank, which the `tiktoken` library runs."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import tiktoken

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.tokenizers._base import SpecialIds, Tokenizer
from polarlm.model_loaders.tokenizers._special import FolderSettings, for_folder
from polarlm.model_loaders.tokenizers.patterns import LLAMA3

# The file holds no special tokens: Llama 3 numbers 256 of them after the ranks. Those not named here are reserved.
_SPECIAL_COUNT = 256
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

# On longer runs of white space, or of other characters, the library's regular expressions overflow the stack. Llama 3's
# own code cuts at this length too, so the ids equal the reference's.
_LONGEST_RUN = 25_000
_RUN_TO_CUT = re.compile(rf"\s{{{_LONGEST_RUN}}}(?=\s)|\S{{{_LONGEST_RUN}}}(?=\S)")


class TiktokenTokenizer(Tokenizer):
    """A byte-level BPE that is given by ranks alone."""

    def __init__(self, ranks: dict[bytes, int], control: Mapping[str, int], special: SpecialIds) -> None:
        super().__init__(1 + max(max(ranks.values()), *control.values()), control, special)
        self._library = tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
        self._bytes_of = {rank: token for token, rank in ranks.items()}

    def _tokenize_plain(self, text: str, leading_space: bool) -> list[int]:
        return [token_id for part in _cut_long_runs(text) for token_id in self._library.encode_ordinary(part)]

    def _piece_bytes(self, token_id: int) -> bytes:
        return self._bytes_of.get(token_id, b"")


def recognises(content: bytes) -> bool:
    """Whether a tokenizer.model is in this format."""
    return _LINE.match(content) is not None


def load(file: Path, content: bytes, settings: FolderSettings) -> TiktokenTokenizer:
    """Reads a tiktoken vocabulary. Raises LoadError if a line is damaged."""
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        control = {string: token_id for string, (token_id, special) in settings.added_tokens().items() if special}
        control = control or _special_tokens(1 + max(ranks.values()))
        special = for_folder(settings, control, control.get, adds_bos=True, default_bos=control.get(_SPECIAL_NAMES[0]))
        return TiktokenTokenizer(ranks, control, special)
    except ValueError as error:
        raise LoadError(f"{file} is a damaged tiktoken vocabulary ({error}): download it again.") from error


def _special_tokens(first: int) -> dict[str, int]:
    reserved = count()
    names = (_SPECIAL_NAMES.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(_SPECIAL_COUNT))
    return {name: first + i for i, name in enumerate(names)}


def _cut_long_runs(text: str) -> Iterator[str]:
    start = 0
    for match in _RUN_TO_CUT.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]
