"""OpenAI's endpoint for conversations: /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarlm.server.http.generation import About, Endpoint
from polarlm.server.http.openai.shapes import ChoicesWriter, Shapes
from polarlm.server.reading.parameters import ParsedRequest, read


@dataclass(frozen=True)
class OpenAI(Endpoint):
    """An endpoint whose answers have these shapes."""

    shapes: Shapes

    def read(self, body: dict[str, Any], about: About) -> tuple[ParsedRequest, ChoicesWriter]:
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
        return asked, ChoicesWriter(shapes, model.name, asked.include_usage, logprobs, about.tells_cached, asked.n)
