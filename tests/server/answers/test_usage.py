"""The usage in OpenAI's shape: where cached tokens came from, if a tier took part."""

from __future__ import annotations

from polarlm.engine import Chunk
from polarlm.engine.outputs import Usage
from polarlm.server.http.openai.shapes import usage
from polarlm.server.socket.messages import last_of


def used(**places: int) -> Usage:
    return Usage(100, sum(places.values()), 5, 0.1, 0.2, cached_from=places)


def test_the_store_alone_is_not_told() -> None:
    assert usage([used(store=64)], 1)["prompt_tokens_details"] == {"cached_tokens": 64}


def test_places_are_summed_over_prompts() -> None:
    details = usage([used(disk=60, store=4), used(remote=10, disk=5)], 1)["prompt_tokens_details"]
    assert details == {"cached_tokens": 79, "cached_from": {"disk": 65, "remote": 10, "store": 4}}


def test_of_several_answers_to_a_prompt_the_one_that_found_least_counts() -> None:
    details = usage([used(disk=60), used(store=64)], 2)["prompt_tokens_details"]
    assert details == {"cached_tokens": 60, "cached_from": {"disk": 60}}


def test_the_socket_hides_places_with_the_count() -> None:
    chunk = Chunk("", (), "stop", used(disk=60, store=4))
    assert last_of(chunk, False)["usage"]["cached_from"] == {"disk": 60, "store": 4}
    assert last_of(chunk, True)["usage"].keys() == {"prompt_tokens", "completion_tokens"}
