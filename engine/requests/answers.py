"""The generated ids of recent answers, for clients that send an answer back as text.

A model need not generate the tokenization that its tokenizer produces of the same text, so that a conversation sent
back as text would miss the prefix cache. So the ids are kept under a digest of the whole conversation that the answer
ends, and replace the same text in the same conversation alone. Session files and tiers keep them, too.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from polarlm.engine.images.reading import Images, ReadPrompt
from polarlm.engine.requests.prompts import Prompt, is_chat
from polarlm.engine.sampling.detokenizer import text_of
from polarlm.engine.storage.sessions import KEY_BYTES, KnownAnswers
from polarlm.engine.storage.tiers.tiers import Tiers
from polarlm.model_loaders import Model
from polarlm.model_loaders.recent import Recent

_CAPACITY = 1 << 20  # tokens, 4 bytes each
_ENTRY = 64  # overhead of an entry, in tokens

Message = Mapping[str, Any]


class Answers:
    """The ids of recent answers, at most `_CAPACITY` tokens. Thread-safe."""

    def __init__(self, model: Model, context: int, *, enabled: bool, tiers: Tiers | None = None):
        """context: the most tokens of a prompt."""
        self._images = Images(model, context)
        self.tokenizer, self._vocabulary = model.tokenizer, model.vocabulary
        self.control = frozenset(model.tokenizer.control_tokens().values())
        self._enabled = enabled
        self._tiers = tiers
        self._ids: Recent[bytes, array[int]] = Recent(_CAPACITY, lambda ids: _ENTRY + len(ids))

    def close(self) -> None:
        """End the process that decodes images."""
        self._images.close()

    def conversation(
        self, prompt: Prompt, salt: str = "", warn: Callable[[str], None] = lambda sentence: None
    ) -> Conversation:
        """Return a prompt as a `Conversation`, with the ids of its answers that are known under this salt. warn, and
        errors: see `Images.read`."""
        read = self._images.read(prompt, warn)
        prompt = read.prompt
        if not self._enabled or not is_chat(prompt) or not all(_is_known_form(message) for message in prompt):
            return Conversation(read, prompt, (), self)  # `prompt_ids` refuses malformed messages
        keys = tuple(_keys(prompt, salt))
        self._recall(prompt, keys)
        messages = [self._with_known_ids(message, key) for message, key in zip(prompt, keys, strict=True)]
        return Conversation(read, messages, keys, self)

    def _recall(self, messages: Sequence[Message], keys: Sequence[bytes]) -> None:
        """Fetch answers that are not in memory from the tiers."""
        if self._tiers is None:
            return
        pairs = [
            (key, _reasoning_key(key))
            for message, key in zip(messages, keys, strict=True)
            if message["role"] == "assistant" and message.get("token_ids") is None
        ]
        unknown = [key for pair in pairs if not any(key in self._ids for key in pair) for key in pair]
        self._put_all(self._tiers.recall(unknown).items())

    def _with_known_ids(self, message: Message, key: bytes) -> Message:
        if message["role"] != "assistant" or "token_ids" in message:  # None keeps known ids out
            return message
        for either, fields in ((key, {}), (_reasoning_key(key), {"reasoned": True})):
            if (ids := self._ids.get(either)) is not None:
                return {**message, "token_ids": tuple(ids), **fields}
        return message

    def put(self, key: bytes, ids: Sequence[int]) -> None:
        """Keep the ids of the answer that ends the conversation with digest `key`."""
        self._ids.put(key, array("i", ids))
        if self._tiers is not None:
            self._tiers.keep_answer(key, ids)

    def known_answers(self, keys: Sequence[bytes]) -> KnownAnswers:
        """Return the known answers of a conversation. keys: the digests of its messages."""
        each = [either for key in keys for either in (key, _reasoning_key(key))]
        return tuple((key.hex(), tuple(ids)) for key in each if (ids := self._ids.get(key)) is not None)

    def restore(self, answers: KnownAnswers) -> None:
        """Keep the answers of a session file, which is trusted, except answers with control tokens or unknown ids."""
        self._put_all((bytes.fromhex(key), ids) for key, ids in answers)

    def _put_all(self, answers: Iterable[tuple[bytes, Sequence[int]]]) -> None:
        for key, ids in answers:
            if all(i in self._vocabulary for i in ids) and self.control.isdisjoint(ids):
                self._ids.put(key, array("i", ids))


@dataclass(frozen=True)
class Conversation:
    """The messages of a request. Each is hashed once."""

    read: ReadPrompt  # its images
    prompt: Prompt
    """The messages, with "token_ids" in each answer whose ids are known, and "reasoned" if these begin with reasoning
    that the message lacks. A prompt of another kind is as it was given."""
    keys: Sequence[bytes]  # digests of the conversation up to the end of each message; empty if answers are not kept
    _answers: Answers

    def keep(self, ids: Sequence[int]) -> None:
        """Keep the ids of the answer to it, unless they have control tokens, which no text becomes."""
        if self.keys and self._answers.control.isdisjoint(ids):
            text = text_of(self._answers.tokenizer, ids)
            self.keep_message({"role": "assistant", "content": text}, ids, reasoned=False)

    def keep_message(self, answer: Message, ids: Sequence[int], *, reasoned: bool) -> None:
        """Keep the ids of the answer to it, which clients send back as the message `answer`. reasoned: whether the ids
        begin with reasoning, which clients may leave out."""
        if self.keys:
            key = _key(self.keys[-1], answer)
            self._answers.put(_reasoning_key(key) if reasoned else key, ids)


def _is_known_form(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)) and message.get("content") is None:
        return True
    return isinstance(message.get("content"), str)


def _keys(messages: Sequence[Message], salt: str = "") -> Iterator[bytes]:
    """Yield the digest of the conversation up to the end of each message."""
    begin = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest() if salt else b""
    return islice(accumulate(messages, _key, initial=begin), 1, None)


def _key(parent: bytes, message: Message) -> bytes:
    said = [message["role"], message.get("content") or ""]
    if calls := message.get("tool_calls"):
        said += [_call_form(call) for call in calls]
    return hashlib.blake2b(parent + json.dumps(said).encode(), digest_size=KEY_BYTES).digest()


def _reasoning_key(key: bytes) -> bytes:
    """Return the key of an answer whose ids begin with reasoning that its message lacks."""
    return hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"reasoned").digest()


def _call_form(call: Any) -> Any:
    """Return a form of a tool call that does not depend on how a client formats the arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return str(call)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(arguments, str):
        return [str(name), str(arguments)]
    try:
        return [name, json.dumps(json.loads(arguments), sort_keys=True)]
    except (ValueError, RecursionError):
        return [str(name), arguments]
