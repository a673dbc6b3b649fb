"""`python -m examples.ray_serve.throughput`: what Ray Serve costs a request, and what a second replica gains.

A server without Ray, an application with one replica and one with two run at the same time, each replica with one
thread, and are asked in turns. For throughput, clients ask again as soon as they have an answer, and are more than two
replicas compute at a time. On a machine with just a core for each replica, Ray's processes and the clients take their
part of both: the larger the model, the less it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import ray
from ray import serve

from examples.ray_serve.app import Ingress, Replica
from examples.ray_serve.settings import RAY_ON_ONE_MACHINE, read

_PORT, _ALONE = 8765, 8766
_SERVERS = {
    "without Ray": f"http://127.0.0.1:{_ALONE}",
    "1 replica": f"http://127.0.0.1:{_PORT}/one",
    "2 replicas": f"http://127.0.0.1:{_PORT}/two",
}
_FIXED = {"temperature": 0, "ignore_eos": True}
_RAMP = 0.25  # of the seconds of a measurement, before it


@contextmanager
def _alone(settings: dict[str, object]) -> Iterator[None]:
    """A server without Ray."""
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "polarlm.server", "--port", str(_ALONE), "--threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if process.stdout is None or not process.stdout.readline():
            raise SystemExit("The server did not start: run it without Ray to see why")
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _replicas(settings: dict[str, object]) -> Iterator[None]:
    """The two applications."""
    os.environ.update(RAY_ON_ONE_MACHINE | os.environ)
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": _PORT}, logging_config={"enable_access_log": False})
        _, config = read(settings)
        for name, count in (("one", 1), ("two", 2)):
            replica = Replica.options(num_replicas=count, ray_actor_options={"num_cpus": 1})
            application = Ingress.bind(replica.bind(settings), config.max_body)
            serve.run(application, name=name, route_prefix=f"/{name}")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def _health(client: httpx.Client) -> float:
    """Milliseconds of a request that computes nothing: the median of 20."""
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        client.get("/health").raise_for_status()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def _stream(client: httpx.Client, tokens: int, number: int) -> tuple[float, float]:
    """Milliseconds to the first token of a stream, and between its tokens."""
    messages = [{"role": "user", "content": f"Tell me about {number}."}]
    body = {"messages": messages, "max_tokens": tokens, "stream": True, **_FIXED}
    begun, times = time.perf_counter(), []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter())
    return 1000 * (times[0] - begun), 1000 * (times[-1] - times[0]) / (tokens - 1)


def _throughput(client: httpx.Client, clients: int, tokens: int, seconds: float, *, stream: bool) -> float:
    """Tokens per second of short prompts by as many clients, which go to the replica with least to do.

    They are those of `seconds` between a start and an end that do not count. The tokens of an answer count as if they
    came evenly between the request and its end.
    """
    start = time.perf_counter() + _RAMP * seconds
    end = start + seconds

    def ask(number: int) -> float:
        given, now = 0.0, time.perf_counter()
        while now < end:
            body = {"prompt": f"{number} is a number, and", "max_tokens": tokens, "stream": stream, **_FIXED}
            client.post("/v1/completions", json=body).raise_for_status()
            begun, now = now, time.perf_counter()
            given += tokens * max(0.0, min(now, end) - max(begun, start)) / (now - begun)
        return given

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(ask, range(clients))) / seconds


def main() -> None:
    """Print a line for each server: medians of several rounds."""
    parser = argparse.ArgumentParser(prog="python -m examples.ray_serve.throughput")
    parser.add_argument("--weights", help="a model; without it, the demonstration model")
    parser.add_argument("--clients", type=int, default=24, help="that ask at the same time (default: 24)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="of measurements, after one that warms up (default: 3)")
    asked = parser.parse_args()
    settings: dict[str, object] = {"ctx-size": 2048, **({"weights": asked.weights} if asked.weights else {})}
    measured: dict[str, list[list[float]]] = {name: [] for name in _SERVERS}
    with _alone(settings), _replicas(settings):
        clients = {name: httpx.Client(base_url=url, timeout=600) for name, url in _SERVERS.items()}
        for number in range(asked.rounds + 1):
            for name, client in clients.items():
                row = [_health(client), *_stream(client, asked.tokens, number)]
                seconds = asked.seconds if number else min(asked.seconds, 5)
                row += [
                    _throughput(client, asked.clients, asked.tokens, seconds, stream=stream) for stream in (False, True)
                ]
                if number:  # the first round warms up
                    measured[name].append(row)
    print(f"{'':14}{'health ms':>10}{'first ms':>10}{'token ms':>10}{'whole tok/s':>13}{'streamed tok/s':>16}")
    for name, rows in measured.items():
        health, first, token, whole, streamed = map(statistics.median, zip(*rows, strict=True))
        print(f"{name:14}{health:10.1f}{first:10.1f}{token:10.2f}{whole:13.1f}{streamed:16.1f}")
    for column, kind in ((3, "whole"), (4, "streamed")):
        pairs = zip(measured["2 replicas"], measured["1 replica"], strict=True)
        ratio = statistics.median(two[column] / one[column] for two, one in pairs)
        print(f"Two replicas generate {ratio:.2f} times as many tokens per second as one, {kind}.")


if __name__ == "__main__":
    main()
