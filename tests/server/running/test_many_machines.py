"""docs/many-machines.md: nginx with its configuration in front of two servers, and the flags that the page names."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.server.lines import eventually
from tests.server.process import SMALL_BLOCKS, Process

PAGE = Path(__file__).resolve().parents[3] / "docs" / "many-machines.md"
CONVERSATIONS = [f"talk-{number}" for number in range(20)]


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return found[1]


@contextmanager
def nginx(folder: Path, servers: list[Process]) -> Iterator[str]:
    """The URL of an nginx that runs the page's configuration with these servers."""
    port = free_port()
    config = block("nginx").replace("127.0.0.1:8100", f"127.0.0.1:{port}")
    for number, server in enumerate(servers):
        config = config.replace(f"127.0.0.1:810{number + 1}", server.url.removeprefix("http://"))
    (folder / "nginx.conf").write_text(config, encoding="utf-8")
    command = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "error.log", "-g", "daemon off;"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: process.poll() is not None or _answers(url))
            assert process.poll() is None, (folder / "error.log").read_text(encoding="utf-8")
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, conversation: str, text: str) -> dict[str, Any]:
    """The usage of an answer."""
    body = {"prompt": f"{conversation} " + text, "max_tokens": 2, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Session-Id": conversation}, timeout=60)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def served(server: Process) -> int:
    return int(float(re.findall(r"(?m)^polarlm_prompt_tokens_total (\S+)", server.get("/metrics"))[0]))


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_sends_a_conversation_to_the_same_server(tiny_path: Path, tmp_path: Path) -> None:
    small, room = SMALL_BLOCKS.format(kept=64), ("--ctx-size", "2048")  # for all conversations at one server
    for name in ("one", "two", "nginx"):
        (tmp_path / name).mkdir()
    with (
        Process(tiny_path, tmp_path / "one", *room, prelude=small) as one,
        Process(tiny_path, tmp_path / "two", *room, prelude=small) as two,
        nginx(tmp_path / "nginx", [one, two]) as url,
    ):
        first = {talk: ask(url, talk, "the rain ran on") for talk in CONVERSATIONS}
        shares = served(one), served(two)
        assert min(shares) > 0
        assert sum(shares) == sum(usage["prompt_tokens"] for usage in first.values())
        for talk in CONVERSATIONS:
            usage = ask(url, talk, "the rain ran on and on and on")
            assert usage["prompt_tokens_details"]["cached_tokens"] >= first[talk]["prompt_tokens"] // 8 * 8
        two.process.kill()
        two.process.wait(60)
        for talk in CONVERSATIONS:  # also conversations of the server that is gone
            assert ask(url, talk, "the rain ran on and on and then")["completion_tokens"]
