"""A prompt that is too long is an error in each API's own words, by which its clients know that they must compact."""

from __future__ import annotations

import re
from typing import Any

from polarlm.engine import Engine
from tests.server.http_server import serving
from tests.tiny import CONTEXT

LONG = "then " * 300
CHAT, RAW = {"messages": [{"role": "user", "content": LONG}]}, {"prompt": LONG}
OPENAI = (rf"maximum context length is {CONTEXT} tokens", {"code": "context_length_exceeded", "n_ctx": CONTEXT})
ANTHROPIC = (rf"^prompt is too long: \d+ tokens > {CONTEXT} maximum", {"type": "invalid_request_error"})
LLAMA_SERVER = ("exceeds the available context size", {"type": "exceed_context_size_error", "n_ctx": CONTEXT})
OLLAMA = ("the input length exceeds the context length", {})
WORDS: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "/v1/chat/completions": (CHAT, OPENAI),
    "/v1/completions": (RAW, OPENAI),
    "/v1/responses": ({"input": LONG}, OPENAI),
    "/v1/messages": ({**CHAT, "max_tokens": 8}, ANTHROPIC),
    "/completion": (RAW, LLAMA_SERVER),
    "/api/chat": (CHAT, OLLAMA),
    "/api/generate": (RAW, OLLAMA),
    "/api/embed": ({"input": LONG, "truncate": False}, OLLAMA),
    "/v1/embeddings": ({"input": LONG}, OPENAI),
}


def test_a_full_context_is_told_in_the_words_of_each_api(tiny: Engine) -> None:
    with serving(tiny) as server:
        for path, (body, (words, fields)) in WORDS.items():
            # A stream of Responses fails with the same code: tests/server/dialects/test_http_responses.py.
            for stream in (False, True) if path != "/v1/responses" else (False,):
                response = server.post(path, {**body, "stream": stream})
                assert response.status_code == 400, path
                error = response.json()["error"]
                message = error if isinstance(error, str) else error["message"]
                assert re.search(words, message), (path, message)
                assert "shorten it" in message, path
                assert fields.items() <= (error if fields else {}).items(), path
