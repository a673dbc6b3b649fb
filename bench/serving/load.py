"""Speed, latencies and cached tokens of a server under load.

Requests arrive as a Poisson process, are sent by the first free client, and stream over HTTP. Their prompts are random
tokens after a shared prefix. Another engine's server gets the same requests, with the same ids, when ours has ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import model_files, weight_files
from polarlm.bench.result import Output
from polarlm.bench.serving.client import Answer, ask, kind
from polarlm.bench.serving.options import LoadOptions, Options
from polarlm.bench.serving.peer import PeerServer, read_peer
from polarlm.bench.serving.process import own_server
from polarlm.bench.serving.tables import format_result
from polarlm.bench.speed.child import Failed
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.errors import counted
from polarlm.engine.loading.calibration import TEXT_FILE
from polarlm.server.config import KEY_VARIABLE

_SAMPLE_SECONDS = 0.25  # seconds between two requests of /metrics
_PATIENCE = 120.0  # seconds to wait for data
_ANSWER = 64  # tokens of an answer


def run(options: Options, load: LoadOptions, model: str | None, destination: Output, argv: Sequence[str]) -> None:
    """Measures, writes JSON after each server and when it is stopped, prints the tables. Raises FlagError or
    EngineError."""
    max_tokens = options.max_tokens or _ANSWER
    peer = None if options.peer is None else read_peer(options.peer)
    if peer is not None and not peer.is_running and options.url is not None:
        raise FlagError("--url and a --peer that is started: give the peer's address, too, as --peer NAME=URL")
    clients, peers = Load(), list[dict[str, Any]]()

    def write(complete: bool) -> dict[str, Any]:
        settings = {"threads": options.threads, "max_tokens": max_tokens, "seed": options.seed, **asdict(load)}
        others = {"peers": peers} if peers else {}
        result = {"model": name, **about, "load": settings, **summary(clients.seen()), **others}
        return report.write(output, "serving", argv, result, complete=complete)

    def show(complete: bool) -> None:
        result = write(complete)
        note(f"Written to {output}")
        print(report.with_origin(format_result(result), result))

    try:
        with _server(options, load, model) as url:
            key = os.environ.get(KEY_VARIABLE)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            name = _model(url, headers)
            output = destination.path("serving", name)
            note(f"Requests arrive for {report.duration(load.seconds)}; then the answers under way come to their end")
            about = {} if options.url else report.digest_of_model(weight_files(model))
            plan = asyncio.run(_plan(url, headers, load, options.seed, max_tokens))
            asyncio.run(_send(url, headers, plan, clients))
        if peer is not None:
            for threads in peer.thread_counts(options.threads):
                write(complete=False)
                peers.append(_of_peer(peer, threads, load, model, plan))
    except KeyboardInterrupt:
        if clients.answers:
            show(complete=False)
        raise
    show(complete=True)


def _of_peer(peer: PeerServer, threads: int, load: LoadOptions, model: str | None, plan: Plan) -> dict[str, Any]:
    """The figures of another engine's server with so many threads, or why there are none."""
    path = "" if peer.is_running else model_files(model)[0]
    context = load.shared_prefix + load.prompt_tokens + plan.max_tokens + 1
    clients, about = Load(), {"name": peer.name, **({"threads": threads} if threads else {})}
    try:
        with peer.started(path, load.clients, context, threads) as (url, more):
            about |= more
            note(f"The same requests for {peer.name}" + (f" with {counted(threads, 'thread')}" if threads else ""))
            asyncio.run(_send(url, {}, plan, clients))
    except (Failed, EngineError) as error:
        note(f"Without {peer.name}: {error}")
        return {**about, "failure": str(error)}
    return {**about, **summary(clients.seen())}


@contextmanager
def _server(options: Options, load: LoadOptions, model: str | None) -> Iterator[str]:
    if options.url is not None:
        yield options.url.rstrip("/").removesuffix("/v1")
        return
    flags = [] if model is None else ["--weights", model]
    with own_server([*flags, "--threads", str(options.threads), "--parallel", str(load.clients)]) as url:
        yield url


def _model(url: str, headers: Mapping[str, str]) -> str:
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise EngineError(f"--url {url}: the server answers with status {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"--url {url}: no such server answers there ({type(error).__name__})") from None


async def _plan(url: str, headers: dict[str, str], load: LoadOptions, seed: int, max_tokens: int) -> Plan:
    """The requests of a load. Raises FlagError if none arrives, EngineError if the server does not answer."""
    rng = np.random.default_rng(seed)
    starts = poisson(load.rate, load.seconds, load.requests, rng)
    if not starts:
        raise FlagError("--rate and --seconds: no request arrives in that time")
    ids = await vocabulary(url, headers)
    texts = prompts(ids, len(starts), load.shared_prefix, load.prompt_tokens, rng)
    before = prompts(ids, load.warm_up, load.shared_prefix, load.prompt_tokens, rng)
    return Plan(load.clients, starts, texts, max_tokens, before)


async def _send(url: str, headers: dict[str, str], plan: Plan, clients: Load) -> None:
    """Send the requests of a plan. Raises EngineError if none is answered."""
    if count := len(plan.before):
        await Load().run(url, headers, Plan(count, [0.0] * count, plan.before, plan.max_tokens), lambda: None)
    with tqdm(total=len(plan.starts), desc="Serving", unit="request", disable=None) as bar:
        await clients.run(url, headers, plan, bar.update)
    answers = clients.seen().answers
    if all(answer.error for answer in answers):
        raise EngineError(f"{url}: no request was answered ({answers[0].error})")


# -- what is asked, and when ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The requests and their times."""

    clients: int
    starts: Sequence[float]  # seconds from the beginning, ascending
    prompts: Sequence[Sequence[int]]  # ids, one prompt for each start
    max_tokens: int
    before: Sequence[Sequence[int]] = ()  # prompts that are asked all at once before, and not counted


def poisson(rate: float, seconds: float, most: int | None, rng: np.random.Generator) -> list[float]:
    """The arrival times of a Poisson process with `rate` per second: within `seconds`, and at most `most`."""
    starts: list[float] = []
    at = rng.exponential(1 / rate)
    while at < seconds and (most is None or len(starts) < most):
        starts.append(float(at))
        at += rng.exponential(1 / rate)
    return starts


def prompts(
    ids: Sequence[int], count: int, shared: int, other: int, rng: np.random.Generator
) -> Sequence[Sequence[int]]:
    """`count` prompts of random ids: `shared` ids that are the same in all, then `other` ids of each."""
    prefix = rng.choice(ids, shared).tolist()
    return [prefix + rng.choice(ids, other).tolist() for _ in range(count)]


async def vocabulary(url: str, headers: dict[str, str]) -> list[int]:
    """The ids of a text's tokens, for prompts of a known length. Raises EngineError if the server does not answer."""
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_PATIENCE) as http:
            body = {"content": TEXT_FILE.read_text(encoding="utf-8")}
            ids: list[int] = (await http.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
            return sorted(set(ids))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise EngineError(f"--url {url}: there is no server of ours that answers ({kind(error)})") from None


# -- clients -----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The results of a plan. answers: in the order of requests."""

    seconds: float
    answers: list[Answer]
    blocks: int  # blocks in the server's store
    peak_blocks: int  # most blocks held at a time, blocks of finished sequences included
    peak_running: int


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
                values = dict(re.findall(r"(?m)^polarlm_(\w+) (\S+)$", (await http.get("/metrics")).text))
                if "kv_blocks" in values:
                    self.blocks = int(float(values["kv_blocks"]))
                    held = sum(int(float(values[f"kv_blocks_{kind}"])) for kind in ("used", "kept"))
                    self.held = max(self.held, held)
                    self.running = max(self.running, int(float(values["requests_running"])))
            await asyncio.sleep(_SAMPLE_SECONDS)


# -- results -------------------------------------------------------------------------------------------------------


def summary(seen: Seen) -> dict[str, Any]:
    """The results as JSON, with latencies of finished answers."""
    whole = [answer for answer in seen.answers if answer.error is None]
    prompt_tokens = sum(answer.prompt_tokens for answer in whole)
    tokens = sum(answer.completion_tokens for answer in whole)
    waits = {
        "first_token_seconds": [answer.first_token for answer in whole if answer.pieces],
        "between_tokens_seconds": [end - start for answer in whole for start, end in pairwise(answer.pieces)],
        "request_seconds": [answer.ended - answer.sent for answer in whole],
        "behind_arrival_seconds": [answer.sent - answer.planned for answer in seen.answers],
    }
    return {
        "seconds": seen.seconds,
        "requests": len(seen.answers),
        "errors": dict(Counter(answer.error for answer in seen.answers if answer.error is not None)),
        "requests_per_second": len(whole) / seen.seconds,
        "tokens_per_second": tokens / seen.seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(answer.cached_tokens for answer in whole),
        "prefix_hit_rate": sum(answer.cached_tokens for answer in whole) / max(1, prompt_tokens),
        "blocks": seen.blocks,
        "peak_blocks": seen.peak_blocks,
        "peak_running": seen.peak_running,
        "latencies": {name: _distribution(values) for name, values in waits.items()},
    }


def _distribution(values: Sequence[float]) -> dict[str, Any]:
    percentiles = np.percentile(values, np.arange(101)).tolist() if values else []
    return {"count": len(values), "percentiles": percentiles}
