"""`python -m polarlm.bench.serving`: a server under load, measured by its clients: speed, latencies, cached tokens.

Requests arrive as a Poisson process, are sent by the first free client, and stream over HTTP. Their prompts are random
tokens after a shared prefix. Client and server run on the same machine unless --url says otherwise,
and then share its cores.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named, needs_http
from polarlm.bench.report import Output
from polarlm.bench.serving.plan import Plan, poisson, prompts
from polarlm.bench.serving.process import own_server
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import setting
from polarlm.server.config import KEY_VARIABLE

if TYPE_CHECKING:
    from polarlm.bench.serving.client import Answer
    from polarlm.bench.serving.load import Load, Seen

_SHOWN = (50, 95, 99)


@dataclass(frozen=True)
class Options:
    """The flags: the server and its load."""

    url: str | None = setting(
        None, "--url", metavar="URL", help=f"a running server, with its key in {KEY_VARIABLE}; else one is started"
    )
    weights: str | None = setting(
        None, "--weights", "-m", metavar="PATH", help=f"of the server that is started: {WEIGHTS_HELP}"
    )
    hf_repo: str | None = setting(
        None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=f"of that server: {HF_REPO_HELP}"
    )
    threads: int = setting(0, "--threads", metavar="N", help="CPU threads of that server; 0 follows OMP_NUM_THREADS")
    clients: int = setting(8, "--clients", metavar="N", help="requests under way at a time, at most")
    rate: float = setting(0.7, "--rate", metavar="R", help="requests that arrive in a second, on average")
    seconds: float = setting(60.0, "--seconds", metavar="S", help="for which requests arrive")
    requests: int | None = setting(None, "--requests", metavar="N", help="requests at most")
    prompt_tokens: int = setting(128, "--prompt-tokens", metavar="N", help="tokens of a prompt after the shared ones")
    shared_prefix: int = setting(128, "--shared-prefix", metavar="N", help="tokens that all prompts begin with")
    max_tokens: int = setting(64, "--max-tokens", metavar="N", help="tokens of an answer")
    seed: int = setting(0, "--seed", metavar="N", help="of arrivals and prompts")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table."""
    options, destination = parse(
        argv,
        {"Load": Options, "Output": Output},
        prog="python -m polarlm.bench.serving",
        description="Throughput and waiting times of a server under load.",
        checks={
            **dict.fromkeys(("clients", "requests", "prompt_tokens", "max_tokens"), at_least(1)),
            **dict.fromkeys(("threads", "shared_prefix", "seed"), at_least(0)),
            **dict.fromkeys(("rate", "seconds"), lambda value: None if value > 0 else "must be more than 0"),
        },
    )
    needs_http()
    from polarlm.bench.serving.load import Load

    model = model_named(options.weights, options.hf_repo)
    if options.url is not None and model is not None:
        raise FlagError("--url and --weights or -hf both say which server it is; leave one of them out")
    with _server(options, model) as url:
        key = os.environ.get(KEY_VARIABLE)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        model = _model(url, headers)
        output = destination.path("serving", model)
        note(f"Requests arrive for {report.duration(options.seconds)}; then the answers under way come to their end")
        load = Load()
        try:
            asyncio.run(_measure(options, url, headers, load))
        except KeyboardInterrupt:
            if load.answers:
                _show(options, argv, model, load, output, complete=False)
            raise
    _show(options, argv, model, load, output)


def _show(
    options: Options, argv: Sequence[str], model: str, load: Load, output: Path, *, complete: bool = True
) -> None:
    """Write and print the results."""
    result = {"model": model, **summary(options, load.seen())}
    report.write(output, "serving", argv, result, complete=complete)
    note(f"Written to {output}")
    print(format_result(result))


@contextmanager
def _server(options: Options, model: str | None) -> Iterator[str]:
    if options.url is not None:
        yield options.url.rstrip("/").removesuffix("/v1")
        return
    flags = [] if model is None else ["--weights", model]
    flags += ["--threads", str(options.threads), "--parallel", str(options.clients)]
    with own_server(flags) as url:
        yield url


def _model(url: str, headers: dict[str, str]) -> str:
    import httpx

    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise EngineError(f"--url {url}: the server answers with status {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"--url {url}: no such server answers there ({type(error).__name__})") from None


async def _measure(options: Options, url: str, headers: dict[str, str], load: Load) -> None:
    """Run `load` with the requests of the options. Raises FlagError if no request arrives, EngineError if none is
    answered."""
    from polarlm.bench.serving.load import vocabulary

    rng = np.random.default_rng(options.seed)
    starts = poisson(options.rate, options.seconds, options.requests, rng)
    if not starts:
        raise FlagError("--rate and --seconds: no request arrives in that time")
    ids = await vocabulary(url, headers)
    plan = Plan(
        options.clients,
        starts,
        prompts(ids, len(starts), options.shared_prefix, options.prompt_tokens, rng),
        options.max_tokens,
    )
    with tqdm(total=len(starts), desc="Serving", unit="request", disable=None) as bar:
        await load.run(url, headers, plan, bar.update)
    answers = load.seen().answers
    if all(answer.error for answer in answers):
        raise EngineError(f"--url {url}: no request was answered ({answers[0].error})")


# -- results -------------------------------------------------------------------------------------------------------


def summary(options: Options, seen: Seen) -> dict[str, Any]:
    """The results as JSON. Latencies are those of finished answers."""
    whole = [answer for answer in seen.answers if answer.error is None]
    prompt_tokens = sum(answer.prompt_tokens for answer in whole)
    tokens = sum(answer.completion_tokens for answer in whole)
    waits = {
        "first_token_seconds": [answer.first_token for answer in whole if answer.pieces],
        "between_tokens_seconds": [gap for answer in whole for gap in _gaps(answer)],
        "request_seconds": [answer.ended - answer.sent for answer in whole],
        "behind_arrival_seconds": [answer.sent - answer.planned for answer in seen.answers],
    }
    load = {name: value for name, value in asdict(options).items() if name not in ("url", "weights", "hf_repo")}
    return {
        "load": load,
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


def _gaps(answer: Answer) -> list[float]:
    return [later - earlier for earlier, later in pairwise(answer.pieces)]


def _distribution(values: Sequence[float]) -> dict[str, Any]:
    """Percentiles 0 to 100 of the values; an empty list without values."""
    percentiles = np.percentile(values, np.arange(101)).tolist() if values else []
    return {"count": len(values), "percentiles": percentiles}


def format_result(result: dict[str, Any]) -> str:
    """The text of a summary and a table of latencies."""
    load, errors = result["load"], result["errors"]
    failed = ", ".join(f"{count} × {kind}" for kind, count in errors.items()) or "none"
    rows = [
        (name, *(_milliseconds(result["latencies"][key]["percentiles"], percent) for percent in _SHOWN))
        for key, name in (
            ("first_token_seconds", "first token"),
            ("between_tokens_seconds", "between two tokens"),
            ("request_seconds", "whole answer"),
            ("behind_arrival_seconds", "until a client was free"),
        )
    ]
    return (
        f"{result['model']}: {load['clients']} clients, {load['rate']:g} requests/s (Poisson), prompts of "
        f"{load['shared_prefix']} shared and {load['prompt_tokens']} own tokens, answers of {load['max_tokens']}.\n"
        f"{result['requests']} requests in {result['seconds']:.1f} s: {result['tokens_per_second']:,.1f} tokens/s, "
        f"{result['requests_per_second']:.2f} requests/s. Errors: {failed}.\n"
        f"Found in the cache: {100 * result['prefix_hit_rate']:.1f} % of the prompts' tokens. At most "
        f"{result['peak_blocks']} of {result['blocks']} blocks held, {result['peak_running']} requests in a step.\n\n"
        + report.table(("milliseconds", *(f"p{percent}" for percent in _SHOWN)), rows)
    )


def _milliseconds(percentiles: Sequence[float], percent: int) -> str:
    return f"{1e3 * percentiles[percent]:,.1f}" if percentiles else "—"


if __name__ == "__main__":
    sys.exit(main())
