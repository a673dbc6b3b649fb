"""`make soak`: a server of several models with the clients of every API, while models are unloaded and killed.

    make soak ARGS="--minutes 60"
    make soak ARGS="--minutes 60 --cache-type compact --kv-memory 250K"

Every answer is greedy and has to be what it was in the beginning. Now and then a client hangs up in the middle of a
stream, a model is unloaded, and a model's process is killed: requests that it had may end with an error that says so.
At the end there is a table of the clients and one of the models. The exit code is 1 if an answer was another one, or an
error had another cause than a killed process.

Prompts whose answers are compared are shorter than two blocks, so these are the same with each cache type. Other
prompts are longer, and new: a small store is soon full of their blocks.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.server.lines import PATIENCE
from tests.server.models.household import (
    CHATTING,
    CLIENTS,
    PROMPT,
    STORE,
    TOKENS,
    Household,
    begun,
    cached_from,
    events,
    everyone,
    make_household,
    resident,
    same,
    starts,
)

_KILLED = ("crashed (SIGKILL)", "has ended: send", "was lost")  # in errors of requests whose process was killed
_SAMPLE_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_TOLD_SECONDS = 60.0
_TALK = "0123456789abcdef"


@dataclass
class ProcessMemory:
    """Bytes of a model's processes: the first of each process, the last and the most of all."""

    pid: int = 0
    first: int = 0
    last: int = 0
    most: int = 0
    told: int = 0  # what the server says that the model may take

    def add(self, pid: int, taken: int, told: int) -> None:
        if pid != self.pid:
            self.pid, self.first = pid, taken
        self.last, self.most, self.told = taken, max(self.most, taken), max(self.told, told)


@dataclass
class Soak:
    """What happens to a server, and what was seen of it."""

    house: Household
    until: float
    first: dict[str, Any]
    seen: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in CLIENTS})
    memory: dict[str, ProcessMemory] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    unloads: int = 0

    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    def client(self, name: str) -> None:
        """Ask one thing again and again."""
        while self.goes_on():
            self._try(name, lambda: same(CLIENTS[name](self.house), self.first[name]))

    def other(self, name: str, number: int) -> None:
        """What else clients do: leave, find a long prompt, keep sessions and conversations."""
        rng = random.Random(number)
        does: list[Callable[[str], bool]] = [
            self._leave,
            self._find,
            self._session,
            self._talk,
            partial(self._read, rng),
        ]
        while self.goes_on():
            self._try(name, lambda: rng.choice(does)(rng.choice(list(CHATTING))))

    def disturber(self, every: float) -> None:
        """Kill or unload a model now and then."""
        rng = random.Random(0)
        while self.goes_on():
            time.sleep(min(every * rng.uniform(0.5, 1.5), max(0.0, self.until - time.monotonic())))
            running = self.house.processes()
            if not running:
                continue
            name = rng.choice(sorted(running))
            if rng.random() < 0.5:
                self.kills[name] += 1
                running[name].kill()
            else:
                self.unloads += self.house.http.post("/models/unload", json={"model": name}).is_success

    def watcher(self) -> None:
        """Look at the memory of all processes."""
        while self.goes_on():
            told = self.house.models()
            pids = {name: process.pid for name, process in self.house.processes().items()}
            for name, taken in resident(self.house).items():
                memory = self.memory.setdefault(name, ProcessMemory())
                memory.add(pids.get(name, 0), taken, told[name].get("memory", 0))
            with suppress(psutil.NoSuchProcess):  # its clients tell
                server = psutil.Process(self.house.process.pid)
                self.memory.setdefault("the server", ProcessMemory()).add(server.pid, server.memory_info().rss, 0)
            time.sleep(_SAMPLE_SECONDS)

    def _try(self, name: str, asks: Callable[[], bool]) -> None:
        seen = self.seen.setdefault(name, Counter())
        try:
            right = asks()
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"
            killed = any(words in sentence for words in _KILLED) and self.kills.total() > 0
            seen["killed" if killed else "errors"] += 1
            if not killed:
                self.problems[f"{name}: {sentence[:500]}"] += 1
            time.sleep(_PAUSE_SECONDS)  # as clients do that try again
            return
        seen["answers"] += 1
        if not right:
            seen["changed"] += 1
            self.problems[f"{name}: another answer than in the beginning"] += 1

    def _leave(self, model: str) -> bool:
        with begun(self.house, model) as answer:
            next(events(answer), None)
        return True

    def _find(self, model: str) -> bool:
        cached_from(self.house, model)
        return True

    def _read(self, rng: random.Random, model: str) -> bool:
        prompt = f"{rng.randrange(10**9)} {PROMPT}"
        self.house.post("/v1/completions", model=model, prompt=prompt, max_tokens=TOKENS)
        return True

    def _session(self, model: str) -> bool:
        cached_from(self.house, model)
        body = {"model": model, "name": "talk"}
        answers = [self.house.http.get("/sessions", params={"model": model})]
        answers.append(self.house.http.post("/sessions/save", json=body | {"prompt": "once there was a ship"}))
        answers.append(self.house.http.post("/sessions/load", json=body))
        for answer in answers:  # 404 and 422: another client's kill or prompt came between; 503: no room now
            assert answer.status_code in (200, 404, 422, 503), answer.text
        return True

    def _talk(self, _model: str) -> bool:
        base = self.house.http.get("/conversations").json()["revision"]
        body = {"base": base, "head": {}, "messages": {_TALK: {"text": str(base)}}}
        answer = self.house.http.post(f"/conversations/{_TALK}", json=body)
        assert answer.status_code in (200, 409), answer.text
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Soaks a server of several models.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=15, help="seconds from one kill or unloading to the next")
    parser.add_argument("--cache-type", default="f16", help="of the models' keys and values")
    parser.add_argument("--kv-memory", default=STORE, help="of each model to chat with, as of `polarlm serve`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polarlm-soak-") as name:
        folder = Path(name)
        kept = ["--cache-disk", "50M", "--cache-disk-folder", str(folder / "blocks")]
        kept += ["--sessions", str(folder / "sessions"), "--conversations", str(folder / "conversations")]
        kept += ["--cache-type", options.cache_type]
        with Household(make_household(folder / "models", options.kv_memory), folder, *kept) as house:
            soak = Soak(house, 0.0, everyone(house))
            soak.until = time.monotonic() + 60 * options.minutes
            _run(soak, options.every)
            again = starts(house)
            house.signal(signal.SIGTERM)
            code = house.process.wait(PATIENCE)
            left = house.running()
            log = house.errors.read_text()
    _tell(soak, again)
    if code or left or "Traceback" in log:
        soak.problems[f"exit code {code}, processes left: {left}, tracebacks: {log.count('Traceback')}"] += 1
    for problem, count in soak.problems.most_common():
        print(f"\n{count} × {problem}")
    if not soak.problems:
        print("\nNo error but the errors of killed processes.")
    return 1 if soak.problems else 0


def _run(soak: Soak, every: float) -> None:
    works: list[Callable[[], None]] = [partial(soak.client, name) for name in CLIENTS]
    works += [partial(soak.other, "others", number) for number in range(3)]
    works += [partial(soak.disturber, every), soak.watcher]
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        try:
            while wait(futures, timeout=_TOLD_SECONDS).not_done:
                answers = sum(seen["answers"] for seen in soak.seen.values())
                left = max(0.0, soak.until - time.monotonic()) / 60
                seen = f"{answers} answers, {soak.kills.total()} kills, {soak.problems.total()} problems"
                print(f"{left:.0f} minutes left: {seen}", file=sys.stderr, flush=True)
        finally:
            soak.until = 0.0  # also after Ctrl-C
        for future in futures:
            future.result()


def _tell(soak: Soak, again: dict[str, int]) -> None:
    print(f"{'client':28}{'answers':>10}{'changed':>10}{'killed':>10}{'errors':>10}")
    for name, seen in soak.seen.items():
        print(f"{name:28}" + "".join(f"{seen[what]:>10}" for what in ("answers", "changed", "killed", "errors")))
    print(f"\n{'process, MiB':28}{'said':>10}{'first':>10}{'last':>10}{'most':>10}{'starts':>10}{'kills':>10}")
    for name, memory in soak.memory.items():
        sizes = "".join(f"{size / 2**20:>10.1f}" for size in (memory.told, memory.first, memory.last, memory.most))
        print(f"{name:28}{sizes}{again.get(name, 1):>10}{soak.kills[name]:>10}")
    print(f"\n{soak.kills.total()} kills, {soak.unloads} unloaded")


if __name__ == "__main__":
    raise SystemExit(main())
