"""What Anthropic's Messages alone have, with Anthropic's own client."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from tests.lazily import anthropic
from tests.server.apis import SLIP, alone, events
from tests.server.http_server import KEY, Serving, serving
from tests.server.lines import PATIENCE
from tests.tiny import forget, load_tiny

QUESTION: list[Any] = [{"role": "user", "content": "then he ran on"}]


@pytest.fixture
def client(server: Serving) -> Iterator[anthropic.Anthropic]:
    with server.anthropic() as client:
        yield client


def arguments(**more: Any) -> dict[str, Any]:
    """A request for an answer of 24 tokens; the client takes names that it does not know in `extra_body`."""
    body = {"model": "any", "messages": QUESTION, "max_tokens": 24, **more}
    aside = {name: body.pop(name) for name in ("ignore_eos", *SLIP) if name in body}
    return body | {"extra_body": {"temperature": 0, **aside}}


def test_the_clients_stream_accumulates_the_message(server: Serving, client: anthropic.Anthropic) -> None:
    """With a field that the client does not know."""
    whole = client.messages.create(**arguments(**SLIP))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", server.engine.model.name)
    forget(server.engine)
    with client.messages.stream(**arguments(**SLIP)) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "content_block_delta")]
        streamed = stream.get_final_message()
    assert kinds == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    for field in ("stop_reason", "stop_sequence", "usage", "role", "model"):
        assert getattr(streamed, field) == getattr(whole, field), field
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]


def test_a_stream_begins_with_the_counts_of_its_prompt(server: Serving) -> None:
    messages = [{"role": "user", "content": "then he ran on " * 4}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    for cached in (False, True):
        parts = events(server.post("/v1/messages", body).text)
        assert [part["type"] for part in parts[:3]] == ["message_start", "ping", "content_block_start"]
        begin, end = parts[0]["message"]["usage"], parts[-2]["usage"]
        assert begin == end | {"output_tokens": 0}
        assert begin["input_tokens"] + begin["cache_read_input_tokens"] > 16
        assert bool(begin["cache_read_input_tokens"]) is cached


def test_the_stop_sequence_is_named(server: Serving, client: anthropic.Anthropic) -> None:
    text = alone(server.engine, QUESTION, temperature=0, max_tokens=24, ignore_eos=True).text
    message = client.messages.create(**arguments(stop_sequences=["no such text", text[8:10]], ignore_eos=True))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[8:10])


def test_the_betas_name_of_a_format_counts_where_the_later_one_is_missing(server: Serving) -> None:
    older, later = ({"type": "json_schema", "schema": {"const": number}} for number in (7, 8))
    ignored = ["output_format is ignored: output_config.format is given as well"]
    for more, text, warnings in (({}, "7", None), ({"output_config": {"format": later}}, "8", ignored)):
        answer = server.post("/v1/messages", {"messages": QUESTION, "output_format": older, **more}).json()
        assert (answer["content"][0]["text"], answer.get("warnings")) == (text, warnings)


def test_models_have_anthropics_shape(server: Serving, client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model
    assert (model.id, model.type, model.display_name) == (server.engine.model.name, "model", server.engine.model.name)
    assert abs(model.created_at.timestamp() - time.time()) < 3600


def test_the_client_raises_its_own_errors(tiny: Engine) -> None:
    with serving(tiny, api_key=KEY, max_body=5000) as server:
        with server.anthropic(KEY) as client:
            assert client.messages.create(**arguments()).content
            with pytest.raises(anthropic.RequestTooLargeError):
                client.messages.create(**arguments(system="on " * 5000))
            with pytest.raises(anthropic.NotFoundError):
                client.messages.batches.list()
        with server.anthropic("sk-another") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**arguments())
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_what_is_marked_for_an_hour_leaves_a_disk_later(tmp_path: Path, tiny_path: Path) -> None:
    """Where the least recently used files go first: those of a marked prompt count as used an hour later."""
    ages: dict[str, int] = {}
    disk = {"cache_disk": "64M", "cache_disk_folder": str(tmp_path)}
    with load_tiny(tiny_path, device="cpu", **disk) as engine, serving(engine) as server:
        for ttl in ("1h", "5m", None):
            known = {*tmp_path.iterdir()}
            part = {"type": "text", "text": f"what {ttl} has to say " * 8}
            mark = {} if ttl is None else {"cache_control": {"type": "ephemeral", "ttl": ttl}}
            messages = [{"role": "user", "content": [part | mark]}]
            assert server.post("/v1/messages", {"messages": messages, "max_tokens": 2}).status_code == 200
            assert server.post("/v1/messages", {"messages": messages, "max_tokens": 2}).status_code == 200
            assert engine._tiers._writer.flush(PATIENCE)  # the first one's blocks were released before the second
            new = {*tmp_path.iterdir()} - known
            ages[str(ttl)] = max(file.stat().st_mtime_ns for file in new if re.fullmatch("[0-9a-f]+", file.name))
        wrong = [{"role": "user", "content": [part | {"cache_control": {"type": "ephemeral", "ttl": "2h"}}]}]
        assert "5m" in str(server.refused("/v1/messages", {"messages": wrong, "max_tokens": 2}))
    assert ages["1h"] > ages["5m"] > ages["None"]
