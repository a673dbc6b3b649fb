"""SentencePiece vocabularies: `tokenizer.model`, and vocabularies of GGUF files, rebuilt as the same protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.tokenizers._base import Edges, SpecialIds, Tokenizer
from polarlm.model_loaders.tokenizers._pieces import text_of
from polarlm.model_loaders.tokenizers._special import FolderSettings, for_folder

# A type checker cannot see the classes of a protobuf module, which are made at import.
protobuf: Any = sentencepiece_model_pb2
_Piece = protobuf.ModelProto.SentencePiece


class SentencePieceTokenizer(Tokenizer):
    """A vocabulary that the `sentencepiece` library runs."""

    def __init__(
        self, model: Any, special: SpecialIds, *, space_after_control: bool, edges: Mapping[str, Edges]
    ) -> None:
        """model: a ModelProto. Raises RuntimeError if the library does not accept it."""
        adds_space = model.normalizer_spec.add_dummy_prefix
        super().__init__(
            len(model.pieces),
            control_pieces(model),
            special,
            (adds_space, adds_space and space_after_control),
            edges=edges,
        )
        self._serialized = model.SerializeToString()
        self._library = sentencepiece.SentencePieceProcessor(model_proto=self._serialized)

    @cached_property
    def _without_space(self) -> sentencepiece.SentencePieceProcessor:
        """A tokenizer of the same vocabulary that adds no leading space."""
        model = protobuf.ModelProto.FromString(self._serialized)
        model.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def _tokenize_plain(self, text: str, leading_space: bool) -> list[int]:
        library = self._library if leading_space or not self.strips_leading_space else self._without_space
        return library.encode(text, out_type=int)

    def _piece_bytes(self, token_id: int) -> bytes:
        piece = self._library.id_to_piece(token_id)
        return text_of(piece) if self._library.is_byte(token_id) else piece.replace("▁", " ").encode()


def control_pieces(model: Any) -> dict[str, int]:
    """String → id of the pieces of a ModelProto that never stand for text: control pieces and the unknown piece."""
    kinds = (_Piece.CONTROL, _Piece.UNKNOWN)
    return {piece.piece: token_id for token_id, piece in enumerate(model.pieces) if piece.type in kinds}


def load(file: Path, content: bytes, settings: FolderSettings) -> SentencePieceTokenizer:
    """Reads a SentencePiece model. Raises LoadError if it is damaged."""
    model = protobuf.ModelProto()
    try:
        model.ParseFromString(content)
        if not model.pieces:
            raise DecodeError("no pieces")
        _append_added_tokens(model, settings)
        ids = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
        special = for_folder(
            settings, control_pieces(model), ids.get, adds_bos=True, default_bos=ids.get(model.trainer_spec.bos_piece)
        )
        # transformers' fixed ("non-legacy") tokenizer adds a space only at the start of a text.
        legacy = settings.tokenizer.get("legacy") is not False
        return SentencePieceTokenizer(model, special, space_after_control=legacy, edges=settings.edges())
    except (DecodeError, RuntimeError) as error:
        raise LoadError(
            f"{file} is neither a SentencePiece model nor a tiktoken vocabulary: download it again."
        ) from error


def _append_added_tokens(model: Any, settings: FolderSettings) -> None:
    """Append the tokens that fine-tunes add in tokenizer_config.json alone to the vocabulary."""
    added = sorted((token_id, string, special) for string, (token_id, special) in settings.added_tokens().items())
    limit = len(model.pieces) + len(added)
    for token_id, string, special in added:
        if len(model.pieces) <= token_id < limit:
            while len(model.pieces) < token_id:
                model.pieces.add(piece=f"<unused {len(model.pieces)}>", type=_Piece.UNUSED)
            model.pieces.add(piece=string, type=_Piece.CONTROL if special else _Piece.USER_DEFINED)
