"""The vocabulary inside a GGUF file, rebuilt as a library's model from the lists of `tokenizer.ggml.*`.

Keys and token types follow ggml's docs/gguf.md; absent keys have llama.cpp's defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import describe
from polarlm.model_loaders.files.gguf_file import GgufFile, Strings
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.tokenizers import known_names, patterns
from polarlm.model_loaders.tokenizers._base import NO_ID, Edges, Pair, SpecialIds, Tokenizer
from polarlm.model_loaders.tokenizers._pieces import byte_of
from polarlm.model_loaders.tokenizers.hf_json import LibraryTokenizer, WordPieceTokenizer

if TYPE_CHECKING:
    from polarlm.model_loaders.tokenizers.sentence_piece import SentencePieceTokenizer


_LOG = logging.getLogger(__name__)


class _Type(IntEnum):
    """GGUF's token types, which have the same numbers as SentencePiece's but for the first."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ANY_WORDS = "default"  # `tokenizer.ggml.pre` of files without it
_ADDED = (_Type.CONTROL, _Type.USER_DEFINED)
_END_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPECIAL_NAMES = ("bos", "unknown", "cls", "seperator", *_END_NAMES)  # files spell it "seperator"
_DEFAULT_IDS = {("llama", "bos"): 1, ("llama", "eos"): 2, ("llama", "unknown"): 0, ("t5", "eos"): 1}


@dataclass(frozen=True)
class _Vocabulary:
    path: Path
    metadata: Mapping[str, object]
    tokens: list[str]  # V
    types: list[int]  # V

    def ids_of_types(self, *kinds: _Type) -> list[int]:
        """The ids of the tokens of these types, in order; without a step of Python for each of the others."""
        return [int(i) for i in np.flatnonzero(np.isin(self.types, kinds))]

    @cached_property
    def control(self) -> dict[str, int]:
        return {self.tokens[i]: i for i in self.ids_of_types(_Type.CONTROL, _Type.UNKNOWN)}

    @cached_property
    def known_ids(self) -> dict[str, int]:
        """String → id of the tokens that are known by name."""
        return {name: self.tokens.index(name) for name in known_names.KNOWN_TOKENS.intersection(self.tokens)}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of `tokenizer.ggml.{…}_token_id`: "bos", "eos", "unknown", …; without those that are no tokens."""
        ids = {}
        for name in _SPECIAL_NAMES:
            key = f"tokenizer.ggml.{name}_token_id"
            value = self.metadata.get(key, _DEFAULT_IDS.get((self.kind, name)))
            if isinstance(value, int) and 0 <= value < len(self.tokens):
                ids[name] = value
            elif value not in (None, NO_ID):
                problem = f"is {describe(value)}, which is none of its {len(self.tokens)} tokens; it is left out"
                _LOG.warning("%s: %s %s", self.path, key, problem)
        return ids

    @property
    def kind(self) -> str:
        return str(self.metadata.get("tokenizer.ggml.model"))

    def special(self, *, adds_bos: bool, closes: bool = False) -> SpecialIds:
        """BOS and the ends. adds_bos, closes: whether sequences begin and end with them if the file does not say."""
        flag = self.metadata.get("tokenizer.ggml.add_bos_token")
        wants = known_names.begins_with_bos(self.kind, self.control, flag, adds_bos)
        ends = {self.control[name] for name in known_names.ends(self.control)}
        ends |= {self.special_ids[name] for name in _END_NAMES if name in self.special_ids}
        ends |= {i for name, i in self.known_ids.items() if name in known_names.CODE_ENDS and self.types[i] in _ADDED}
        end = self.special_ids.get("eos") if self.metadata.get("tokenizer.ggml.add_eos_token", closes) is True else None
        times = 1 if end == self.control.get("[SEP]") else 2  # as ModernBERT, and as XLM-R
        pair = None if end is None else Pair((end,) * times, second_type=False)
        bos = self.special_ids.get("bos", self.control.get("<bos>"))
        return SpecialIds(bos if wants else None, frozenset(ends), end, pair)

    def edges(self) -> dict[str, Edges]:
        """The control tokens that remove white space around them."""
        family, model = (str(self.metadata.get(f"general.{key}")) for key in ("architecture", "name"))
        return known_names.white_space(family, model, self.kind, self.control)

    def correct_types(self) -> None:
        """Give tokens the types that they have by their names: converters make mistakes, and llama.cpp corrects the
        same ones."""
        types, ends, words = self.types, known_names.ends(self.known_ids), known_names.words(self.known_ids)
        keyed = {self.special_ids[name] for name in ("bos", "eos", "eot", "eom") if name in self.special_ids}
        for name, i in self.known_ids.items():
            is_end = name in ends and (name in known_names.ENDS or types[i] == _Type.USER_DEFINED)
            if is_end or (i in keyed and name not in known_names.CODE_ENDS):
                types[i] = _Type.CONTROL
            elif name in words and types[i] == _Type.CONTROL:
                types[i] = _Type.USER_DEFINED
        for i in keyed | {self.known_ids[name] for name in ends}:
            name = self.tokens[i]
            if types[i] == _Type.NORMAL and name not in known_names.CODE_ENDS and not self._is_word(name):
                types[i] = _Type.CONTROL

    def _is_word(self, token: str) -> bool:
        """Whether text may become this token, of type NORMAL: it is merged of others, or is a single character."""
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        if self.kind == "llama":
            tokens = set(self.tokens)
            return not halves or any(tokens.issuperset(pair) for pair in halves)
        merges = self.metadata.get("tokenizer.ggml.merges")
        if not halves or not isinstance(merges, Sequence):  # without merges, as in Unigram, any piece may be taken
            return True
        return any(" ".join(pair) in merges for pair in halves)

    def list_of(self, key: str, kind: type | tuple[type, ...], length: int | None = None) -> Sequence[Any]:
        """A list in the metadata. Raises LoadError if it is missing, of another type or not `length` long."""
        values: Any = self.metadata.get(key)
        if isinstance(values, Strings):
            is_right = kind is str
        else:
            is_right = isinstance(values, list) and all(isinstance(value, kind) for value in values)
        if not is_right:
            raise LoadError(f"{self.path} has no usable {key}: its vocabulary is incomplete, convert the model again.")
        if length is not None and len(values) != length:
            raise LoadError(f"{self.path} lists {length} tokens but {len(values)} entries in {key}: download it again.")
        return values


class _Merges(Sequence[Any]):
    """Merges as pairs of strings, which are made when the library reads them."""

    def __init__(self, merges: Sequence[str]) -> None:
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._merges[index].split(" ", 1))

    def __iter__(self) -> Iterator[Any]:
        return (tuple(merge.split(" ", 1)) for merge in self._merges)


def check_kind(metadata: Mapping[str, object], where: str | Path) -> str:
    """The kind of the vocabulary that a file's metadata describe. Raises LoadError for one that is not known."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", _ANY_WORDS)
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise LoadError(
            f"{where} has a vocabulary of the kind {describe(kind)} (tokenizer.ggml.model); "
            f"supported are {', '.join(_BUILDERS)}."
        )
    if kind == "gpt2" and pre not in patterns.PRE_TOKENIZERS:
        raise LoadError(
            f"{where} splits text into words as {describe(pre)} does (tokenizer.ggml.pre), which is not known here; "
            f"known are {', '.join(patterns.PRE_TOKENIZERS)}: use the model's safetensors folder instead."
        )
    return kind


def load(gguf: GgufFile) -> Tokenizer:
    """Rebuilds the tokenizer of a GGUF file. Raises LoadError for an unknown kind or an incomplete vocabulary."""
    kind = check_kind(gguf.metadata, gguf.path)
    vocabulary = _Vocabulary(gguf.path, gguf.metadata, [], [])
    tokens = list(vocabulary.list_of("tokenizer.ggml.tokens", str))
    types = [int(_Type.NORMAL)] * len(tokens)
    if "tokenizer.ggml.token_type" in gguf.metadata:
        types = list(vocabulary.list_of("tokenizer.ggml.token_type", int, len(tokens)))
    if unknown := set(types) - set(_Type):
        raise LoadError(f"{gguf.path} has tokens of the unknown type {min(unknown)} (tokenizer.ggml.token_type).")
    if _Type.UNDEFINED in types:
        types = [one or int(_Type.UNUSED) for one in types]
    if kind == "llama" and _Type.BYTE not in types:
        types = [one if byte_of(token) is None else int(_Type.BYTE) for token, one in zip(tokens, types, strict=True)]
    vocabulary = _Vocabulary(gguf.path, gguf.metadata, tokens, types)
    vocabulary.correct_types()
    return _BUILDERS[kind](vocabulary)


def _byte_level_bpe(vocabulary: _Vocabulary) -> LibraryTokenizer:
    name = str(vocabulary.metadata.get("tokenizer.ggml.pre", _ANY_WORDS))
    pre_tokenizer = patterns.pre_tokenizer(name)
    whole_words = patterns.takes_known_words_whole(name)  # the same kinds begin sequences with BOS
    return _bpe(vocabulary, pre_tokenizer, None, byte_level=True, adds_bos=whole_words, ignore_merges=whole_words)


def _spaced_bpe(vocabulary: _Vocabulary) -> LibraryTokenizer:
    """Merges of characters, where "▁" stands for a space. Characters without a token become bytes."""
    lines = pre_tokenizers.Split(tokenizers.Regex("\n+"), "isolated")
    spaces = normalizers.Replace(" ", "▁")
    return _bpe(vocabulary, lines, spaces, byte_level=False, adds_bos=True, byte_fallback=True)


def _bpe(
    vocabulary: _Vocabulary, pre_tokenizer: Any, normalizer: Any, *, byte_level: bool, adds_bos: bool, **arguments: Any
) -> LibraryTokenizer:
    """The tokenizer of merges. arguments: further ones of the library's model."""
    control = vocabulary.control
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if token not in control}
    merges = _Merges(vocabulary.list_of("tokenizer.ggml.merges", str))
    try:
        library = tokenizers.Tokenizer(BPE(vocab=ids, merges=merges, **arguments))
    except Exception as error:  # the library raises bare Exception
        raise LoadError(
            f"{vocabulary.path} has merges that do not fit its tokens ({error}): convert it again."
        ) from error
    library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    added = (vocabulary.tokens[i] for i in vocabulary.ids_of_types(_Type.USER_DEFINED))
    library.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added if token])
    special, size = vocabulary.special(adds_bos=adds_bos), len(vocabulary.tokens)
    edges = vocabulary.edges()
    return LibraryTokenizer(library, control, special, byte_level=byte_level, vocab_size=size, edges=edges)


def _word_piece(vocabulary: _Vocabulary) -> WordPieceTokenizer:
    """Words, which such files mark with "▁", and parts of words, which BERT marks with "##".

    Older files do not say whether text is lower-cased first: it is if no word has a capital letter.
    """
    control = vocabulary.control
    ids = {
        token if token in control else token[1:] if token.startswith("▁") else f"##{token}": i
        for i, token in enumerate(vocabulary.tokens)
    }
    unknown = vocabulary.special_ids.get("unknown", 100)
    if unknown >= len(vocabulary.tokens):
        raise LoadError(f"{vocabulary.path} has no token {unknown} for unknown words: convert it again.")
    name = vocabulary.tokens[unknown]
    library = tokenizers.Tokenizer(WordPiece(ids, unk_token=name if name in ids else f"##{name}"))
    lowers = vocabulary.metadata.get("tokenizer.ggml.normalizer.lowercase")
    if not isinstance(lowers, bool):
        lowers = not any(token != token.lower() for token in ids if token not in control)
    strips = vocabulary.metadata.get("tokenizer.ggml.normalizer.strip_accents")
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lowers, strip_accents=strips if isinstance(strips, bool) else None
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bos, sep = (
        vocabulary.special_ids.get(key, control.get(default))
        for key, default in (("cls", "[CLS]"), ("seperator", "[SEP]"))
    )
    bos = vocabulary.special_ids.get("bos") if bos is None else bos
    pair = None if sep is None else Pair((sep,), second_type=True)
    special = SpecialIds(bos, frozenset(() if sep is None else (sep,)), sep, pair)
    return WordPieceTokenizer(library, control, special, byte_level=False, vocab_size=len(vocabulary.tokens))


def _sentence_piece(vocabulary: _Vocabulary) -> SentencePieceTokenizer:
    from polarlm.model_loaders.tokenizers.sentence_piece import (  # its libraries take memory
        SentencePieceTokenizer,
        protobuf,
    )

    scores = vocabulary.list_of("tokenizer.ggml.scores", (int, float), len(vocabulary.tokens))
    model = protobuf.ModelProto()
    spellings: set[str] = set()
    for token_id, (token, kind, score) in enumerate(zip(vocabulary.tokens, vocabulary.types, scores, strict=True)):
        if not token or token in spellings:  # padding; the library requires unique pieces
            token, kind = f"<unused {token_id}>", int(_Type.UNUSED)
        spellings.add(token)
        model.pieces.add(piece=token, type=kind, score=score)
    is_unigram = vocabulary.kind == "t5"
    model.trainer_spec.model_type = protobuf.TrainerSpec.UNIGRAM if is_unigram else protobuf.TrainerSpec.BPE
    _specify(model, vocabulary)
    special = vocabulary.special(adds_bos=not is_unigram, closes=is_unigram)
    try:
        return SentencePieceTokenizer(model, special, space_after_control=True, edges=vocabulary.edges())
    except RuntimeError as error:
        raise LoadError(f"{vocabulary.path} has an inconsistent vocabulary ({error}): convert it again.") from error


def _specify(model: Any, vocabulary: _Vocabulary) -> None:
    model.trainer_spec.byte_fallback = vocabulary.types.count(_Type.BYTE) == 256
    if _Type.UNKNOWN not in vocabulary.types and model.pieces:
        model.pieces[vocabulary.special_ids.get("unknown", 0)].type = _Type.UNKNOWN
    setting = vocabulary.metadata.get
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = setting("tokenizer.ggml.add_space_prefix", True) is True
    normalizer.remove_extra_whitespaces = setting("tokenizer.ggml.remove_extra_whitespaces", False) is True
    charsmap = setting("tokenizer.ggml.precompiled_charsmap", [])
    if isinstance(charsmap, list) and all(isinstance(value, int) for value in charsmap):
        normalizer.precompiled_charsmap = bytes(value & 0xFF for value in charsmap)


_BUILDERS: dict[str, Callable[[_Vocabulary], Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentence_piece,
    "gemma4": _spaced_bpe,
    "bert": _word_piece,
    "t5": _sentence_piece,
}
