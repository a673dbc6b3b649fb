"""`python -m server` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.server.lines import PATIENCE, Client

ROOT = Path(__file__).resolve().parents[2]

# Steps take their time, and one raises as soon as there is a file named in TROUBLE, unless it is a warm-up. While one
# has ".held" at the end of its name, only as many units of work are computed as it says. Prompts and steps take turns.
TROUBLED = """
import os, sys, threading, time
from polarlm.engine import Engine
from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.scheduler import Scheduler
from polarlm.server.__main__ import main
step, work, record, done = Transformer.step, Engine.work, Scheduler.record_time, 0
def allowed():
    try:
        with open(os.environ["TROUBLE"] + ".held") as file:
            return int(file.read())
    except FileNotFoundError:
        return None
def held(engine):
    global done
    while (most := allowed()) is not None and done >= most:
        time.sleep(0.005)
    done = 0 if most is None else done + 1
    return work(engine)
def troubled(*arguments):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.02")))
    warms_up = isinstance(threading.current_thread(), threading.Timer)
    if os.path.exists(os.environ["TROUBLE"]) and not warms_up:
        os.unlink(os.environ["TROUBLE"])
        raise ArithmeticError("secret detail")
    return step(*arguments)
Transformer.step, Engine.work = troubled, held
Scheduler.record_time = lambda scheduler, unit, seconds: record(scheduler, unit, 1)
sys.exit(main())
"""
SOME = 36  # units of work in which some prompts are computed and tokens generated, and no long answer ends
SMALL_BLOCKS = """
from functools import partial
from polarlm.engine import Engine
Engine.load = staticmethod(partial(Engine.load, block_size=8, kept_sequences={kept}))
"""
PLAIN = """
import sys
from polarlm.server.__main__ import main
sys.exit(main())
"""


class Process:
    """A server with the tiny model at free ports; ends with the `with` block, if not before.

    prelude: a program that the process runs before it becomes a server.
    """

    def __init__(
        self, model: Path, folder: Path, *flags: str, troubled: bool = False, prelude: str = "", **environment: str
    ) -> None:
        self.trouble = folder / "trouble"
        self.errors = folder / "stderr"
        program = ["-c", prelude + (TROUBLED if troubled else PLAIN)] if troubled or prelude else ["-m", "server"]
        plain = ["--weights", str(model), "--device", "cpu", "--no-calibration", "--port", "0"]
        cache = share_kernels(folder)
        surroundings = {"TROUBLE": str(self.trouble), CACHE_VARIABLE: str(cache), "OMP_NUM_THREADS": "1"}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *program, *plain, *flags],
                cwd=ROOT,
                env={**os.environ, **surroundings, **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.line = self.process.stdout.readline()
        assert self.line, self.errors.read_text()
        self.url = re.findall(r"http://[0-9.:]+", self.line)[0]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def client(self) -> Client:
        """A new connection to the socket for JSON lines."""
        where = self.line.split()[-1]
        host, _, port = where.rpartition(":")
        return Client((host, int(port)) if host else where)

    def get(self, path: str) -> str:
        return httpx.get(self.url + path, timeout=PATIENCE).raise_for_status().text

    def ask(self, path: str, method: str = "POST", **body: Any) -> tuple[int, dict[str, Any]]:
        """An HTTP status, and the JSON that came with it."""
        sent = body if method == "POST" else None
        answer = httpx.request(method, self.url + path, json=sent, timeout=PATIENCE)
        return answer.status_code, json.loads(answer.content or b"{}")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer without an error."""
        status, answer = self.ask(path, **body)
        assert status == 200, answer
        return answer

    def is_idle(self) -> bool:
        """Nothing is computed, and nothing waits."""
        return (
            re.findall(r"(?m)^polarlm_requests_(?:active|running|waiting) (\S+)", self.get("/metrics")) == ["0.0"] * 3
        )

    def blocks(self) -> tuple[int, int]:
        """How many quantized blocks there are, and how many of them no request holds."""
        blocks = int(self.metric("kv_blocks"))
        return blocks, blocks - int(self.metric("kv_blocks_used"))

    def resident(self) -> int:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True)
        return int(told.stdout) * 1024

    def metric(self, name: str) -> float:
        """A number of /metrics; 0 if there is none of this name."""
        sample = re.search(rf"(?m)^polarlm_{re.escape(name)} (\S+)", self.get("/metrics"))
        return float(sample[1]) if sample else 0.0

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """While it holds, an idle server with troubled=True computes only as many units as the yielded function has let
        it in all, and answers whatever needs no computing."""
        file = self.trouble.with_name(self.trouble.name + ".held")

        def let(units: int) -> None:
            file.with_suffix(".new").write_text(str(units))
            file.with_suffix(".new").replace(file)

        let(0)
        try:
            yield let
        finally:
            file.unlink()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code. Nothing but the one line was written to standard output."""
        rest, _ = self.process.communicate(timeout=PATIENCE)
        assert rest == ""
        return self.process.returncode

    def log(self) -> list[dict[str, Any]]:
        """What was logged, behind the sentences of loading."""
        return [json.loads(line) for line in self.errors.read_text().splitlines() if line.startswith("{")]


def started(models: Path, errors: Path, *flags: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A server of several models that listens, and its URL. errors: what it writes to standard error goes there."""
    with errors.open("a") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "polarlm", "serve", "--models", str(models), *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    line = process.stdout.readline()
    assert line.startswith("Listening at "), errors.read_text()
    return process, line.split()[-1]
