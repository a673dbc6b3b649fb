"""A day of a server for a household, `polarlm serve` of five models with clients of every API: no answer changes, and
each process has the memory that it said."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from polarlm.engine.loading.need import PROCESS_BYTES
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.conftest import EMBEDDING_DECODERS
from tests.encoders import make_folder
from tests.server import apis
from tests.server.lines import PATIENCE, eventually
from tests.server.models.running import PATIENT
from tests.server.process import started
from tests.tiny import make_model, tokenizer_json

CHATTING = {"plain": "llama_gqa_linear", "hybrid": "qwen3_5_tied", "mixture": "qwen3_moe_normed"}
STORE = 32 << 20  # bytes of the KV store of each of these
# Bytes of a process without a model: Python and its libraries, and LLVM if kernels have to be compiled.
PROGRAM = 256 << 20
FLAGS = ("--device", "cpu", "--threads", "1", "--no-calibration", "--cache-type", "f16", "--port", "0")
PROMPT = "once there was a ship on the sea, and the rain fell on it. " * 3  # more than two blocks of 64 tokens
TEXTS = ["the rain falls", "a ship on the sea"]


def make_household(folder: Path) -> Path:
    """A TOML file with three models to chat with and two that give vectors: an encoder and a decoder."""
    written = ""
    for name, fixture in CHATTING.items():
        (folder / name).mkdir(parents=True)
        make_model(folder / name, fixture)
        written += f'[{name}]\npath = "{name}"\nkv-memory = "{STORE}"\n'
    make_folder(folder / "encoder", "bert_f32")
    shutil.copytree(EMBEDDING_DECODERS / "qwen3_embedding", folder / "decoder")
    (folder / "decoder" / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    written += '[encoder]\npath = "encoder"\nidle-unload = 0.02\n[decoder]\npath = "decoder"\n'
    (folder / "models.toml").write_text(written)
    return folder / "models.toml"


class Household:
    """A running server; `folder` gets what it writes to standard error, its cache and its temporary files."""

    def __init__(self, models: Path, folder: Path, *flags: str) -> None:
        self.errors, self.temporary = folder / "stderr", folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        places = {CACHE_VARIABLE: str(share_kernels(folder / "cache")), "TMPDIR": str(self.temporary)}
        places["PYTHONPATH"] = str(PATIENT)
        self.process, url = started(models, self.errors, *FLAGS, *flags, **places)
        self.http = httpx.Client(base_url=url, timeout=PATIENCE)
        self.children: set[psutil.Process] = set()  # all that it has had, with what they have started

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of an answer without an error."""
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def models(self) -> dict[str, psutil.Process]:
        """The process of each model in memory."""
        named = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    self.children.add(child)
                    named["".join(child.cmdline()[-1:])] = child
        return {name: named[name] for name in (*CHATTING, "encoder", "decoder") if name in named}

    def has_children(self) -> bool:
        """Whether one of its processes is left."""

        def runs(child: psutil.Process) -> bool:
            with suppress(psutil.NoSuchProcess):
                return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
            return False

        return any(map(runs, self.children))

    def ends(self, number: signal.Signals) -> None:
        """Send it a signal, and wait until it and its processes have ended."""
        self.models()
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        eventually(lambda: not self.has_children())

    def assert_memory(self) -> int:
        """No process has more than the server says that its model may take; returns the sum of what it says."""
        told = {entry["id"]: entry.get("memory") for entry in self.http.get("/models").json()["data"]}
        for name, child in self.models().items():
            with suppress(psutil.NoSuchProcess):  # the encoder is unloaded when it likes
                taken = child.memory_info().rss
                assert told[name] is None or taken <= told[name] + PROGRAM, f"{name}: {taken} bytes, of {told[name]}"
        return sum(filter(None, told.values()))

    def cached_from(self, model: str) -> dict[str, int]:
        """How many tokens of a long prompt were found, by the place where they were."""
        usage = self.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=1)["usage"]
        return usage["prompt_tokens_details"].get("cached_from", {})


@contextmanager
def household(models: Path, folder: Path, *flags: str) -> Iterator[Household]:
    house = Household(models, folder, *flags)
    try:
        yield house
    finally:
        house.models()
        house.process.kill()
        house.process.communicate(timeout=PATIENCE)
        for child in house.children:
            with suppress(psutil.Error):
                child.kill()
        house.http.close()


# -- the clients, each with a prompt of its own ---------------------------------------------------------------------


def text(name: str, model: str, stream: bool) -> Callable[[Household], str]:
    """A client of an API, whose answer does not depend on what was asked before."""

    def ask(house: Household) -> str:
        api = apis.APIS[name]
        more: dict[str, Any] = {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
        body = api.body(f"{name}, and the rain", stream=stream, max_tokens=24, **more)
        answer = house.http.post(api.path, json=body | {"model": model})
        assert answer.is_success, answer.text
        assert not re.search(r'"error": ?[{"]', answer.text), answer.text  # a stream that had begun
        reply = api.streamed(apis.events(answer.text)) if stream else api.whole(answer.json())
        assert reply.reason == "length"
        return reply.text

    return ask


CLIENTS: list[Callable[[Household], Any]] = [
    text("chat", "plain", True),
    text("completions", "hybrid", False),
    text("responses", "mixture", False),
    text("messages", "plain", True),
    text("ollama", "hybrid:latest", True),
    text("completion", "mixture", False),
    lambda house: house.post("/api/embed", model="encoder", input=TEXTS)["embeddings"],
    lambda house: [one["embedding"] for one in house.post("/v1/embeddings", model="decoder", input=TEXTS)["data"]],
]


def everyone(house: Household) -> list[Any]:
    """What all clients are answered, who begin at the same moment."""
    begin = threading.Barrier(len(CLIENTS))

    def asks(client: Callable[[Household], Any]) -> Any:
        begin.wait(PATIENCE)
        return client(house)

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        return list(pool.map(asks, CLIENTS))


def same(one: Any, other: Any) -> bool:
    """Whether it is the same text, or the same vector but for rounding."""
    if isinstance(one, str):
        return one == other != ""
    return bool(np.abs(np.asarray(one) - np.asarray(other)).max() <= 1e-6)


@contextmanager
def answering(house: Household, model: str, answers: int = 8) -> Iterator[Iterator[str]]:
    """The lines of a stream of so many answers of 255 tokens; 64 last for seconds, since 8 are computed at a time."""
    long = {"max_tokens": -1, "ignore_eos": True, "temperature": 0, "stream": True}
    with house.http.stream("POST", "/v1/completions", json=long | {"model": model, "prompt": ["on"] * answers}) as one:
        assert one.status_code == 200, one.read().decode()
        yield filter(None, one.iter_lines())


@pytest.mark.slow
def test_a_day_with_a_kill_and_two_restarts(tmp_path: Path) -> None:
    models = make_household(tmp_path / "models")
    flags = ("--cache-disk", "50M", "--cache-disk-folder", str(tmp_path / "disk"))
    flags += ("--sessions", str(tmp_path / "sessions"))

    with household(models, tmp_path, *flags) as house:
        first = everyone(house)
        house.assert_memory()
        assert not any("disk" in house.cached_from(model) for model in CHATTING)
        session = house.post("/sessions/save", model="mixture", name="talk", prompt=PROMPT)["tokens"]
        killed = house.models()["plain"]
        with answering(house, "mixture") as lines:
            killed.kill()
            assert [*lines][-1] == "data: [DONE]"
        assert all(map(same, first, everyone(house)))
        assert house.models()["plain"].pid != killed.pid
        house.assert_memory()
        with answering(house, "hybrid", 16) as lines:  # of which half wait
            house.models()
            house.process.send_signal(signal.SIGTERM)
            assert [*lines][-1] == "data: [DONE]"
        assert house.process.wait(PATIENCE) == 0
        assert not house.has_children()
        assert not [*house.temporary.iterdir()]

    most = 2 * (PROCESS_BYTES + STORE) + 300_000  # two of the models to chat with fill it: all five take turns
    with household(models, tmp_path, *flags, "--models-memory", str(most)) as house:
        assert all(map(same, first, everyone(house)))
        for model in CHATTING:
            assert house.cached_from(model)["disk"] >= 128
            assert house.assert_memory() <= most
        assert "makes room for" in house.errors.read_text()
        assert house.post("/sessions/load", model="mixture", name="talk")["tokens"] == session > 128
        with answering(house, "mixture", 64) as lines:
            house.ends(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)

    with household(models, tmp_path, *flags) as house:
        assert all(map(same, first, everyone(house)))
        assert house.cached_from("mixture")["disk"] >= 128
        house.ends(signal.SIGTERM)
    told = (tmp_path / "stderr").read_text()
    assert not re.search("Traceback|Fatal Python error", told), told
    assert not [*tmp_path.rglob("*.tmp*")]
