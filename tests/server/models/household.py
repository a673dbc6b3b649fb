"""One server for a household: `polarlm serve` of five models as a process, and eight clients of four APIs."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import psutil

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.conftest import EMBEDDING_DECODERS
from tests.encoders import make_folder
from tests.lazily import anthropic, openai
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
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Household:
        return self

    def __exit__(self, *error: object) -> None:
        self.processes()
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)
        for process in self._seen.values():
            with suppress(psutil.Error):
                process.kill()
        for client in (self.http, self.openai, self.anthropic):
            client.close()

    # -- clients: made once, as a program of a user makes them ----------------------------------------------------

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE)

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0, timeout=PATIENCE)

    @cached_property
    def ollama(self) -> ollama.Client:
        return ollama.Client(self.url, timeout=PATIENCE)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of an answer without an error."""
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    # -- what there is ----------------------------------------------------------------------------------------------

    def models(self) -> dict[str, dict[str, Any]]:
        """What the server says about each model."""
        return {entry["id"]: entry for entry in self.http.get("/models").json()["data"]}

    def loaded(self) -> set[str]:
        return {name for name, entry in self.models().items() if entry["status"]["value"] == "loaded"}

    def processes(self) -> dict[str, psutil.Process]:
        """The models' processes, by name; all are remembered, with what they have started."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    self._seen.setdefault(process.pid, process)
                    name = "".join(process.cmdline()[-1:])
                    if process.ppid() == self.process.pid and name in NAMES:  # before exec, it is the server's own flag
                        found[name] = process
        return found

    def left(self) -> list[psutil.Process]:
        """Remembered processes that run."""

        def runs(process: psutil.Process) -> bool:
            try:
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        return [process for process in self._seen.values() if runs(process)]

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
    found = {}
    for name, process in house.processes().items():
        with suppress(psutil.NoSuchProcess):  # the encoder is unloaded when it likes
            found[name] = process.memory_info().rss
    return found


def starts(house: Household) -> dict[str, int]:
    """How often each model's process was started."""
    told = re.findall(r'(?m)^polarlm_model_starts\{model="(\w+)"\} (\S+)', house.http.get("/metrics").text)
    return {name: int(float(count)) for name, count in told}


def found(house: Household, model: str) -> dict[str, int]:
    """How many tokens of a long prompt were found, by the place where they were."""
    usage = house.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=1)["usage"]
    return usage["prompt_tokens_details"].get("cached_from", {})


def begun(house: Household, model: str, answers: int = 8) -> Any:
    """The stream of so many answers of 255 tokens; 64, of which 8 are computed at a time, last for seconds."""
    body = LONG | {"model": model, "prompt": ["on"] * answers, "stream_options": {"include_usage": True}}
    return house.http.stream("POST", "/v1/completions", json=body)


def events(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.read().decode()
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


# -- the clients, each with a prompt of its own ---------------------------------------------------------------------


def messages(name: str) -> list[Any]:
    return [{"role": "user", "content": f"{name}, and the rain"}]


def chat(house: Household) -> str:
    chunks = house.openai.chat.completions.create(
        model="plain",
        messages=messages("chat"),
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body=ALONE,
    )
    parts = list(chunks)
    assert parts[-1].choices[0].finish_reason == "length"
    return "".join(part.choices[0].delta.content or "" for part in parts)


def completions(house: Household) -> str:
    found = house.openai.completions.create(
        model="hybrid", prompt="completions, and", temperature=0, max_tokens=TOKENS, extra_body=ALONE
    )
    return found.choices[0].text


def responses(house: Household) -> str:
    found = house.openai.responses.create(
        model="mixture", input="responses, and", temperature=0, max_output_tokens=TOKENS, extra_body=ALONE
    )
    return found.output_text


def anthropic_messages(house: Household) -> str:
    with house.anthropic.messages.stream(
        model="plain", messages=messages("messages"), max_tokens=TOKENS, extra_body={"temperature": 0, **ALONE}
    ) as stream:
        return stream.get_final_text()


def ollama_chat(house: Household) -> str:
    options = {"temperature": 0, "num_predict": TOKENS, **ALONE}
    lines: Iterator[Any] = house.ollama.chat(
        "hybrid:latest", messages("ollama"), stream=True, options=options, keep_alive="1h"
    )
    *pieces, last = lines
    assert (last.done, last.done_reason) == (True, "length")
    return "".join(piece.message.content for piece in pieces) + last.message.content


def completion(house: Household) -> str:
    """llama-server's own endpoints."""
    ids = house.post("/tokenize", model="mixture", content="completion, and")["tokens"]
    props = house.http.get("/props", params={"model": "mixture"})
    assert props.is_success, props.text
    assert props.json()["model_alias"] == "mixture"
    return house.post("/completion", model="mixture", prompt=ids, n_predict=TOKENS, temperature=0, **ALONE)["content"]


def embed(house: Household) -> list[Any]:
    return [list(vector) for vector in house.ollama.embed("encoder", TEXTS).embeddings]


def embeddings(house: Household) -> list[Any]:
    return [one.embedding for one in house.openai.embeddings.create(model="decoder", input=TEXTS).data]


CLIENTS: dict[str, Callable[[Household], Any]] = {
    "OpenAI's chat": chat,
    "OpenAI's completions": completions,
    "OpenAI's responses": responses,
    "Anthropic's messages": anthropic_messages,
    "Ollama's chat": ollama_chat,
    "llama-server's completion": completion,
    "Ollama's vectors": embed,
    "OpenAI's vectors": embeddings,
}
