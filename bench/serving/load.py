"""Speed, latencies and cached tokens of a server under load.

Requests arrive as a Poisson process, are sent by the first free client, and stream over HTTP. Their prompts are random
tokens after a shared prefix. Another engine's server gets the same requests, with the same ids, when ours has ended.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise

import httpx
import numpy as np

from polarlm.bench.command import model_files, weight_files
from polarlm.bench.result import Output, Result, Writer, digest_of_model, duration
from polarlm.bench.serving.client import Answer, ask, connect, send
from polarlm.bench.serving.options import BETWEEN_TOKENS, FIRST_TOKEN, LoadOptions, Options
from polarlm.bench.serving.servers import PeerServer, own_server
from polarlm.bench.serving.tables import FREE, LOAD, WHOLE, report_of
from polarlm.bench.speed.child import Failed
from polarlm.bench.speed.contestants import OURS, RATE
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.errors import counted
from polarlm.engine.loading.calibration import TEXT_FILE
from polarlm.server.config import KEY_VARIABLE

_SAMPLE_SECONDS = 0.25  # seconds between two requests of /metrics
_ANSWER = 64  # tokens of an answer


@dataclass(frozen=True)
class Plan:
    """The requests and their times."""

    clients: int
    starts: Sequence[float]  # seconds from the beginning, ascending
    prompts: Sequence[Sequence[int]]  # ids, one prompt for each start
    max_tokens: int
    before: Sequence[Sequence[int]] = ()  # prompts that are asked all at once before, and not counted


@dataclass
class LoadRecord:
    """The answers of a server so far, and the most that it has had at a time, by the names of its metrics."""

    answers: list[Answer] = field(default_factory=list)
    most: Counter[str] = field(default_factory=Counter)

    def watch(self, http: httpx.Client, ended: threading.Event) -> None:
        """Read /metrics until the end: the store's blocks, the most blocks that were held and the most running
        requests."""
        while not ended.wait(_SAMPLE_SECONDS):
            with suppress(httpx.HTTPError, RuntimeError):  # the latter after the end
                metrics = re.findall(r"(?m)^polarlm_(\w+) (\S+)$", http.get("/metrics").text)
                values = {name: int(float(value)) for name, value in metrics if name.startswith(("kv_", "requests_"))}
                if "kv_blocks" in values:
                    held = sum(values[f"kv_blocks_{kind}"] for kind in ("used", "kept"))
                    self.most |= Counter(blocks=values["kv_blocks"], held=held, running=values["requests_running"])


def run(options: Options, load: LoadOptions, model: str | None, destination: Output, argv: Sequence[str]) -> None:
    """Measures, writes the result after each server and when it is stopped, prints the report. Raises FlagError or
    EngineError."""
    max_tokens = options.max_tokens or _ANSWER
    peer = None if options.peer is None else PeerServer.read(options.peer)
    if peer is not None and not peer.is_running and options.url is not None:
        raise FlagError("--url and a --peer that is started: give the peer's address, too, as --peer NAME=URL")
    settings = {"threads": options.threads, "max_tokens": max_tokens, "seed": options.seed, **asdict(load)}
    result, record = Result({"model": "", "load_options": settings}), LoadRecord()
    with _server(options, load, model) as url:
        key = os.environ.get(KEY_VARIABLE)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        result.about["model"] = _model(url, headers)
        writer = Writer(destination.path("serving", result["model"]), "serving", argv)
        note(f"Requests arrive for {duration(load.seconds)}; then the answers under way come to their end")
        result.about |= {} if options.url else digest_of_model(weight_files(model))
        with connect(url, headers) as http:
            plan = _plan(http, url, load, options.seed, max_tokens)
        try:
            _send(url, headers, plan, record)
        finally:
            if record.answers:
                add_load(result, OURS, record)
                writer.write(result, complete=False)
                if len(record.answers) < len(plan.starts):  # after Ctrl-C
                    report_of(result).show(writer.path)
    for threads in () if peer is None else peer.thread_counts(options.threads):
        writer.write(result, complete=False)
        _measure_peer(result, peer, threads, load, model, plan)  # type: ignore[arg-type]
    writer.write(result, complete=True)
    report_of(result).show(writer.path)


def _measure_peer(
    result: Result, peer: PeerServer, threads: int, load: LoadOptions, model: str | None, plan: Plan
) -> None:
    """Add the figures of another engine's server with so many threads, or why there are none."""
    path = "" if peer.is_running else model_files(model)[0]
    context = load.shared_prefix + load.prompt_tokens + plan.max_tokens + 1
    record, version, more = LoadRecord(), "", f", {counted(threads, 'thread')}" if threads else ""
    try:
        with peer.started(path, load.clients, context, threads) as (url, about):
            version = f" {about['version']}" if about else ""
            note(f"The same requests for {peer.name}{more.replace(', ', ' with ')}")
            _send(url, {}, plan, record)
        add_load(result, f"{peer.name}{version}{more}", record)
    except (Failed, EngineError) as error:
        note(f"Without {peer.name}: {error}")
        result.add(LOAD, f"{peer.name}{version}{more}", RATE, failure=str(error))


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


def _send(url: str, headers: Mapping[str, str], plan: Plan, record: LoadRecord) -> None:
    """Send the requests of a plan. Raises EngineError if none is answered."""

    ended = threading.Event()
    with connect(url, headers) as http, counting("Serving", "request", len(plan.starts)) as count:

        def take(answer: Answer) -> None:
            record.answers.append(answer)
            count("")

        if plan.before:
            first = Plan(len(plan.before), [0.0] * len(plan.before), plan.before, plan.max_tokens)
            send(first.starts, first.clients, partial(request, http, first), lambda answer: None)
        threading.Thread(target=record.watch, args=(http, ended), daemon=True).start()
        try:
            send(plan.starts, plan.clients, partial(request, http, plan), take)
        finally:
            ended.set()
    if all(answer.error for answer in record.answers):
        raise EngineError(f"{url}: no request was answered ({record.answers[0].error})")


# -- what is asked, and when ---------------------------------------------------------------------------------------


def request(http: httpx.Client, plan: Plan, number: int, begun: float) -> Answer:
    """The answer to a request of a plan."""
    body = {"prompt": plan.prompts[number], "max_tokens": plan.max_tokens, "temperature": 0, "ignore_eos": True}
    body["dry_multiplier"] = 0  # the demonstration model's default is not 0
    return ask(http, "/v1/completions", body, begun, plan.starts[number])


def _plan(http: httpx.Client, url: str, load: LoadOptions, seed: int, max_tokens: int) -> Plan:
    """The requests of a load, of random ids of a text's tokens. Raises FlagError if none arrives, EngineError if the
    server does not answer."""
    rng = np.random.default_rng(seed)
    starts = poisson(load.rate, load.seconds, load.requests, rng)
    if not starts:
        raise FlagError("--rate and --seconds: no request arrives in that time")
    try:
        body = {"content": TEXT_FILE.read_text(encoding="utf-8")}
        ids = sorted(set(http.post("/tokenize", json=body).raise_for_status().json()["tokens"]))
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise EngineError(f"--url {url}: there is no server of ours that answers ({type(error).__name__})") from None
    texts = prompts(ids, len(starts), load.shared_prefix, load.prompt_tokens, rng)
    before = prompts(ids, load.warm_up, load.shared_prefix, load.prompt_tokens, rng)
    return Plan(load.clients, starts, texts, max_tokens, before)


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


def add_load(result: Result, who: str, record: LoadRecord) -> None:
    """Add the figures of a server; those of finished answers, latencies as percentiles from 0 to 100."""
    whole = [answer for answer in record.answers if answer.error is None]
    seconds = max(answer.ended for answer in record.answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in whole)
    cached, tokens = sum(sum(answer.cached_from.values()) for answer in whole), sum(a.completion_tokens for a in whole)
    errors = Counter(answer.error for answer in record.answers if answer.error is not None)
    result.add(LOAD, who, RATE, value=tokens / seconds)
    result.add(LOAD, who, "errors", value=errors.total(), kinds=dict(errors))
    counts = {"seconds": seconds, "requests": len(record.answers), "requests/s": len(whole) / seconds}
    counts |= {"prompt tokens": prompt_tokens, "cached": cached / max(1, prompt_tokens), **record.most}
    result.add_all(LOAD, who, counts)
    for name, waits in (
        (FIRST_TOKEN, [answer.first_token for answer in whole if answer.pieces]),
        (BETWEEN_TOKENS, [end - start for answer in whole for start, end in pairwise(answer.pieces)]),
        (WHOLE, [answer.ended - answer.sent for answer in whole]),
        (FREE, [answer.sent - answer.planned for answer in record.answers]),
    ):
        percentiles: list[float] = np.percentile(waits, np.arange(101)).tolist() if waits else []
        result.add(LOAD, who, name, percentiles, count=len(waits))
