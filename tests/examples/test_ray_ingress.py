"""The ingress without Ray's processes: what it passes on, and its answers where no replica can answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.lazily import Lazily

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")

app, exceptions = Lazily("examples.ray_serve.app"), Lazily("ray.exceptions")

START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.response.body", "body": b"fine", "more_body": False}


class Replicas:
    """Stands for a handle of replicas; `answers` are those to one call after the other: messages, or errors."""

    def __init__(self, *answers: list[Any]) -> None:
        self.calls: list[tuple[str, dict[str, Any], bytes]] = []
        self._answers = list(answers)

    def options(self, **_options: Any) -> Replicas:
        return self

    def remote(self, *call: Any) -> Response:
        self.calls.append(call)
        return Response(self._answers.pop(0))


class Response:
    """The stream of a call."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    async def __aiter__(self) -> AsyncGenerator[list[Any], None]:
        for message in self._messages:
            if isinstance(message, Exception):
                raise message
            yield [message]

    def cancel(self) -> None:
        pass


def ask(replicas: Replicas, path: str = "/v1/completions", max_body: int = 100, root: str = "") -> httpx.Response:
    served = app.PrefixIngress(replicas, max_body).__serve_build_asgi_app__()

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(served, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(f"{root}{path}?a=1", json={"prompt": "a"})

    return asyncio.run(post())


def test_a_replica_sees_the_request_without_the_prefix_of_the_application() -> None:
    replicas = Replicas([START, BODY])
    assert ask(replicas, root="/one").text == "fine"
    ((key, scope, body),) = replicas.calls
    assert (key, scope["method"], scope["path"], scope["query_string"]) == ("", "POST", "/v1/completions", b"a=1")
    assert body == b'{"prompt":"a"}'
    assert (b"content-type", b"application/json") in scope["headers"]
    assert not {"root_path", "app", "state"} & set(scope)


def test_another_replica_answers_where_one_dies_before_it_has_sent_anything() -> None:
    replicas = Replicas([exceptions.ActorDiedError()], [START, BODY])
    assert ask(replicas).text == "fine"
    assert len(replicas.calls) == 2


def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    replicas = Replicas([START, {**BODY, "more_body": True}, exceptions.ActorDiedError()])
    with pytest.raises(exceptions.ActorDiedError):
        ask(replicas)


@pytest.mark.parametrize(
    ("path", "name", "kinds"),
    [
        ("/v1/completions", "code", ["busy", "replica_died", "request_too_large"]),
        ("/v1/messages", "type", ["rate_limit_error", "overloaded_error", "request_too_large"]),
    ],
)
def test_errors_have_the_shape_of_the_path(path: str, name: str, kinds: list[str]) -> None:
    from ray.serve.exceptions import BackPressureError

    busy = ask(Replicas([BackPressureError(num_queued_requests=9, max_queued_requests=9)]), path)
    died = ask(Replicas(*[[exceptions.ActorDiedError()]] * 3), path)
    large = ask(Replicas(), path, max_body=3)
    assert [answer.status_code for answer in (busy, died, large)] == [429, 503, 413]
    assert [answer.json()["error"][name] for answer in (busy, died, large)] == kinds
    assert int(busy.headers["retry-after"]) > 0
