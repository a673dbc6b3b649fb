"""Log-probabilities in OpenAI's shapes, for answers to conversations and to raw prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarlm.engine import TokenLogprob
from polarlm.engine.sampling.detokenizer import Detokenizer
from polarlm.model_loaders.tokenizers import Tokenizer


class ChatLogprobs:
    """/v1/chat/completions: a list of tokens. `bytes` is exact even if `token` has U+FFFD for a part of a character."""

    def __init__(self, tokenizer: Tokenizer, *, with_ids: bool = False) -> None:
        """with_ids: whether tokens have their ids, as at llama-server."""
        self._tokenizer, self._with_ids = tokenizer, with_ids

    def write(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        id_field = {"id": token_id} if self._with_ids else {}
        return {**id_field, "token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class TextLogprobs:
    """/v1/completions: lists of equal length. `text_offset` counts the complete characters before a token. The most
    likely tokens are keys of an object, with the chosen one; of tokens with the same text, it has the most likely."""

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False) -> None:
        """at_start: whether the text begins with the prompt, not with the answer."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, at_start=at_start)
        self._offset = 0

    def prompt(self, ids: Sequence[int], tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The log-probabilities of a prompt. tokens: of all ids except the first, which has no log-probability."""
        first = {"tokens": [self._text(ids[0])], "text_offset": [self._place(ids[0])]}
        return {name: first.get(name, [None]) + values for name, values in self.write(tokens).items()}

    def write(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._text(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._most_likely(token) for token in tokens],
            "text_offset": [self._place(token.id) for token in tokens],
        }

    def _most_likely(self, token: TokenLogprob) -> dict[str, float]:
        logprobs: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.id, token.logprob)):
            logprobs.setdefault(self._text(token_id), logprob)
        return logprobs

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _place(self, token_id: int) -> int:
        """The offset of the next token, `token_id`, in the text."""
        begin = self._offset
        self._offset += len(self._detokenizer.push([token_id]))
        return begin


Logprobs = ChatLogprobs | TextLogprobs
"""Writes the log-probabilities of one answer: a choice's "logprobs" for its next tokens, piece by piece or at once."""
