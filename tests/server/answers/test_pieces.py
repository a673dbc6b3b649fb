"""What OpenAI's shapes and the socket write of an answer's pieces and of its usage."""

from __future__ import annotations

import pytest

from polarlm.engine import Chunk, Engine, SamplingParams, Usage
from polarlm.engine.parsing.pieces import CallStart, Piece, fold
from polarlm.server.answers.answering import answer
from polarlm.server.http.openai.chat import ChatWriter
from polarlm.server.http.openai.shapes import usage
from polarlm.server.reading.parameters import ParsedRequest, read
from polarlm.server.socket.connection import last_of
from tests.server.http_server import Serving
from tests.tiny import forget

USAGE = Usage(7, 0, 9, 0.1, 0.2)


def test_a_message_of_calls_alone_has_no_content() -> None:
    alone = fold([Piece(call=CallStart(0, "a", "f"), arguments="{}"), Piece(finish_reason="tool_calls", usage=USAGE)])
    (choice,) = ChatWriter("m", with_usage=False).whole([alone])["choices"]
    assert choice["message"]["content"] is None
    plain = fold([Piece(finish_reason="stop", usage=USAGE)])
    (choice,) = ChatWriter("m", with_usage=False).whole([plain])["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_only_a_stop_string_of_the_clients_is_named(
    tiny: Engine, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "he ran"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    forget(tiny)
    stop = tiny.chat(messages, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).text[4:6]

    async def last_piece(asked: ParsedRequest) -> Piece:
        return [piece async for piece in answer(server.driver, asked)][-1]

    forget(tiny)
    assert server.run(last_piece(read(body | {"stop": stop}, server.driver.model_info))).stopped_by == stop
    monkeypatch.setattr(tiny.model.template, "stops", (stop,))
    forget(tiny)
    last = server.run(last_piece(read(body, server.driver.model_info)))
    assert (last.finish_reason, last.stopped_by) == ("stop", None)


def used(**places: int) -> Usage:
    return Usage(100, sum(places.values()), 5, 0.1, 0.2, cached_from=places)


@pytest.mark.parametrize(
    ("usages", "answers", "cached", "told"),
    [
        ([used(store=64)], 1, 64, {}),  # the store alone is not told
        ([used(disk=60, store=4), used(remote=10, disk=5)], 1, 79, {"disk": 65, "remote": 10, "store": 4}),
        ([used(disk=60), used(store=64)], 2, 60, {"disk": 60}),  # of several answers, the one that found least counts
    ],
)
def test_places_are_summed_over_prompts(usages: list[Usage], answers: int, cached: int, told: dict[str, int]) -> None:
    details = usage(usages, answers)["prompt_tokens_details"]
    assert details == {"cached_tokens": cached, **({"cached_from": told} if told else {})}


def test_the_socket_hides_places_with_the_count() -> None:
    chunk = Chunk("", (), "stop", used(disk=60, store=4))
    assert last_of(chunk, False)["usage"]["cached_from"] == {"disk": 60, "store": 4}
    assert last_of(chunk, True)["usage"].keys() == {"prompt_tokens", "completion_tokens"}
