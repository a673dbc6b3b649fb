"""OpenAI's endpoint for conversations: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polarlm.server.http.generation import About
from polarlm.server.http.openai.shapes import Shapes, Writer
from polarlm.server.http.streams import DATA, Framing
from polarlm.server.http.warnings import unknown_fields
from polarlm.server.reading.fields import FIELDS
from polarlm.server.reading.parameters import ParsedRequest, read


@dataclass(frozen=True)
class OpenAI:
    """An endpoint whose answers have these shapes."""

    shapes: Shapes
    framing: Framing = DATA

    def read(self, body: dict[str, Any], about: About) -> tuple[ParsedRequest, Writer]:
        """The request. Raises BadRequest."""
        shapes, model = self.shapes, about.model
        asked = read(
            body,
            model.tokenizer.tokenize,
            (shapes.takes,),
            switched_logprobs=shapes.switched_logprobs,
            parse_special=about.parse_special,
        )
        with_logprobs = asked.params.logprobs is not None
        logprobs = [shapes.logprobs(model.tokenizer) for _ in range(asked.n if with_logprobs else 0)]
        return asked, Writer(shapes, model.name, asked.include_usage, logprobs, about.tells_cached, asked.n)

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        """Sentences about unknown fields."""
        return unknown_fields(body, FIELDS)
