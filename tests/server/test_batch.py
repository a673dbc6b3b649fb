"""`polarlm batch`, and a server that is killed while it runs a batch."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.server import batch
from tests.lazily import openai
from tests.server.http.test_http_batches import BODIES, CHAT, RAW, answers, begin, done, ended, line, written
from tests.server.http_server import serving
from tests.server.lines import eventually
from tests.server.process import Process

FLAGS = ("--device", "cpu", "--no-calibration", "--cache-type", "f16")


def run(model: Path, requests: Path, output: Path, *more: str) -> int:
    return batch.main([str(requests), "-m", str(model), "-o", str(output), *FLAGS, *more])


def answers_in(output: Path) -> dict[str | None, Any]:
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    assert len({one["id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one for one in lines}


def test_a_file_is_answered_as_a_server_answers(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_bytes(written([line("chat", CHAT), b"{", line("raw", RAW), line("wrong", max_tokens="many")]))
    assert run(tiny_path, requests, output) == 0
    assert capsys.readouterr().out == f"{output}: 2 answers, and 2 requests that failed\n"
    lines = answers_in(output)
    assert lines[None]["error"]["message"].startswith("line 2: the request is not JSON")
    assert lines["wrong"]["response"]["status_code"] == 400
    with Engine.load(tiny_path, device="cpu", calibration=False, cache_type="f16") as engine, serving(engine) as server:
        for name, url in (("chat", CHAT), ("raw", RAW)):
            assert lines[name]["response"]["body"]["choices"] == server.post(url, BODIES[url]).json()["choices"]


def test_it_goes_on_after_the_last_line_and_takes_lines_that_were_added(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    lines = [line(str(n)) for n in range(6)]
    requests.write_bytes(written(lines))
    assert run(tiny_path, requests, output, "--parallel", "1") == 0
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:3]) + whole[3][:50])
    requests.write_bytes(written([line("new"), *lines]))
    capsys.readouterr()
    assert run(tiny_path, requests, output) == 0
    assert f"{output}: 3 lines of an earlier call; 4 requests to answer" in capsys.readouterr().err
    assert output.read_bytes().startswith(b"".join(whole[:3]))
    assert sorted(map(str, answers_in(output))) == ["0", "1", "2", "3", "4", "5", "new"]
    before = output.read_bytes()
    assert run(Path("none"), requests, output) == 0  # nothing is left, and no model is loaded
    assert output.read_bytes() == before
    requests.write_bytes(written([line(f"other{n}") for n in range(7)]))
    assert run(tiny_path, requests, output) == 0  # as many lines as it has are not the same lines
    assert len(answers_in(output)) == 14


def test_it_fails_if_every_request_did(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (requests := tmp_path / "requests.jsonl").write_bytes(b"{")
    assert run(tiny_path, requests, output := tmp_path / "answers.jsonl") == 1
    assert capsys.readouterr().out == f"{output}: 0 answers, and 1 request that failed\n"


@pytest.mark.parametrize(
    ("requests", "output", "sentence"),
    [
        ("none.jsonl", "out.jsonl", "none.jsonl: there is no such file"),
        ("none.jsonl", None, "none.jsonl: there is no such file"),
        ("in.jsonl", "in.jsonl", "in.jsonl has lines that answer no batch: name another file"),
        ("in.jsonl", "none/out.jsonl", "none/out.jsonl: No such file or directory"),
        ("in.jsonl", "notes.txt", "notes.txt has lines that answer no batch"),
        ("in.jsonl", None, "-o: say where the answers are written"),
    ],
)
def test_a_wrong_file_is_told_before_a_model_is_loaded(
    tmp_path: Path, requests: str, output: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content := written([line("a")]))
    (tmp_path / "notes.txt").write_text("no line ends here")
    words = [str(tmp_path / requests), "-m", "none", *([] if output is None else ["-o", str(tmp_path / output)])]
    assert batch.main(words) == 2
    assert sentence in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_bytes() == content
    assert (tmp_path / "notes.txt").read_text() == "no line ends here"


@pytest.mark.slow
def test_a_killed_server_has_lost_no_line_and_writes_none_twice(tiny_path: Path, tmp_path: Path) -> None:
    flags = ("--batches", str(tmp_path / "batches"), "--cache-type", "f16")
    lines = [line(str(n), max_tokens=16) for n in range(12)]
    with Process(tiny_path, tmp_path, *flags, troubled=True) as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="any", max_retries=0)
        begun = begin(client, lines)
        eventually(lambda: done(client, begun) >= 2)
        process.signal(signal.SIGKILL)
        process.wait()
    (output,) = (tmp_path / "batches").glob("*/*-output.jsonl")
    before = output.read_bytes()
    assert 2 <= before.count(b"\n") < 12
    with Process(tiny_path, tmp_path, *flags) as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="any", max_retries=0)
        end = ended(client, begun)
        assert dict(end.request_counts) == {"total": 12, "completed": 12, "failed": 0}
        assert client.files.content(end.output_file_id).content.startswith(before)
        assert sorted(int(one["custom_id"]) for one in answers(client, end.output_file_id)) == [*range(12)]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    logged = [one["in_background"] for one in process.log() if one.get("client") == "batch:0"]
    assert logged == [True] * len(logged) != []
