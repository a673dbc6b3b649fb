"""/documents/text: the text of PDF files, and sentences about files without text."""

from __future__ import annotations

import asyncio
import io
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pypdf
import pytest

from polarlm.engine import Engine
from polarlm.server.http import documents
from tests.server.http_server import KEY, Serving, serving
from tests.server.lines import eventually
from tests.server.pdfs import made_pdf

HEAD = (
    f"POST /documents/text HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    "Content-Type: application/pdf\r\nContent-Length: 4\r\n\r\n"
).encode()


@pytest.fixture
def guarded(engine: Engine) -> Iterator[Serving]:
    with serving(engine, api_key=KEY, max_body=2000) as running:
        yield running


def send(server: Serving, data: bytes, kind: str = "application/pdf", **headers: str) -> httpx.Response:
    return server.http.post("/documents/text", content=data, headers={"Content-Type": kind, **headers})


def locked(data: bytes) -> bytes:
    written = pypdf.PdfWriter(io.BytesIO(data))
    written.encrypt("secret", algorithm="RC4-128")
    out = io.BytesIO()
    written.write(out)
    return out.getvalue()


@pytest.mark.slow
def test_a_pdf_becomes_text_and_others_a_sentence(guarded: Serving) -> None:
    assert send(guarded, made_pdf("Hello, PDF")).json() == {"text": "Hello, PDF", "pages": 1}
    wrong = {
        b"plain text": "is not a PDF",
        b"%PDF-1.7 and nothing else": "is damaged",
        made_pdf("Hello")[:300]: "is damaged",
        made_pdf(""): "only pictures",
        made_pdf("a" * 3000): "more text than a request may have",
        locked(made_pdf("Hello")): "locked with a password",
    }
    for data, sentence in wrong.items():
        answer = send(guarded, data)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert sentence in answer.json()["error"]["message"]


def test_it_needs_the_key_the_type_and_a_bounded_size(guarded: Serving) -> None:
    data = made_pdf("Hello")
    assert send(guarded, data, Authorization="Bearer other").status_code == 401
    assert send(guarded, data, kind="text/plain").status_code == 415  # which a form of another origin can send
    assert send(guarded, data + b" " * 32_000).status_code == 413
    assert send(guarded, data).status_code == 200


@pytest.mark.slow
def test_no_bytes_break_it(guarded: Serving) -> None:
    rng, whole = random.Random(0), made_pdf("Hello, PDF")
    for number in range(30):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 9)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        answer = send(guarded, bytes(data))
        assert answer.status_code in (200, 400), f"{number}: {bytes(data)!r} → {answer.text}"
    assert send(guarded, whole).json() == {"text": "Hello, PDF", "pages": 1}


def test_a_client_that_leaves_ends_the_reading_of_its_file(guarded: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def endless(data: bytes, most: int, seconds: float) -> bytes:
        told.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            told.append("ended")
        return data

    monkeypatch.setattr(documents, "_read", endless)
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(HEAD + b"%PDF")
        eventually(lambda: told)
        assert told == ["began"]
    eventually(lambda: told == ["began", "ended"])


def test_files_that_take_long_keep_no_other_from_it(guarded: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = list[float](), documents._read

    async def endless_or_read(data: bytes, most: int, seconds: float) -> bytes | None:
        if data != b"%PDF":
            return await read(data, most, 60.0)
        reads.append(seconds)
        if seconds == documents._TURNS[0]:
            return None
        try:
            return await asyncio.Future[bytes]()
        finally:
            reads.append(-seconds)

    monkeypatch.setattr(documents, "_read", endless_or_read)
    with ExitStack() as connections:
        for _ in range(documents._AT_ONCE + 2):  # the last two wait
            client = connections.enter_context(socket.create_connection(("127.0.0.1", guarded.port), timeout=60))
            client.sendall(HEAD + b"%PDF")
        eventually(lambda: len(reads) == 2 * documents._AT_ONCE + 2)
        assert send(guarded, made_pdf("Hello")).json()["text"] == "Hello"
    eventually(lambda: sum(reads) == documents._TURNS[0] * (documents._AT_ONCE + 2))


def test_clients_that_send_slowly_keep_no_other_from_it(guarded: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    receive = documents.read_bytes

    async def noted(*arguments: Any) -> bytearray:
        begun.append(arguments)
        return await receive(*arguments)

    monkeypatch.setattr(documents, "read_bytes", noted)
    monkeypatch.setattr(documents, "_MOST", 4)
    with ExitStack() as connections:

        def begin() -> None:
            client = connections.enter_context(socket.create_connection(("127.0.0.1", guarded.port), timeout=60))
            client.sendall(HEAD)

        for _ in range(3):
            begin()
        eventually(lambda: len(begun) == 3)
        assert send(guarded, made_pdf("Hello")).json()["text"] == "Hello"
        begin()
        eventually(lambda: len(begun) == 5)
        answer = send(guarded, made_pdf("Hello"))
        assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
    eventually(lambda: send(guarded, made_pdf("Hello")).status_code == 200)
