"""Answers as they were generated, for clients that hand them back as text.

A text can be cut into tokens in more than one way, and what a model draws need not be the way a tokenizer takes. A
conversation that comes back as text alone would therefore part from what is in the store somewhere in its first answer.
So the ids of recent answers stay here, each under the whole conversation that it ends: nobody else's answer stands in
for it, and what a prompt means does not change, for the ids are the same text.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from threading import Lock
from typing import Any

from engine.sampling.detokenizer import text_of
from model_loaders import Model
from model_loaders.forks import renew_in_children

KEY_BYTES = 32  # of a digest

_CAPACITY = 1 << 20  # tokens, 4 bytes each
_ENTRY = 64  # tokens' worth of memory that an answer takes beside its own

Message = Mapping[str, Any]
Known = Sequence[tuple[str, Sequence[int]]]  # digest of a conversation that ends with an answer, and the answer's ids


class Answers:
    """The ids of recent answers. May be shared by threads."""

    def __init__(self, model: Model, *, enabled: bool):
        self._tokenizer, self._vocabulary = model.tokenizer, model.vocabulary
        self._control = frozenset(model.tokenizer.control_tokens().values())
        self._capacity = _CAPACITY if enabled else 0
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()
        renew_in_children(self)

    def renew(self) -> None:
        """Make the lock anew in a forked child: the thread that holds it may be the parent's."""
        self._lock = Lock()

    def recalled(self, messages: Sequence[Message], salt: str = "") -> Sequence[Message]:
        """`messages`, with "token_ids" wherever an assistant's answer to what is before it is known.

        salt: what is known is what was kept under the same one.
        """
        if not self._capacity or not all(_is_plain(message) for message in messages):
            return messages  # what is wrong with them is said by who reads them
        keys = list(_keys(messages, salt))
        with self._lock:
            return [self._with_ids(message, key) for message, key in zip(messages, keys, strict=True)]

    def _with_ids(self, message: Message, key: bytes) -> Message:
        known = self._ids.get(key) if message["role"] == "assistant" else None
        if known is None or message.get("token_ids") is not None:
            return message
        self._ids.move_to_end(key)
        return {**message, "token_ids": tuple(known)}

    def question(self, messages: Sequence[Message], salt: str = "") -> bytes | None:
        """What `keep` wants to know of `messages`, as they are now; None where no answers are kept."""
        if not self._capacity:
            return None
        *_, question = _keys(messages, salt)
        return question

    def keep(self, question: bytes, ids: Sequence[int]) -> None:
        """The answer to `question` was generated as `ids`; such as have no text of their own are not kept."""
        if self._control.isdisjoint(ids):
            text = text_of(self._tokenizer, ids)
            self._put(_key(question, {"role": "assistant", "content": text}), ids)

    def known(self, messages: Sequence[Message], salt: str = "") -> Known:
        """The answers in `messages` that are known, to be given to `restore` some day."""
        if not all(_is_plain(message) for message in messages):
            return ()
        keys = list(_keys(messages, salt))
        with self._lock:
            return tuple((key.hex(), tuple(self._ids[key])) for key in keys if key in self._ids)

    def restore(self, known: Known) -> None:
        """Remember what `known` has given; what are no ids of this model's text is passed over.

        That they are the text of their conversation is for whoever wrote them down to know.
        """
        for key, ids in known:
            if all(i in self._vocabulary for i in ids) and self._control.isdisjoint(ids):
                self._put(bytes.fromhex(key), ids)

    def _put(self, key: bytes, ids: Sequence[int]) -> None:
        with self._lock:
            if key in self._ids:
                self._size -= _ENTRY + len(self._ids.pop(key))
            self._ids[key] = array("i", ids)
            self._size += _ENTRY + len(ids)
            while self._size > self._capacity:
                _, oldest = self._ids.popitem(last=False)
                self._size -= _ENTRY + len(oldest)


def _is_plain(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(field), str) for field in ("role", "content"))


def _keys(messages: Sequence[Message], salt: str = "") -> Iterator[bytes]:
    """For each message, a digest of the conversation up to and with it."""
    begin = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest() if salt else b""
    return islice(accumulate(messages, _key, initial=begin), 1, None)


def _key(before: bytes, message: Message) -> bytes:
    return hashlib.blake2b(
        before + json.dumps([message["role"], message["content"]]).encode(), digest_size=KEY_BYTES
    ).digest()
