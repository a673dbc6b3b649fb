"""Reads a request from JSON into a prompt, options and sampling parameters; fields.py has every field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from polarlm.engine import PromptOptions, SamplingParams
from polarlm.engine.requests.prompts import Prompt
from polarlm.server.reading.constraints import read_constraint
from polarlm.server.reading.edits import Compaction, Edit
from polarlm.server.reading.fields import field_warnings, normalize_spellings, refusal_of, requested_fields
from polarlm.server.reading.prompts import ModelInfo, read_continues, read_options, read_prompt
from polarlm.server.reading.sampling import read_sampling
from polarlm.server.reading.tools import Tools, read_tools
from polarlm.server.reading.values import BadRequest, FieldWarnings, count, flag, mapping, number, one_of, text

MAX_ANSWERS = 16  # n


@dataclass(frozen=True)
class ParsedRequest:
    prompt: Prompt  # in messages, "role" is text, and "content" is text, or texts and images
    options: PromptOptions
    params: SamplingParams
    stream: bool
    n: int  # answers to each prompt
    include_usage: bool  # include_usage of stream_options
    progress: bool = False  # whether pieces report how much of the prompt has been computed
    sign_seconds: float | None = None  # silence before a sign of life in a stream; 0: none; None: the server's
    more_prompts: tuple[Prompt, ...] = ()  # prompts with the same options; in APIs that accept several in a request
    tools: Tools | None = None
    has_custom_calls: bool = False  # whether the API has calls of custom tools; in others they are calls of functions
    constrained_by: str | None = None  # the field that constrains the answer
    reasoning: Literal["apart", "inline", "dropped"] = "apart"  # apart from the text, in it, or left out
    edits: tuple[Edit, ...] = ()  # of the prompt, which depend on its length
    in_place: bool | None = None  # whether nothing is read again after edits; None: as the server is set
    compaction: Compaction | None = None  # which comes before the answer, or in its place
    warnings: tuple[tuple[str, str], ...] = ()  # (field, sentence) of fields that are not done as they ask

    @property
    def answers(self) -> int:
        return self.n * (1 + len(self.more_prompts))

    @property
    def sentences(self) -> list[str]:
        """What is not done as it asks."""
        return [sentence for _, sentence in self.warnings]

    def each(self) -> list[ParsedRequest]:
        return [replace(self, prompt=prompt, more_prompts=()) for prompt in (self.prompt, *self.more_prompts)]


def read(
    body: Mapping[str, Any],
    info: ModelInfo,
    takes: Collection[str] = ("messages", "prompt"),
    *,
    switched_logprobs: bool = False,
) -> ParsedRequest:
    """The request in a JSON object: a prompt under one of the names in `takes`, and parameters.

    With `switched_logprobs`, log-probabilities are requested as in OpenAI's chat, by `logprobs: true` and a count in
    `top_logprobs`; otherwise `logprobs` is the count. Fields that ask for nothing and unknown fields are ignored.
    Raises BadRequest.
    """
    warnings: FieldWarnings = []
    body = requested_fields(body)
    body = normalize_spellings(_reasoning_fields(body.get("reasoning", {})) | body, warnings)
    if refusal := refusal_of(body):
        raise BadRequest(*refusal)
    usage = mapping("stream_options", body.get("stream_options", {})).get("include_usage")
    text("model", body.get("model", ""))  # any name is accepted
    answers = "n" if "n" in body else "n_cmpl"
    tools = read_tools(body, warnings)
    params = read_sampling(body, info.model.tokenizer.tokenize, switched_logprobs=switched_logprobs)
    if tools is not None and tools.calls != "none" and params.is_constrained and params.schema is None:
        sentence = "tools and a grammar, or a regular expression, exclude each other: leave one of them out"
        raise BadRequest("tools", sentence)
    if tools is not None and tools.calls == "must":
        params = replace(params, schema=None)  # the form of the text, and there is none
    prompt = read_prompt(body, takes, warnings, reads_images=info.reads_images)
    continues = read_continues(body, prompt)
    options = read_options(body, info, tools)
    return ParsedRequest(
        prompt=prompt,
        options=replace(options, continue_final_message=continues),
        params=params,
        stream=flag("stream", body.get("stream", False)),
        n=count(answers, body.get(answers, 1), 1, MAX_ANSWERS),
        include_usage=False if usage is None else flag("stream_options.include_usage", usage),
        progress=flag("return_progress", body.get("return_progress", False)),
        sign_seconds=_sign_seconds(body),
        tools=tools,
        constrained_by=read_constraint(body)[0],
        reasoning=_reasoning(body),
        warnings=(*warnings, *field_warnings(body)),
    )


def _reasoning_fields(value: Any) -> dict[str, Any]:
    """The fields that members of `reasoning`, as OpenRouter has it, stand for; those beside it count. Raises
    BadRequest."""
    members = requested_fields(mapping("reasoning", value))
    named = {"effort": "reasoning_effort", "max_tokens": "reasoning_budget_tokens"}
    fields = {ours: members[theirs] for theirs, ours in named.items() if theirs in members}
    if not flag("reasoning.enabled", members.get("enabled", True)):
        fields["reasoning_effort"] = "none"
    if flag("reasoning.exclude", members.get("exclude", False)):
        fields["include_reasoning"] = False
    return fields


def _sign_seconds(body: Mapping[str, Any]) -> float | None:
    interval = body.get("sse_ping_interval")
    if interval is None:
        return None
    seconds = number("sse_ping_interval", interval)
    if seconds != -1 and seconds < 1:
        raise BadRequest("sse_ping_interval", "sse_ping_interval must be -1, or at least 1 second")
    return max(0, seconds)


def _reasoning(body: Mapping[str, Any]) -> Literal["apart", "inline", "dropped"]:
    if not flag("include_reasoning", body.get("include_reasoning", True)):
        return "dropped"
    format = one_of("reasoning_format", body.get("reasoning_format", "auto"), ("none", "auto", "deepseek"))
    return "inline" if format == "none" else "apart"
