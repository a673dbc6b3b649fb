"""/v1/files and /v1/batches, with OpenAI's own client: every line gets one answer, whatever happens to the server."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarlm.engine import Engine
from polarlm.server.http.openai import batches
from polarlm.server.running.batches import BatchFolder
from tests.lazily import openai
from tests.server.http_server import KEY, serving
from tests.server.lines import eventually

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "then he ran on"}], "max_tokens": 8, "temperature": 0},
    RAW: {"prompt": "the rain", "max_tokens": 8, "temperature": 0, "ignore_eos": True},
    "/v1/embeddings": {"input": ["the rain", "he ran"]},
    "/v1/responses": {"input": "then he ran on", "max_output_tokens": 8, "temperature": 0},
}
ENDED = ("completed", "failed", "expired", "cancelled")


def line(name: str, url: str = RAW, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": BODIES[url] | more}


def written(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def begin(client: Any, lines: list[Any], endpoint: str = RAW) -> Any:
    file = client.files.create(file=("requests.jsonl", written(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def ended(client: Any, batch: Any) -> Any:
    eventually(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def answers(client: Any, name: str | None) -> list[dict[str, Any]]:
    return [] if name is None else [json.loads(text) for text in client.files.content(name).text.splitlines()]


def done(client: Any, batch: Any) -> int:
    return int(client.batches.retrieve(batch.id).request_counts.completed)


def without_chance(body: Any) -> Any:
    """A response without what differs each time."""
    chance = ("id", "created", "created_at", "completed_at", "usage")
    if isinstance(body, dict):
        return {name: without_chance(value) for name, value in body.items() if name not in chance}
    return [*map(without_chance, body)] if isinstance(body, list) else body


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "batches")


@pytest.mark.parametrize("endpoint", BODIES)
def test_each_line_has_the_response_that_its_request_has(engine: Engine, folder: str, endpoint: str) -> None:
    with serving(engine, batches=folder) as server:
        client = server.openai
        batch = begin(client, [line(name, endpoint) for name in "abc"], endpoint)
        assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", endpoint, "24h")
        assert batch.expires_at == batch.created_at + 86400
        end = ended(client, batch)
        assert (end.status, end.error_file_id, end.errors) == ("completed", None, None)
        assert dict(end.request_counts) == {"total": 3, "completed": 3, "failed": 0}
        assert batch.created_at <= end.in_progress_at <= end.finalizing_at <= end.completed_at
        told = answers(client, end.output_file_id)
        assert sorted(one["custom_id"] for one in told) == ["a", "b", "c"]
        expected = without_chance(server.post(endpoint, BODIES[endpoint]).json())
        for one in told:
            assert one["error"] is None
            assert one["response"]["status_code"] == 200
            assert without_chance(one["response"]["body"]) == expected
        output = client.files.retrieve(end.output_file_id)
        assert (output.purpose, output.bytes) == ("batch_output", len(client.files.content(output.id).content))


def test_files_are_listed_read_and_deleted(engine: Engine, folder: str) -> None:
    with serving(engine, batches=folder) as server:
        client = server.openai
        names = [client.files.create(file=(f"{n}.jsonl", b"%d\n" % n), purpose="batch").id for n in range(3)]
        assert [one.id for one in client.files.list()] == names[::-1]
        assert [one.id for one in client.files.list(limit=1)] == names[::-1]  # the client asks for every page
        assert [one.id for one in client.files.list(order="asc", after=names[0]).data] == names[1:]
        assert not client.files.list(purpose="batch_output").data
        kept = client.files.retrieve(names[2])
        assert (kept.filename, kept.bytes, kept.purpose, kept.object) == ("2.jsonl", 2, "batch", "file")
        assert client.files.content(names[2]).content == b"2\n"
        assert client.files.delete(names[2]).deleted
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            client.files.content(names[2])
        for path in ("/files/..%2f..%2fetc", "/files/file-1", f"/v1/batches/{names[0]}", "/v1/files/lock"):
            assert server.http.get(path).status_code == 404
        batches_run = [ended(client, begin(client, [line("a")])).id for _ in range(3)]
        assert [one.id for one in client.batches.list(limit=2)] == batches_run[::-1]


def test_a_damaged_line_is_an_error_and_ends_nothing(engine: Engine, folder: str) -> None:
    wrong = {
        "is not JSON": b'{"custom_id": "cut',
        "must be a JSON object": b"[1]",
        "not UTF-8": b"\xff\xfe",
        "custom_id must be a string": {**line("x"), "custom_id": 5},
        "earlier line": line("good"),
        "method must be POST": {**line("x1"), "method": "GET"},
        "url must be /v1/completions": line("x2", CHAT),
        "body must be an object": {**line("x3"), "body": "text"},
        "leave it out": line("x4", stream=True),
    }
    refused = [line("long", prompt="the " * 2000), line("field", max_tokens="many"), line("nan", temperature=math.nan)]
    deep = json.dumps(line("deep")).replace('"the rain"', "[" * 980 + "]" * 980).encode()
    with serving(engine, batches=folder) as server:
        client = server.openai
        end = ended(client, begin(client, [line("good"), *wrong.values(), b"", *refused, deep, line("last")]))
        assert end.status == "completed"
        assert dict(end.request_counts) == {"total": 15, "completed": 2, "failed": 13}
        assert {one["custom_id"] for one in answers(client, end.output_file_id)} == {"good", "last"}
        failed = answers(client, end.error_file_id)
        messages = [one["error"]["message"] for one in failed if one["error"] and one["custom_id"] != "deep"]
        assert len(messages) == len(wrong)
        for number, sentence in enumerate(wrong, 2):
            (message,) = (one for one in messages if one.startswith(f"line {number}:"))
            assert sentence in message
        of_server = {one["custom_id"]: one["response"] for one in failed if one["response"]}
        of_server.pop("deep", None)  # by which of the two it is refused depends on the depth of the stack
        assert {name: one["status_code"] for name, one in of_server.items()} == dict.fromkeys(
            ("long", "field", "nan"), 400
        )
        assert of_server["field"]["body"]["error"]["param"] == "max_tokens"
        assert len({one["id"] for one in failed}) == len(failed)


def test_a_file_without_lines_fails(engine: Engine, folder: str) -> None:
    with serving(engine, batches=folder) as server:
        end = ended(server.openai, begin(server.openai, [b"", b"  "]))
        assert (end.status, end.errors.data[0].code) == ("failed", "empty_file")
        assert end.failed_at >= end.created_at


def test_a_batch_that_ends_while_its_record_is_read_has_ended(
    engine: Engine, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = BatchFolder.record

    def read_slowly(self: BatchFolder, name: str) -> Any:
        record = read(self, name)
        while name.startswith("batch_") and read(self, name)["status"] not in ENDED:
            time.sleep(0.01)
        time.sleep(0.05)  # it leaves those that run
        return record

    with serving(engine, batches=folder) as server:
        batch = begin(server.openai, [line("one")])
        monkeypatch.setattr(BatchFolder, "record", read_slowly)
        assert server.openai.batches.retrieve(batch.id).status == "completed"


def test_a_batch_is_cancelled_with_the_answers_that_it_has(engine: Engine, folder: str) -> None:
    with serving(engine, batches=folder) as server:
        client = server.openai
        batch = begin(client, [line(str(n), max_tokens=40) for n in range(60)])
        eventually(lambda: done(client, batch))
        server.gate.close()
        with pytest.raises(openai.ConflictError, match="A batch reads"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        end = ended(client, batch)
        assert (end.status, end.completed_at, end.error_file_id) == ("cancelled", None, None)
        told = answers(client, end.output_file_id)
        assert 0 < len(told) == end.request_counts.completed < 60
        server.gate.open()
        eventually(server.is_idle)
        with pytest.raises(openai.ConflictError, match="cannot be cancelled: it is cancelled"):
            client.batches.cancel(batch.id)
        assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_goes_on_after_the_server(engine: Engine, folder: str) -> None:
    """It writes no line twice, and a line that was cut off again."""
    lines = [line(str(n), max_tokens=20, seed=n, temperature=1.0) for n in range(30)]
    with serving(engine, batches=folder) as server:
        batch = begin(server.openai, lines)
        eventually(lambda: done(server.openai, batch) >= 3)
        server.gate.close()
        assert server.openai.batches.retrieve(batch.id).status == "in_progress"
    (output,) = Path(folder).glob("*/*-output.jsonl")
    before = output.read_bytes().splitlines(keepends=True)
    assert 3 <= len(before) < 30
    output.write_bytes(b"".join(before)[:-40])
    with serving(engine, batches=folder) as server:
        end = ended(server.openai, batch)
        assert (end.status, dict(end.request_counts)) == ("completed", {"total": 30, "completed": 30, "failed": 0})
        content = server.openai.files.content(end.output_file_id).content
        assert content.startswith(b"".join(before[:-1]))
        told = answers(server.openai, end.output_file_id)
        assert sorted(int(one["custom_id"]) for one in told) == [*range(30)]
        for one in told[:2] + told[-2:]:
            body = lines[int(one["custom_id"])]["body"]
            expected = server.post(RAW, body).json()["choices"]
            assert one["response"]["body"]["choices"] == expected
    with serving(engine, batches=folder) as server:  # nothing is left to do
        assert server.openai.batches.retrieve(batch.id) == end
        assert server.is_idle()


def test_only_one_server_runs_the_batches_of_a_folder(engine: Engine, folder: str) -> None:
    with serving(engine, batches=folder) as server:
        other = batches.Batches(server.driver.config, None)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="another server runs the batches"):
            other.start()


def test_what_is_left_of_a_batch_expires(engine: Engine, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine, batches=folder) as server:
        client = server.openai
        server.gate.close()
        monkeypatch.setattr(batches, "_WINDOW", 1)
        end = ended(client, begin(client, [line(str(n)) for n in range(9)]))
        assert (end.status, end.output_file_id, end.request_counts.failed) == ("expired", None, 9)
        assert {one["error"]["code"] for one in answers(client, end.error_file_id)} == {"batch_expired"}


def test_two_keys_see_their_own(engine: Engine, folder: str, tmp_path: Path) -> None:
    keys = {"anna": "key-of-anna", "": "key-without-name", "anna ": "new-key-of-anna"}
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    with serving(engine, batches=folder, api_key_file=str(file), api_key=KEY) as server:
        clients = [openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in keys.values()]
        anna, other, anna_again = clients
        lines = [[line(f"{who}{n}", max_tokens=2) for n in range(100)] for who in "ab"]
        begun = [begin(client, each) for client, each in zip(clients, lines, strict=False)]
        eventually(lambda: all(done(*one) for one in zip(clients, begun, strict=False)))
        assert not all(done(*one) == 100 for one in zip(clients, begun, strict=False))  # they take turns
        for client, batch, each in zip(clients, begun, lines, strict=False):
            end = ended(client, batch)
            told = answers(client, end.output_file_id)
            assert sorted(one["custom_id"] for one in told) == sorted(one["custom_id"] for one in each)
            assert [one.id for one in client.batches.list()] == [batch.id]
            assert {one.id for one in client.files.list()} == {batch.input_file_id, end.output_file_id}
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(begun[0].id)
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            other.batches.create(input_file_id=begun[0].input_file_id, endpoint=RAW, completion_window="24h")
        assert anna_again.batches.retrieve(begun[0].id).id == begun[0].id  # the same name
        assert not server.openai.batches.list().data
        counted = server.driver.snapshot()
        assert counted.key_requests["anna"] == 100
        assert anna.batches.retrieve(begun[0].id).model_extra["key_name"] == "anna"


def test_an_interactive_request_waits_for_no_batch(tiny_path: Path, folder: str) -> None:
    """Where one request is computed at a time, it interrupts the answer of the batch."""
    settings: dict[str, Any] = {"cache_type": "f16", "calibration": False, "block_size": 16, "parallel": 1}
    with (
        Engine.load(tiny_path, device="cpu", **settings) as engine,
        serving(engine, batches=folder, max_queue=0) as server,
    ):
        client, long = server.openai, {"max_tokens": 160, "temperature": 1.0, "seed": 5}
        batch = begin(client, [line(str(n), **long) for n in range(2)])
        eventually(lambda: server.engine.status().running)
        units = list[int]()
        work = engine.work
        engine.work = lambda: units.append(1) or work()  # type: ignore[method-assign,func-returns-value]
        assert server.post(RAW, BODIES[RAW]).json()["usage"]["completion_tokens"] == 8
        ours = len(units)
        assert done(client, batch) == 0
        assert ours < 120  # of the 160 steps of the answer that was under way, and as many of the next one
        end = ended(client, batch)
        texts = {one["response"]["body"]["choices"][0]["text"] for one in answers(client, end.output_file_id)}
        assert texts == {server.post(RAW, BODIES[RAW] | long).json()["choices"][0]["text"]}


def test_files_have_a_limit(engine: Engine, folder: str) -> None:
    with serving(engine, batches=folder, max_batches_size="5000") as server:
        client = server.openai
        upload = [line(str(n)) for n in range(20)]
        with pytest.raises(openai.InternalServerError, match="--max-batches-size allows; delete some") as raised:
            client.files.create(file=("a", b"x" * 5001), purpose="batch")
        assert raised.value.status_code == 507
        with pytest.raises(openai.APIStatusError, match="larger than") as large:
            client.files.create(file=("a", b"x" * 500_000), purpose="batch")
        assert large.value.status_code == 413
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        head = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
        parts = [head % (b"purpose", b""), b"batch\r\n", head % (b"file", b'; filename="a"'), b"\r\n--x--\r\n"]
        larger = [*parts[:3], b"x" * 70_000, b"x" * 1000 + parts[3]]  # than what is allowed, with its last piece
        for pieces, status in ((parts, 200), (larger, 413)):  # in chunks, without their size in bytes
            assert server.http.post("/v1/files", content=iter(pieces), headers=form).status_code == status
        end = ended(client, begin(client, upload))
        assert (end.status, end.errors.data[0].code) == ("failed", "storage")  # its answers have no room
        assert 0 < len(answers(client, end.output_file_id)) < 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": "x"}, "metadata"),
    ],
)
def test_a_wrong_field_of_a_batch_is_named(engine: Engine, folder: str, fields: Any, param: str) -> None:
    with serving(engine, batches=folder) as server:
        file = server.openai.files.create(file=b"{}", purpose="batch")
        body = {"input_file_id": file.id, "endpoint": RAW, "completion_window": "24h"}
        for path in ("/v1/batches", "/batches"):
            response = server.post(path, body | fields)
            assert response.status_code in (400, 404)
            assert response.json()["error"]["param"] == param
        warned = server.post("/batches", body | {"colour": "red"})
        assert warned.json()["warnings"] == ["colour is unknown and ignored"]


def test_an_upload_is_a_form_with_a_file_for_batches(engine: Engine, folder: str) -> None:
    with serving(engine, batches=folder) as server:

        def upload(**how: Any) -> httpx.Response:
            return server.http.post("/v1/files", **how)

        file = {"file": ("a.jsonl", b"{}")}
        assert upload(files=file, data={"purpose": "fine-tune"}).json()["error"]["param"] == "purpose"
        assert upload(files={"other": b"{}"}, data={"purpose": "batch"}).json()["error"]["param"] == "file"
        assert upload(json={}).status_code == 415
        broken = {"Content-Type": "multipart/form-data"}
        assert "form cannot be read" in upload(content=b"x", headers=broken).json()["error"]["message"]
        of_page = upload(files=file, data={"purpose": "batch"}, headers={"Origin": "https://evil.example"})
        assert (of_page.status_code, of_page.json()["error"]["code"]) == (403, "not_allowed")
        assert not server.openai.files.list().data


def test_without_a_folder_the_endpoints_say_how_to_turn_them_on(engine: Engine) -> None:
    with serving(engine) as server:
        calls = [
            lambda: server.openai.files.create(file=b"{}", purpose="batch"),
            lambda: server.openai.files.list(),
            lambda: server.openai.batches.list(),
            lambda: server.openai.batches.retrieve("batch_1"),
        ]
        for call in calls:
            with pytest.raises(openai.InternalServerError, match="start it with --batches FOLDER") as raised:
                call()
            assert raised.value.status_code == 501
