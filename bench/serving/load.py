"""Clients that send the requests of a plan to a server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from polarlm.bench.serving.client import Answer, ask, kind
from polarlm.bench.serving.plan import Plan
from polarlm.engine import EngineError
from polarlm.engine.loading.calibration import TEXT_FILE

_SAMPLE_SECONDS = 0.25  # seconds between two requests of /metrics
_PATIENCE = 120.0  # seconds to wait for data


@dataclass
class Seen:
    """The results of a plan. answers: in the order of requests."""

    seconds: float
    answers: list[Answer]
    blocks: int  # blocks in the server's store
    peak_blocks: int  # most blocks held at a time, with those of finished sequences
    peak_running: int


async def vocabulary(url: str, headers: dict[str, str]) -> list[int]:
    """The ids of a text's tokens, for prompts of a known length. Raises EngineError if the server does not answer."""
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_PATIENCE) as http:
            body = {"content": TEXT_FILE.read_text(encoding="utf-8")}
            ids: list[int] = (await http.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
            return sorted(set(ids))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise EngineError(f"--url {url}: there is no server of ours that answers ({kind(error)})") from None


class Load:
    """Clients that send the requests of a plan. Their results are available at any time, even if interrupted."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self._begun = self._ended = 0.0
        self._watch = _Watch()

    async def run(self, url: str, headers: dict[str, str], plan: Plan, on_answer: Callable[[], object]) -> None:
        """Send all requests; a request waits while no client is free. on_answer: called after each answer."""
        waiting: asyncio.Queue[int] = asyncio.Queue()
        self._begun = begun = time.perf_counter()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_PATIENCE, limits=limits) as http:
            watching = asyncio.create_task(self._watch.poll(http))

            async def arrive() -> None:
                for number, start in enumerate(plan.starts):
                    await asyncio.sleep(max(0.0, begun + start - time.perf_counter()))
                    waiting.put_nowait(number)
                for _ in range(plan.clients):
                    waiting.put_nowait(-1)

            async def client() -> None:
                while (number := await waiting.get()) >= 0:
                    self.answers[number] = await _ask(http, plan, number, begun)
                    self._ended = time.perf_counter()
                    on_answer()

            await asyncio.gather(arrive(), *(client() for _ in range(plan.clients)))
            watching.cancel()

    def seen(self) -> Seen:
        """The results up to the last finished answer."""
        watch, answers = self._watch, [self.answers[number] for number in sorted(self.answers)]
        return Seen(self._ended - self._begun, answers, watch.blocks, watch.held, watch.running)


async def _ask(http: httpx.AsyncClient, plan: Plan, number: int, begun: float) -> Answer:
    body = {"prompt": plan.prompts[number], "max_tokens": plan.max_tokens, "temperature": 0, "ignore_eos": True}
    body["dry_multiplier"] = 0  # the demonstration model's default is not 0
    return await ask(http, "/v1/completions", body, begun, plan.starts[number])


class _Watch:
    """Polls /metrics, and keeps the store's blocks and the peaks of blocks held and of running requests."""

    def __init__(self) -> None:
        self.blocks = self.held = self.running = 0

    async def poll(self, http: httpx.AsyncClient) -> None:
        while True:
            with suppress(httpx.HTTPError):
                found = dict(re.findall(r"(?m)^polarlm_(\w+) (\S+)$", (await http.get("/metrics")).text))
                if "kv_blocks" in found:
                    self.blocks = int(float(found["kv_blocks"]))
                    held = sum(int(float(found[f"kv_blocks_{kind}"])) for kind in ("used", "kept"))
                    self.held = max(self.held, held)
                    self.running = max(self.running, int(float(found["requests_running"])))
            await asyncio.sleep(_SAMPLE_SECONDS)
