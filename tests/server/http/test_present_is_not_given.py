"""Typed clients send every field that they know: a body with all of them, where no value asks for
anything, is answered as the body without them, in every API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polarlm.engine import PromptOptions, SamplingParams
from polarlm.server.http.dialects import _shared, anthropic, ollama, responses
from polarlm.server.http.warnings import HEADER
from polarlm.server.reading.fields import _MEANINGFUL_EMPTY, FIELDS
from tests.server.http_server import Serving, serving
from tests.server.lines import Client

TEXT = "then he ran on"
OF_THE_MACHINE = _shared._FIELDS["ollama's options"]["harmless"]
OPTIONS = {name.removeprefix("options.") for name, _ in ollama.OPTION_ROWS}
GREEDY = {"temperature": 0}
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT: dict[str, Any] = {"messages": MESSAGES, **GREEDY}
RAW: dict[str, Any] = {"prompt": TEXT, **GREEDY}
OLLAMA: dict[str, Any] = {"stream": False, "options": GREEDY}
# Besides what is empty: values that ask for nothing, by the names of all APIs.
NEUTRAL: dict[str, list[Any]] = {
    **{name: list(field.neutral) for name, field in FIELDS.items()},
    **{key: [-1, -2, "-1", -1.0] for key in ("max_tokens", "max_completion_tokens", "n_predict")},
    **{key: [0, 0.0, "0"] for key in ("min_tokens", "dry_multiplier", "min_p", "n_probs", "top_logprobs")},
    **{key: [1, 0, 1.0] for key in ("repeat_penalty", "repetition_penalty")},
    **{key: [0, 0.0] for key in ("presence_penalty", "frequency_penalty")},
    **{key: [0, 1, 1.0] for key in ("best_of", "n", "n_cmpl")},
    **{key: [False] for key in ("ignore_eos", "logprobs", "return_progress", "echo")},
    **{key: [False] for key in ("stream", "raw", "insecure", "verbose", "background", "store", "add_special")},
    **{key: [False] for key in ("with_pieces", "return_documents")},
    "mirostat": [0, 0.0],
    "typical_p": [0, 1.0],
    "repeat_last_n": [64, 64.0, "64"],
    "seed": [-1, 0, 2**64 + 1, -(2**40), 5.0],  # greedy answers have no chance
    "top_k": [0, -1, -2, 0.0],
    "top_p": [1, 0],
    "top_n_sigma": [0, -1],
    "adaptive_target": [-1.0],
    "id_slot": [-1, 0],
    "cache_prompt": [True],
    "parallel_tool_calls": [True, False],
    "stream_options": [{"include_usage": None}],
    "response_format": [{"type": "text"}, {"type": ""}, "auto"],
    "structured_outputs": [{"regex": "", "choice": []}],
    "metadata": [{"user_id": None}],
    "dimensions": [0, -1],
    "encoding_format": ["float"],
    "embd_normalize": [2],
    "top_n": [0, -1],
    "keep_alive": [0, -1, "5m"],
    "truncation": ["disabled"],
    "max_output_tokens": [0, -1, "-1"],
    "text": [{"format": {"type": "text"}, "verbosity": ""}, {"format": {}}],
    "reasoning": [{"effort": None}, {"effort": "", "summary": "auto"}, {"effort": "default"}],
    "output_config": [{"effort": "", "format": {}}],
    "thinking": [{"type": "adaptive", "budget_tokens": 0}, {"type": None}],
    "options": [
        {**GREEDY, **dict.fromkeys(OF_THE_MACHINE, -1)},
        {**GREEDY, **dict.fromkeys(OF_THE_MACHINE, 1 << 40), "stop": [""], "seed": -1},
        {**GREEDY, "num_predict": -2, "mirostat": 0, "tfs_z": 1, "typical_p": 0, "repeat_last_n": 64.0},
        {**GREEDY, **dict.fromkeys(OPTIONS - GREEDY.keys())},
    ],
}
OF_CHAT = {**NEUTRAL, **{key: [0, 0.0] for key in ("max_tokens", "max_completion_tokens", "logprobs")}}
OF_CHOICES = {**OF_CHAT, "tool_choice": [{"type": "auto"}, {"type": "none"}]}  # objects
EMBEDDED = {"dimensions", "encoding_format", "pooling", "prompt_name", "embd_normalize", "user", "cache_salt", "model"}
# Path → the body without the fields, the fields, and their values.
APIS: dict[str, tuple[dict[str, Any], set[str], dict[str, list[Any]]]] = {
    "/v1/chat/completions": (CHAT, {*FIELDS}, OF_CHAT),
    "/v1/completions": (RAW, {*FIELDS}, NEUTRAL),
    "/v1/messages": (CHAT, {*anthropic.Messages.known}, OF_CHOICES),
    "/v1/responses": ({"input": TEXT, **GREEDY}, {*responses.Responses.known}, OF_CHAT),
    "/completion": (RAW, {*FIELDS}, NEUTRAL),
    "/infill": ({"input_prefix": TEXT, "input_suffix": "on", **GREEDY}, {*FIELDS, "input_extra"}, NEUTRAL),
    "/apply-template": (CHAT, {*FIELDS}, OF_CHAT),
    "/tokenize": ({"content": TEXT}, {"add_special", "parse_special", "with_pieces", "prompt", "messages"}, NEUTRAL),
    "/v1/embeddings": ({"input": TEXT}, {*EMBEDDED, "content", "truncate_prompt_tokens"}, NEUTRAL),
    "/v1/rerank": ({"query": "a", "documents": [TEXT]}, {"top_n", "return_documents", "instruction", "model"}, NEUTRAL),
    "/v1/score": ({"text_1": "a", "text_2": TEXT}, {"queries", "documents", "instruction", "model"}, NEUTRAL),
    "/pooling": ({"input": TEXT}, {*EMBEDDED, "content", "task"}, NEUTRAL),
    "/api/chat": ({"messages": MESSAGES, **OLLAMA}, {*ollama.CHAT.known}, NEUTRAL),
    "/api/generate": ({"prompt": TEXT, **OLLAMA}, {*ollama.GENERATE.known}, NEUTRAL),
    "/api/embed": ({"input": TEXT}, {"truncate", "dimensions", "keep_alive", "options", "model"}, NEUTRAL),
    "/api/show": ({}, {"model", "name", "system", "template", "options", "verbose"}, NEUTRAL),
}
REPEATED = ("top_p", "parallel_tool_calls", "metadata")  # in a response, from its request
CHANGING = (*REPEATED, "id", "created", "created_at", "usage", "timings", "tokens_cached", "generation_settings")


@pytest.fixture
def server(filling: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    one = (TEXT, SamplingParams(max_tokens=0), PromptOptions(pooling="mean"))  # this model cannot rank
    monkeypatch.setattr(filling.engine, "rank_jobs", lambda *_, **__: [one])
    monkeypatch.setattr(filling.engine, "ranking_note", lambda: None)
    with serving(filling.engine, max_tokens=3) as running:
        yield running


def rounds(base: dict[str, Any], names: set[str], values: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Bodies with all fields at once, each with other values."""
    kept = base.keys() - {"options"}
    asked = {
        name: [one for one in (None, "", [], {}) if one not in _MEANINGFUL_EMPTY.get(name, ())] + values.get(name, [])
        for name in names - kept - {"add_special_tokens"}  # which has no such value
    }
    if "options" in base:
        asked["options"] = values["options"]
    for at in range(max(map(len, asked.values()))):
        yield base | {name: choices[at % len(choices)] for name, choices in asked.items()}


def lasting(answer: Any) -> Any:
    """An answer without what differs from request to request."""
    if isinstance(answer, list):
        return [lasting(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {
        name: lasting(value)
        for name, value in answer.items()
        if name not in CHANGING and not name.endswith("_duration")
    }


def test_what_asks_for_nothing_changes_nothing(server: Serving) -> None:
    for path, (base, names, values) in APIS.items():
        plain = server.post(path, base)
        assert plain.status_code == 200, (path, plain.text)
        for body in rounds(base, names, values):
            answer = server.post(path, body)
            assert answer.status_code == 200, (path, answer.text, body)
            assert lasting(answer.json()) == lasting(plain.json()), (path, body)
            assert answer.headers.get(HEADER) is None, path


def test_nor_does_it_on_the_socket(start: Callable[..., Any]) -> None:
    with Client(start(max_tokens=3).address) as client:
        plain, last = client.ask(id=0, **RAW)
        names = {*FIELDS, "cancel", "save", "load"} - {"messages"}
        for at, body in enumerate(rounds(RAW, names, {**NEUTRAL, "cancel": [False]})):
            text, end = client.ask(**body, id=at + 1)
            assert (text, end.get("finish_reason")) == (plain, last["finish_reason"]), (end, body)
