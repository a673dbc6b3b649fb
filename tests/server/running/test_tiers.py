"""A conversation that a server has kept on the disk goes on in the next one, however the first one ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.lines import PATIENCE, eventually
from tests.server.process import SMALL_BLOCKS, Process
from tests.tiny import make_model

PRELUDE = SMALL_BLOCKS.format(kept=4) + "from tests.patience import be_patient; be_patient()\n"
USER, AGAIN = ({"role": "user", "content": content} for content in ("hello, how are you", "and then"))


@pytest.fixture(scope="module", params=["llama_gqa_linear", "qwen3_5_tied"])  # the second one has recurrent layers
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def start(model: Path, folder: Path, *flags: str, disk: bool = True) -> Process:
    folder.mkdir(exist_ok=True)
    kept = ["--cache-disk", "10M", "--cache-disk-folder", str(folder / "blocks")] if disk else []
    return Process(model, folder, *kept, "--socket-port", "0", *flags, prelude=PRELUDE)


def chat(server: Process, *messages: dict[str, Any], tokens: int = 24) -> dict[str, Any]:
    bias = {str(token): -100 for token in range(5)}  # no control tokens, which no text becomes
    body = {"messages": messages, "temperature": 0, "max_tokens": tokens, "logit_bias": bias}
    return server.post("/v1/chat/completions", **body)


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def written(folder: Path) -> int:
    return len([file for file in (folder / "blocks").iterdir() if not file.name.startswith(".")])


@pytest.mark.slow
def test_the_next_turn_after_a_restart_needs_no_prefill(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path / "plain", disk=False) as server:
        first = chat(server, USER)
        expected = chat(server, USER, said(first), AGAIN)
    with start(model, tmp_path / "kept") as server:
        assert said(chat(server, USER)) == said(first)
        server.process.terminate()
        server.process.wait(PATIENCE)
    with start(model, tmp_path / "kept") as server:
        second = chat(server, USER, said(first), AGAIN)
        assert said(second) == said(expected)
        cached = expected["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == first["usage"]["total_tokens"] - 1
        details = second["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": cached, "cached_from": {"disk": cached}}
        assert f'polarlm_cached_tokens_from_total{{place="disk"}} {cached:.1f}' in server.get("/metrics")
        assert "cached_from" not in chat(server, USER, said(first), AGAIN)["usage"]["prompt_tokens_details"]


@pytest.mark.slow
def test_killed_servers_leave_only_right_blocks(model: Path, tmp_path: Path) -> None:
    """The first one ends in order; each of the others is killed while it writes, at another point; the next one's
    answers are the same as without a disk."""
    prompts = [{"role": "user", "content": f"{number} abcdefgh" * 6} for number in range(4)]
    with start(model, tmp_path / "plain", disk=False) as server:
        expected = [(chat(server, prompt, tokens=8), chat(server, prompt, tokens=8)) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        with start(model, tmp_path / "kept") as server:
            before = written(tmp_path / "kept")
            assert said(chat(server, prompt, tokens=8)) == said(expected[number][0])
            if number:
                eventually(lambda least=before + 2 * (number - 1): written(tmp_path / "kept") >= least)
            server.process.send_signal(signal.SIGKILL if number else signal.SIGTERM)
            server.process.wait(PATIENCE)
    assert not [file for file in (tmp_path / "kept" / "blocks").iterdir() if file.stat().st_mode & 0o077]
    hits = 0
    with start(model, tmp_path / "kept") as server:
        for prompt, answers in zip(prompts, expected, strict=True):
            answer = chat(server, prompt, tokens=8)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            hits += cached > 0
            # A hit is read as codes, so answers are equal after hits of equal lengths.
            for same in answers:
                if same["usage"]["prompt_tokens_details"]["cached_tokens"] == cached:
                    assert said(answer) == said(same)
    assert hits  # at least the first prompt's: a killed server may not have written a snapshot of recurrent layers
