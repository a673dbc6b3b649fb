"""One server for a household: `polarlm serve` of five models as a process, and eight clients of four APIs."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.conftest import EMBEDDING_DECODERS
from tests.encoders import make_folder
from tests.server import apis
from tests.server.lines import PATIENCE
from tests.server.models.running import PATIENT
from tests.server.process import started
from tests.tiny import make_model, tokenizer_json

CHATTING = {"plain": "llama_gqa_linear", "hybrid": "qwen3_5_tied", "mixture": "qwen3_moe_normed"}
NAMES = (*CHATTING, "encoder", "decoder")
STORE = 32 << 20  # bytes of the KV store of each of these
FLAGS = ("--device", "cpu", "--threads", "1", "--no-calibration", "--cache-type", "f16", "--port", "0")
TOKENS = 24
PROMPT = "once there was a ship on the sea, and the rain fell on it. " * 3  # more than two blocks of 64 tokens
LONG: dict[str, Any] = {"max_tokens": -1, "ignore_eos": True, "temperature": 0, "stream": True}
TEXTS = ["the rain falls", "a ship on the sea"]
# Answers that do not depend on what was asked before.
ALONE = {"cache_prompt": False, "ignore_eos": True}


def make_household(folder: Path, store: int | str = STORE) -> Path:
    """A TOML file with three models to chat with and two that give vectors: an encoder and a decoder.

    store: the memory of the KV store of each of the first three.
    """
    written = ""
    for name, fixture in CHATTING.items():
        (folder / name).mkdir(parents=True)
        make_model(folder / name, fixture)
        written += f'[{name}]\npath = "{name}"\nkv-memory = "{store}"\n'
    make_folder(folder / "encoder", "bert_f32")
    shutil.copytree(EMBEDDING_DECODERS / "qwen3_embedding", folder / "decoder")
    (folder / "decoder" / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    written += '[encoder]\npath = "encoder"\nidle-unload = 0.02\n[decoder]\npath = "decoder"\n'
    (folder / "models.toml").write_text(written)
    return folder / "models.toml"


class Household:
    """A running server. At the end of the `with` block it is killed, if it has not ended, and so are its models."""

    def __init__(self, models: Path, folder: Path, *flags: str) -> None:
        """folder: gets what the server writes to standard error, its cache and its temporary files."""
        self.errors, self.temporary = folder / "stderr", folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        places = {CACHE_VARIABLE: str(share_kernels(folder / "cache")), "TMPDIR": str(self.temporary)}
        places["PYTHONPATH"] = str(PATIENT)
        self.process, self.url = started(models, self.errors, *FLAGS, *flags, **places)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        self._processes: dict[int, psutil.Process] = {}

    def __enter__(self) -> Household:
        return self

    def __exit__(self, *error: object) -> None:
        self.processes()
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)
        for process in self._processes.values():
            with suppress(psutil.Error):
                process.kill()
        self.http.close()

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of an answer without an error."""
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    # -- what there is ----------------------------------------------------------------------------------------------

    def models(self) -> dict[str, dict[str, Any]]:
        return {entry["id"]: entry for entry in self.http.get("/models").json()["data"]}

    def processes(self) -> dict[str, psutil.Process]:
        """The models' processes, by name; all are remembered, with what they have started."""
        named = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    self._processes.setdefault(process.pid, process)
                    name = "".join(process.cmdline()[-1:])
                    if process.ppid() == self.process.pid and name in NAMES:  # before exec, it is the server's own flag
                        named[name] = process
        return named

    def running(self) -> list[psutil.Process]:
        def runs(process: psutil.Process) -> bool:
            try:
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        return [process for process in self._processes.values() if runs(process)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server; its models' processes of this moment are remembered."""
        self.processes()
        self.process.send_signal(number)


def everyone(house: Household) -> dict[str, Any]:
    """What all clients are answered, who begin at the same moment."""
    begin = threading.Barrier(len(CLIENTS))

    def asks(client: Callable[[Household], Any]) -> Any:
        begin.wait(PATIENCE)
        return client(house)

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        asked = {name: pool.submit(asks, client) for name, client in CLIENTS.items()}
        return {name: future.result() for name, future in asked.items()}


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Clients with two different answers: another text, or another vector than rounding explains."""
    assert one.keys() == other.keys()
    return {name for name in one if not same(one[name], other[name])}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, str):
        return one == other != ""
    return bool(np.abs(np.asarray(one) - np.asarray(other)).max() <= 1e-6)


# -- what else is asked, and what is told -----------------------------------------------------------------------------


def resident(house: Household) -> dict[str, int]:
    """Bytes of memory that each model's process has."""
    sizes = {}
    for name, process in house.processes().items():
        with suppress(psutil.NoSuchProcess):  # the encoder is unloaded when it likes
            sizes[name] = process.memory_info().rss
    return sizes


def starts(house: Household) -> dict[str, int]:
    """How often each model's process was started."""
    told = re.findall(r'(?m)^polarlm_model_starts_total\{model="(\w+)"\} (\S+)', house.http.get("/metrics").text)
    return {name: int(float(count)) for name, count in told}


def cached_from(house: Household, model: str) -> dict[str, int]:
    """How many tokens of a long prompt were found, by the place where they were."""
    usage = house.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=1)["usage"]
    return usage["prompt_tokens_details"].get("cached_from", {})


def begun(house: Household, model: str, answers: int = 8) -> Any:
    """The stream of so many answers of 255 tokens; 64 last for seconds, since 8 are computed at a time."""
    body = LONG | {"model": model, "prompt": ["on"] * answers, "stream_options": {"include_usage": True}}
    return house.http.stream("POST", "/v1/completions", json=body)


def events(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.read().decode()
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


# -- the clients, each with a prompt of its own ---------------------------------------------------------------------


def text(name: str, model: str, stream: bool) -> Callable[[Household], str]:
    """A client of an API, which asks this model."""

    def ask(house: Household) -> str:
        api = apis.APIS[name]
        body = api.body(f"{name}, and the rain", stream=stream, max_tokens=TOKENS, temperature=0, **ALONE)
        answer = house.http.post(api.path, json=body | {"model": model})
        assert answer.is_success, answer.text
        assert not re.search(r'"error": ?[{"]', answer.text), answer.text  # a stream that had begun
        reply = api.streamed(apis.events(answer.text)) if stream else api.whole(answer.json())
        assert reply.reason == "length"
        return reply.text

    return ask


CLIENTS: dict[str, Callable[[Household], Any]] = {
    "OpenAI's chat": text("chat", "plain", True),
    "OpenAI's completions": text("completions", "hybrid", False),
    "OpenAI's responses": text("responses", "mixture", False),
    "Anthropic's messages": text("messages", "plain", True),
    "Ollama's chat": text("ollama", "hybrid:latest", True),
    "llama-server's completion": text("completion", "mixture", False),
    "Ollama's vectors": lambda house: house.post("/api/embed", model="encoder", input=TEXTS)["embeddings"],
    "OpenAI's vectors": lambda house: [
        entry["embedding"] for entry in house.post("/v1/embeddings", model="decoder", input=TEXTS)["data"]
    ],
}
