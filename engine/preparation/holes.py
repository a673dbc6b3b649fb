"""Messages of which later tokens see nothing: whole blocks of them are left out, once they have been read.

A message with "left_out": true, such as an old result of a tool, keeps its place and its positions. Tokens of blocks
that it shares with its neighbours stay. What came behind it before it was left out is not read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polarlm.engine.errors import EngineError
from polarlm.engine.preparation.prompt import Prompts
from polarlm.engine.requests.prompts import is_chat
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.storage.holes import Holes
from polarlm.model_loaders.tokenizers import Tokenizer

LEFT_OUT = "left_out"
_LEAST = 64  # characters of a text that is looked for; fewer have no whole block


def leave_out(engine: PromptHoles) -> Preparation:
    """The blocks of messages that are left out are no part of the prompt."""

    def prepare(submission: Submission) -> Submission:
        prompt, size = submission.prompt, engine.cache_shape.block_size
        if not is_chat(prompt) or not any(message.get(LEFT_OUT) for message in prompt):
            return submission
        if not engine.can_leave_out or submission.images or submission.is_whole:
            what = "this prompt" if engine.can_leave_out else f"a prompt of {engine.model.name}, as it is loaded here,"
            raise EngineError(f"{LEFT_OUT}: {what} is read as a whole: send messages without what is to be left out")
        ids, blocks = tuple(submission.ids), list[range]()
        for span in _spans(prompt, ids, engine.model.tokenizer):
            inside = range(max(1, -(-span.start // size)), span.stop // size)
            blocks += [inside] * bool(inside)
        if not blocks:
            return submission
        holes = Holes(ids, tuple(blocks), size, submission.salt)
        return replace(submission, ids=holes.ids, salt=holes.own_salt, image_positions=holes.positions, holes=holes)

    return prepare


class PromptHoles(Prompts):
    @property
    def can_leave_out(self) -> bool:
        """Whether messages may be left out: not with windows, recurrent layers or `replayable`."""
        layers = self.cache_shape.layers
        has_all = all(isinstance(layer, LayerShape) and layer.window is None for layer in layers)
        return has_all and self.config.kept_sequences > 0 and not self.config.replayable


def _spans(messages: Sequence[Mapping[str, Any]], ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[range]:
    """The tokens of the texts that are left out, in order. A text that the template writes in another form has none."""
    pieces = [tokenizer.token_bytes(one) for one in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    text, at = b"".join(pieces), 0
    for message in messages:
        calls = message.get("tool_calls") or ()
        parts = [message.get("content"), *(call.get("function", {}).get("arguments") for call in calls)]
        for index, part in enumerate(parts):
            sought = part.strip().encode(errors="replace") if isinstance(part, str) and len(part) >= _LEAST else b""
            if not sought or (found := text.find(sought, at)) < 0:
                continue
            at = found + len(sought)
            if message.get(LEFT_OUT) and index == 0:
                first = int(np.searchsorted(ends - [len(piece) for piece in pieces], found))
                yield range(first, int(np.searchsorted(ends, at, "right")))
