"""`tokenizer.json`: a vocabulary in one file, which the `tokenizers` library runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import normalizers

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.tokenizers import known_names
from polarlm.model_loaders.tokenizers._base import SPACE, Edges, Pair, SpecialIds, Tokenizer
from polarlm.model_loaders.tokenizers._pieces import spelt_bytes, text_of
from polarlm.model_loaders.tokenizers._special import FolderSettings, for_folder, token_string


class LibraryTokenizer(Tokenizer):
    """A vocabulary of the `tokenizers` library, byte-level (GPT-2) or SentencePiece-style ("▁", "<0x0A>")."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        control: Mapping[str, int],
        special: SpecialIds,
        *,
        byte_level: bool,
        space: tuple[bool, bool] = (False, False),
        vocab_size: int | None = None,
        edges: Mapping[str, Edges] = MappingProxyType({}),
    ) -> None:
        """edges: of control tokens, in addition to those that the library knows."""
        if vocab_size is None:
            vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        added = library.get_added_tokens_decoder().values()
        edges_by_token = {token.content: _edges(token, library.normalizer) for token in added}
        super().__init__(vocab_size, control, special, space, edges={**edges_by_token, **edges})
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # control strings are found by the base class alone
        self._library = library
        self._bytes_of = spelt_bytes if byte_level else text_of

    def keep_rows(self, rows: int) -> None:
        super().keep_rows(rows)
        added = self._library.get_added_tokens_decoder()
        if any(token_id >= rows and not token.special for token_id, token in added.items()):  # they become plain text
            description = json.loads(self._library.to_str())
            description["added_tokens"] = [entry for entry in description["added_tokens"] if entry["id"] < rows]
            self._library = _parse(description)

    @cached_property
    def _without_space(self) -> tokenizers.Tokenizer:
        """A tokenizer of the same vocabulary that adds no leading space."""
        if not self.strips_leading_space:
            return self._library
        description = json.loads(self._library.to_str())
        for step in _steps(description):
            if step["type"] == "Prepend":
                step["prepend"] = ""
            elif step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"
        return _parse(description)

    def _tokenize_plain(self, text: str, leading_space: bool) -> list[int]:
        library = self._library if leading_space else self._without_space
        # Unlike `encode`, a batch releases the interpreter's lock and computes only ids.
        return library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _piece_bytes(self, token_id: int) -> bytes:
        return self._bytes_of(self._library.id_to_token(token_id) or "")


class WordPieceTokenizer(LibraryTokenizer):
    """Words, and parts of words that begin with "##", as BERT has them. Spaces and case may be lost."""

    def _piece_bytes(self, token_id: int) -> bytes:
        piece = self._library.id_to_token(token_id) or ""
        return piece[2:].encode() if piece.startswith("##") else b" " + piece.encode() if piece else b""


def load(file: Path, content: bytes, settings: FolderSettings) -> LibraryTokenizer:
    """Reads a tokenizer.json. Raises LoadError if it is damaged or of an unknown kind."""
    try:
        text = content.decode("utf-8-sig")
        description = json.loads(text)
        ends = [token_string(settings.tokenizer.get(f"{name}_token")) for name in ("bos", "eos")]
        slips = [one for one in description["added_tokens"] if one["content"] in ends and not one["special"]]
        for entry in slips:  # what begins and ends a sequence is no text, whatever its flag
            entry["special"] = True
        library = tokenizers.Tokenizer.from_str(json.dumps(description) if slips else text)
        steps = list(_steps(description))
        control = {entry["content"]: entry["id"] for entry in description["added_tokens"] if entry["special"]}
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{file} is not a valid tokenizer.json ({error}): download it again.") from error
    kinds = {step["type"] for step in steps}
    kind = description["model"].get("type", "unknown")
    if kind != "WordPiece" and not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise LoadError(
            f"{file} holds a {kind} vocabulary; byte-level BPE, SentencePiece and WordPiece ones are supported."
        )
    first, last = _outer_control_tokens(steps)
    class_and_bos = str(settings.tokenizer.get("tokenizer_class")), token_string(settings.tokenizer.get("bos_token"))
    special = for_folder(
        settings,
        control,
        library.token_to_id,
        adds_bos=first is not None or known_names.class_adds_bos(*class_and_bos),
        default_bos=library.token_to_id(first) if first else None,
        closing_id=library.token_to_id(last) if last else None,
        pair=_pair(steps, library.token_to_id),
    )
    if kind == "WordPiece":
        return WordPieceTokenizer(library, control, special, byte_level=False)
    return LibraryTokenizer(library, control, special, byte_level="ByteLevel" in kinds, space=_leading_space(steps))


def _parse(description: dict[str, object]) -> tokenizers.Tokenizer:
    """The library's object for the contents of a tokenizer.json, for plain text."""
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    library.encode_special_tokens = True
    return library


def _edges(token: tokenizers.AddedToken, normalizer: normalizers.Normalizer | None) -> Edges:
    """What an added token does at its edges. One that is found in normalized text takes the white space in that, and
    there is none where spaces have become "▁"."""
    space = SPACE if token.lstrip or token.rstrip else ""
    if token.normalized and normalizer is not None:
        space = "".join(one for one in space if normalizer.normalize_str(one).isspace())
    return Edges(space if token.lstrip else "", space if token.rstrip else "", token.single_word)


def _steps(description: Mapping[str, object]) -> Iterator[dict]:
    """Every processing step of a tokenizer.json, including those inside sequences."""
    stages = [description.get(stage) for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    while stages:
        step = stages.pop(0)
        if isinstance(step, dict) and "type" in step:
            yield step
            for inner in ("normalizers", "pretokenizers", "processors", "decoders"):
                stages += step.get(inner, [])


def _leading_space(steps: list[dict]) -> tuple[bool, bool]:
    """Whether a space is added at the start of a text, and after control tokens."""
    for step in steps:
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            return True, True
        if step["type"] == "Metaspace":
            older = "always" if step.get("add_prefix_space", True) else "never"
            scheme = step.get("prepend_scheme", older)
            return scheme != "never", scheme == "always"
    return False, False


def _outer_control_tokens(steps: list[dict]) -> tuple[str | None, str | None]:
    """The control tokens that the post-processor puts before and after a sequence."""
    for step in steps:
        if step["type"] == "TemplateProcessing" and step["single"]:
            first, last = (step["single"][end].get("SpecialToken", {}).get("id") for end in (0, -1))
            return first, last if len(step["single"]) > 1 else None
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            return step["cls"][0], step["sep"][0]
    return None, None


def _pair(steps: list[dict], lookup: Callable[[str], int | None]) -> Pair | None:
    """How the post-processor joins two texts; None if it does not, or without control tokens between them."""
    for step in steps:
        if step["type"] == "BertProcessing":
            return Pair((step["sep"][1],), second_type=True)
        if step["type"] == "RobertaProcessing":
            return Pair((step["sep"][1],) * 2, second_type=False)
        if step["type"] == "TemplateProcessing":
            parts = [next(iter(part.items())) for part in step["pair"]]
            kinds = [kind for kind, _ in parts]
            places = [at for at, kind in enumerate(kinds) if kind == "Sequence"]
            if len(places) != 2 or places[0] > 1 or places[1] < len(parts) - 2:
                return None
            ids_between = [lookup(part["id"]) for _, part in parts[places[0] + 1 : places[1]]]
            known_ids = tuple(one for one in ids_between if one is not None)
            return (
                Pair(known_ids, parts[places[1]][1]["type_id"] == 1)
                if known_ids and len(known_ids) == len(ids_between)
                else None
            )
    return None
