"""OpenAI's endpoint for raw prompts: /v1/completions, with several prompts, `echo` and `suffix`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from polarlm.engine.parsing.pieces import Answer, Piece
from polarlm.engine.requests.prompts import Prompt
from polarlm.engine.sampling.detokenizer import Detokenizer
from polarlm.model_loaders.tokenizers import Tokenizer
from polarlm.server.http.generation import Endpoint, ModelInfo
from polarlm.server.http.openai.logprobs import TextLogprobs
from polarlm.server.http.openai.shapes import ChoicesWriter
from polarlm.server.http.streams import Event
from polarlm.server.reading.fields import requested_fields
from polarlm.server.reading.infill import Mixed, with_infill_prompts
from polarlm.server.reading.parameters import ParsedRequest, read
from polarlm.server.reading.prompts import read_prompts
from polarlm.server.reading.values import BadRequest, flag, text

MOST_PROMPTS = 1024


class Completions(Endpoint):
    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, TextWriter]:
        body = requested_fields(body)
        echo, suffix = flag("echo", body.pop("echo", False)), text("suffix", body.pop("suffix", ""))
        request = read_raw(body, info)
        if suffix:
            if echo:
                raise BadRequest("suffix", "suffix and echo are both given: leave one of them out")
            request = _with_suffix(request, suffix, info.model.tokenizer)
        elif echo and request.params.logprobs is not None:
            request = replace(request, params=replace(request.params, prompt_logprobs=request.params.logprobs))
        tokenizer, count = info.model.tokenizer, 0 if request.params.logprobs is None else request.answers
        logprobs = [TextLogprobs(tokenizer, at_start=echo) for _ in range(count)]
        echoes = [partial(text_of, one.prompt, tokenizer) for one in request.each()] if echo else ()
        settings = (request.include_usage, logprobs, info.tells_cached, request.n, info.fingerprint)
        return request, TextWriter(info.name, *settings, echoes=echoes)


def read_raw(body: dict[str, Any], info: ModelInfo) -> ParsedRequest:
    """The request in a body with one or several raw prompts. Raises BadRequest."""
    prompts = None if body.get("prompt") is None else read_prompts("prompt", body["prompt"], MOST_PROMPTS)
    body = body | {"prompt": ""} if prompts else body
    request = read(body, info, ("prompt",))
    assert prompts is not None  # otherwise `read` has raised an error
    return replace(request, prompt=prompts[0], more_prompts=tuple(prompts[1:]))


def _with_suffix(request: ParsedRequest, suffix: str, tokenizer: Tokenizer) -> ParsedRequest:
    prompts = [one.prompt for one in request.each()]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("prompt", "prompt must be a string where there is a suffix")
    return with_infill_prompts("suffix", request, tokenizer, [(prompt, suffix) for prompt in prompts])


def text_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """The text of a raw prompt: strings as they were given, and token ids detokenized."""
    if isinstance(prompt, str):
        return prompt
    detokenizer = Detokenizer(tokenizer, at_start=True)
    parts = [part if isinstance(part, str) else detokenizer.push([part]) for part in cast(Mixed, prompt)]
    return "".join([*parts, detokenizer.finish()])


@dataclass(frozen=True)
class TextWriter(ChoicesWriter):
    prefix, kind, part_kind = "cmpl", "text_completion", "text_completion"

    echoes: Sequence[Callable[[], str]] = field(default=())  # texts of prompts, if answers begin with theirs
    _echoed_answers: set[int] = field(default_factory=set)  # answers that have begun

    def fields(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def piece_fields(self, piece: Piece, number: int) -> dict[str, Any]:
        return {"text": piece.text}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        prompts = [self._prompt(index, answer) for index, answer in enumerate(answers if self.echoes else ())]
        response = super().whole(answers)
        for choice, (prompt, prompt_logprobs) in zip(response["choices"], prompts, strict=False):
            choice["text"] = prompt + choice["text"]
            if prompt_logprobs is not None:
                choice["logprobs"] = {
                    name: prompt_logprobs[name] + values for name, values in choice["logprobs"].items()
                }
        return response

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        if self.echoes and piece.progress is None and index not in self._echoed_answers:
            self._echoed_answers.add(index)
            prompt, logprobs = self._prompt(index, piece)
            yield self._part({"index": index, "text": prompt, "logprobs": logprobs, "finish_reason": None})
        yield from super().events(index, piece, first=first)

    def _prompt(self, index: int, begin: Piece | Answer) -> tuple[str, dict[str, Any] | None]:
        """The text of answer `index`'s prompt, and its log-probabilities, if requested."""
        prompt = self.echoes[index // self.n]()
        if not self.logprobs:
            return prompt, None
        logprobs = self.logprobs[index]
        assert isinstance(logprobs, TextLogprobs)
        return prompt, logprobs.prompt(begin.prompt_ids, begin.prompt_logprobs)
