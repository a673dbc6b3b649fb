"""`python -m polarlm.bench.lab.load`: a server under load, by its clients over HTTP.

Requests arrive as a Poisson process, are sent by the first free client, and stream over HTTP. Their prompts are random
tokens after a shared prefix. Another engine's server gets the same requests, with the same ids, when ours has ended.
Client and server run on the same machine unless --url says otherwise, and then share its cores.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import httpx
import numpy as np

from polarlm.bench.command import at_least, model_named, weight_files
from polarlm.bench.lab import BETWEEN_TOKENS, FIRST_TOKEN
from polarlm.bench.report import NOTHING, Column, Report, Section, Table, provenance
from polarlm.bench.result import Figures, Output, Result, ResultWriter, digest_of_model, duration
from polarlm.bench.servers import SERVE, Answer, ask, connect, running_server, send
from polarlm.bench.speed.contestants import OURS, RATE
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, check_that, parse
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import hub_setting, model_setting, setting
from polarlm.engine.loading.calibration import TEXT_FILE
from polarlm.server.config import KEY_VARIABLE

LOAD = "load"  # a subject
WHOLE, FREE = "whole answer", "until a client was free"  # quantities in seconds, as FIRST_TOKEN and BETWEEN_TOKENS


@dataclass(frozen=True)
class LoadOptions:
    """The flags of a load: which server, and what it is asked."""

    url: str | None = setting(
        None,
        "--url",
        metavar="URL",
        help=f"a running server to load, with its key in {KEY_VARIABLE}; else one is started",
    )
    peer: str | None = setting(
        None,
        "--peer",
        metavar="NAME=URL",
        help="another engine's server, which runs and takes ids at /v1/completions, for the same load",
    )
    weights: str | None = model_setting(": of the server that is started")
    hf_repo: str | None = hub_setting()
    threads: int = setting(0, "--threads", metavar="N", help="CPU threads of that server; 0 follows OMP_NUM_THREADS")
    max_tokens: int = setting(64, "--max-tokens", metavar="N", help="tokens of an answer")
    seed: int = setting(0, "--seed", metavar="N", help="of arrivals and prompts")
    clients: int = setting(8, "--clients", metavar="N", help="requests under way at a time, at most")
    rate: float = setting(0.7, "--rate", metavar="R", help="requests that arrive in a second, on average")
    seconds: float = setting(60.0, "--seconds", metavar="S", help="for which requests arrive")
    requests: int | None = setting(None, "--requests", metavar="N", help="requests at most")
    prompt_tokens: int = setting(128, "--prompt-tokens", metavar="N", help="tokens of a prompt after the shared ones")
    shared_prefix: int = setting(128, "--shared-prefix", metavar="N", help="tokens that all prompts begin with")
    warm_up: int = setting(0, "--warm-up", metavar="N", help="requests that are sent and answered before, all at once")


@dataclass(frozen=True)
class Plan:
    """The requests and their times."""

    clients: int
    starts: Sequence[float]  # seconds from the beginning, ascending
    prompts: Sequence[Sequence[int]]  # ids, one prompt for each start
    max_tokens: int
    before: Sequence[Sequence[int]] = ()  # prompts that are asked all at once before, and not counted


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table."""
    options, destination = parse(
        argv,
        {"Load": LoadOptions, "Output": Output},
        prog="python -m polarlm.bench.lab.load",
        description="Throughput and waiting times of a server under load.",
        checks={
            **dict.fromkeys(("clients", "requests", "prompt_tokens", "max_tokens"), at_least(1)),
            **dict.fromkeys(("threads", "shared_prefix", "seed"), at_least(0)),
            **dict.fromkeys(("rate", "seconds"), check_that(lambda value: value > 0, "must be more than 0")),
        },
    )
    run(options, destination, argv)


def run(options: LoadOptions, destination: Output, argv: Sequence[str]) -> None:
    """Measures, writes the result after each server and when it is stopped, prints the report. Raises FlagError or
    EngineError."""
    model = model_named(options.weights, options.hf_repo)
    if options.url is not None and model is not None:
        raise FlagError("--url and --weights or -hf both say which server it is; leave one of them out")
    name, _, peer = (part.strip() for part in (options.peer or "").partition("="))
    if options.peer is not None and not (name and "://" in peer):
        raise FlagError(f"--peer {options.peer}: give NAME=URL of a server that runs")
    result, answers = Result({"model": "", "load_options": asdict(options)}), list[Answer]()
    with _server(options, model) as url:
        key = os.environ.get(KEY_VARIABLE)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        result.about["model"] = _model(url, headers)
        writer = ResultWriter(destination.path("serving", result["model"]), "lab.load", argv)
        note(f"Requests arrive for {duration(options.seconds)}; then the answers under way come to their end")
        result.about |= {} if options.url else digest_of_model(weight_files(model))
        with connect(url, headers) as http:
            plan = _plan(http, url, options)
        try:
            _send(url, headers, plan, answers)
        finally:
            if answers:
                add_load(result, OURS, answers)
                writer.write(result, complete=False)
                if len(answers) < len(plan.starts):  # after Ctrl-C
                    report_of(result).show(writer.path)
    if peer:
        note(f"The same requests for {name}")
        answers = []
        _send(_address(peer), {}, plan, answers)
        add_load(result, name, answers)
    writer.write(result, complete=True)
    report_of(result).show(writer.path)


# -- servers -------------------------------------------------------------------------------------------------------


def _server(options: LoadOptions, model: str | None) -> AbstractContextManager[str]:
    if options.url is not None:
        return nullcontext(_address(options.url))
    flags = [] if model is None else ["--weights", model]
    return running_server([*SERVE, *flags, "--threads", str(options.threads), "--parallel", str(options.clients)])


def _address(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _model(url: str, headers: Mapping[str, str]) -> str:
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise EngineError(f"--url {url}: the server answers with status {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"--url {url}: no such server answers there ({type(error).__name__})") from None


def _send(url: str, headers: Mapping[str, str], plan: Plan, answers: list[Answer]) -> None:
    """Send the requests of a plan, whose answers are added as they come. Raises EngineError if none is answered."""
    with connect(url, headers) as http, counting("Serving", "request", len(plan.starts)) as count:

        def take(answer: Answer) -> None:
            answers.append(answer)
            count("")

        if plan.before:
            first = Plan(len(plan.before), [0.0] * len(plan.before), plan.before, plan.max_tokens)
            send(first.starts, first.clients, partial(request, http, first), lambda answer: None)
        send(plan.starts, plan.clients, partial(request, http, plan), take)
    if all(answer.error for answer in answers):
        raise EngineError(f"{url}: no request was answered ({answers[0].error})")


# -- what is asked, and when ---------------------------------------------------------------------------------------


def request(http: httpx.Client, plan: Plan, number: int, begun: float) -> Answer:
    """The answer to a request of a plan."""
    body = {"prompt": plan.prompts[number], "max_tokens": plan.max_tokens, "temperature": 0, "ignore_eos": True}
    body["dry_multiplier"] = 0  # the demonstration model's default is not 0
    return ask(http, "/v1/completions", body, begun, plan.starts[number])


def _plan(http: httpx.Client, url: str, options: LoadOptions) -> Plan:
    """The requests of a load, of random ids of a text's tokens. Raises FlagError if none arrives, EngineError if the
    server does not answer."""
    rng = np.random.default_rng(options.seed)
    starts = poisson(options.rate, options.seconds, options.requests, rng)
    if not starts:
        raise FlagError("--rate and --seconds: no request arrives in that time")
    try:
        body = {"content": TEXT_FILE.read_text(encoding="utf-8")}
        ids = sorted(set(http.post("/tokenize", json=body).raise_for_status().json()["tokens"]))
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise EngineError(f"--url {url}: there is no server of ours that answers ({type(error).__name__})") from None
    texts = prompts(ids, len(starts), options.shared_prefix, options.prompt_tokens, rng)
    before = prompts(ids, options.warm_up, options.shared_prefix, options.prompt_tokens, rng)
    return Plan(options.clients, starts, texts, options.max_tokens, before)


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


# -- what is made of it --------------------------------------------------------------------------------------------


def add_load(result: Result, who: str, answers: Sequence[Answer]) -> None:
    """Add the figures of a server; those of finished answers, latencies as percentiles from 0 to 100."""
    whole = [answer for answer in answers if answer.error is None]
    seconds = max(answer.ended for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in whole)
    cached, tokens = sum(answer.cached_tokens for answer in whole), sum(answer.completion_tokens for answer in whole)
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    result.add(LOAD, who, RATE, value=tokens / seconds)
    result.add(LOAD, who, "errors", value=errors.total(), kinds=dict(errors))
    counts = {"seconds": seconds, "requests": len(answers), "requests/s": len(whole) / seconds}
    counts |= {"prompt tokens": prompt_tokens, "cached": cached / max(1, prompt_tokens)}
    result.add_all(LOAD, who, counts)
    for name, waits in (
        (FIRST_TOKEN, [answer.first_token for answer in whole if answer.pieces]),
        (BETWEEN_TOKENS, [end - start for answer in whole for start, end in pairwise(answer.pieces)]),
        (WHOLE, [answer.ended - answer.sent for answer in whole]),
        (FREE, [answer.sent - answer.planned for answer in answers]),
    ):
        percentiles: list[float] = np.percentile(waits, np.arange(101)).tolist() if waits else []
        result.add(LOAD, who, name, percentiles, count=len(waits))


def report_of(result: Result) -> Report:
    load, ours = result["load_options"], result.figures(LOAD, OURS)
    value = Counter({name: row.value or 0 for name, row in ours.items()})
    failed = ", ".join(f"{count} × {kind}" for kind, count in ours["errors"].more["kinds"].items()) or "none"
    sentences = {
        "clients": f"{load['clients']}, {load['rate']:g} requests/s (Poisson), prompts of {load['shared_prefix']} "
        f"shared and {load['prompt_tokens']} own tokens, answers of {load['max_tokens']}",
        "requests": f"{value['requests']:.0f} in {value['seconds']:.1f} s. Errors: {failed}",
        "found in the cache": f"{100 * value['cached']:.1f} % of the prompts' tokens",
    }
    return Report(
        title=f"A server of {result['model']}",
        lead="Requests of many clients",
        sections=[Section("Servers", [servers_table(result)])],
        about=[*sentences.items(), *provenance(result)],
        partial="" if result["complete"] else "This page is partial: the measurement was interrupted.",
    )


def _milliseconds(quantity: str, percent: int) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        runs = figures[quantity].runs if quantity in figures and not figures[RATE].failure else ()
        return f"{1e3 * runs[percent]:,.1f}" if runs else NOTHING

    return cell


def servers_table(result: Result) -> Table:
    """A table with a line for each server."""
    columns = [
        Column.of("tokens/s", RATE, "{:,.1f}".format),
        Column("first token ms, p50", _milliseconds(FIRST_TOKEN, 50)),
        Column("p95", _milliseconds(FIRST_TOKEN, 95)),
        Column("between two, p50", _milliseconds(BETWEEN_TOKENS, 50)),
        Column("p95", _milliseconds(BETWEEN_TOKENS, 95)),
        Column.of("errors", "errors", "{:.0f}".format),
    ]
    ours = f"{OURS} {result.about.get('version', '')}".rstrip()
    lines = ((ours if who == OURS else who, figures) for _, who, figures in result.parts(LOAD))
    return Table.of("server", columns, lines)


if __name__ == "__main__":
    sys.exit(main())
