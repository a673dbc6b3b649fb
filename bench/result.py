"""The result of a measurement: rows of subject, contestant, quantity and runs, and where they are from, as JSON.

{"subject": "generation at 2,048", "contestant": "polarlm balanced", "quantity": "tokens/s", "runs": [98.1, 97.4]}
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from threadpoolctl import threadpool_info

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import FlagError, release
from polarlm.engine.config import setting
from polarlm.engine.jit.isa import VARIABLE as LEVEL_VARIABLE

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "bench" / "results"  # exists only in a checkout
LOCAL = RESULTS / "local"  # ignored by git
_PART = 1 << 20  # bytes that are read at a time
_DIGITS = 12  # of a digest in a line
_BUSY = 0.5  # load from which the times of a machine are those of a busy one


@dataclass(frozen=True)
class Output:
    """The flags for a measurement's destination."""

    output: str | None = setting(
        None,
        "--output",
        metavar="FILE",
        help="where the JSON goes, and the page next to it; else <benchmark>-<subject>-<date>.json in the "
        "current folder, or in a checkout's bench/results/local",
    )
    publish: bool = setting(
        False,
        "--publish",
        help="write to a checkout's bench/results, over the published figures of the same name and day",
    )

    def path(self, kind: str, subject: str) -> Path:
        """The file of --output, or else <kind>-<subject>-<date>.json in a checkout's results or the current folder.

        Raises FlagError if it cannot be written: better now than after the measurement.
        """
        if self.output is not None:
            if self.publish:
                raise FlagError("--output and --publish both say where the results go; leave one of them out")
            path = Path(self.output)
        else:
            path = self._folder() / f"{kind}-{slug(subject)}-{today()}.json"
        if path.is_dir():
            raise FlagError(f"--output {path} is a folder; name a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise FlagError(f"--output {path} cannot be written; name a file in a folder that exists and is yours")
        return path

    def _folder(self) -> Path:
        """Raises FlagError."""
        if RESULTS.is_dir():
            folder = RESULTS if self.publish else LOCAL
            folder.mkdir(exist_ok=True)
            return folder
        if self.publish:
            raise FlagError("--publish writes to bench/results of a checkout, and there is none; --output names a file")
        return Path.cwd()


@dataclass(frozen=True)
class Row:
    """A quantity of a contestant in a subject.

    value: what counts of the runs; their median if nothing else is said, None of a failure. error: a standard error.
    more: further fields of the JSON, such as the number of threads.
    """

    subject: str
    contestant: str
    quantity: str
    runs: tuple[float, ...] = ()
    value: float | None = None
    error: float | None = None
    failure: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in ("subject", "contestant", "quantity", "runs", "value", "error")}
        row |= {"failure": self.failure, **self.more}
        return {name: value for name, value in row.items() if value not in (None, "", ())}


Figures = Mapping[str, Row]
"""The rows of a contestant in a subject by their quantities."""


def value_of(figures: Figures, quantity: str) -> float | None:
    """The value of a quantity; None if it was not measured, or failed."""
    return figures[quantity].value if quantity in figures else None


class Result:
    """The rows of a measurement. about: the other fields of its JSON."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.about: dict[str, Any] = dict(about)
        self.clear()

    def __getitem__(self, name: str) -> Any:
        return self.about[name]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows: dict[tuple[str, str], dict[str, Row]] = {}

    def add(
        self,
        subject: str,
        contestant: str,
        quantity: str,
        runs: Iterable[float] = (),
        *,
        value: float | None = None,
        error: float | None = None,
        failure: str | None = None,
        **more: Any,
    ) -> None:
        """Add a row, in place of one of the same subject, contestant and quantity."""
        runs = tuple(map(float, runs))
        if value is None and runs and not failure:
            value = statistics.median(runs)
        row = Row(subject, contestant, quantity, runs, value, error, failure or "", more)
        self._rows.setdefault((subject, contestant), {})[quantity] = row

    def add_all(self, subject: str, contestant: str, values: Mapping[str, float | None], **more: Any) -> None:
        """Add a row for each quantity that has a value."""
        for quantity, value in values.items():
            if value is not None:
                self.add(subject, contestant, quantity, value=value, **more)

    def figures(self, subject: str, contestant: str) -> Figures:
        return self._rows.get((subject, contestant), {})

    def value(self, subject: str, contestant: str, quantity: str) -> float | None:
        """The value of a row; None if there is no such row, or it is a failure."""
        return value_of(self.figures(subject, contestant), quantity)

    def rows(self, *quantities: str) -> Iterator[Row]:
        """All rows, or those of some quantities."""
        for figures in self._rows.values():
            yield from (row for row in figures.values() if not quantities or row.quantity in quantities)

    def parts(self, subject: str = "", *, prefix: str = "") -> Iterator[tuple[str, str, Figures]]:
        """Subject, contestant and their rows, in order: of one subject, of those with a prefix, or of all."""
        for key, figures in self._rows.items():
            if key[0] == subject or (not subject and key[0].startswith(prefix)):
                yield *key, figures

    def as_json(self) -> dict[str, Any]:
        return {**self.about, "rows": [row.as_json() for row in self.rows()]}


def read(path: Path) -> Result:
    """The result of a file. Raises OSError, ValueError, KeyError or TypeError."""
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    result = Result({name: value for name, value in measured.items() if name != "rows"})
    for row in measured["rows"]:
        result.add(**row)
    return result


class ResultWriter:
    """Writes a result, with its command, the program, the machine and its load before the measurement and after."""

    def __init__(
        self,
        path: Path,
        kind: str,
        argv: Sequence[str],
        gpu: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """program: the words before `argv`; default: `python -m polarlm.bench.<kind>`."""
        self.path, self._gpu, self._before = path, gpu, load()
        command = shlex.join([*(program or ("python", "-m", f"polarlm.bench.{kind}")), *argv])
        level = os.environ.get(LEVEL_VARIABLE)
        command = f"{LEVEL_VARIABLE}={shlex.quote(level)} {command}" if level else command
        self._head = {"benchmark": kind, "date": today(), "command": command}

    def write(self, result: Result, *, complete: bool) -> None:
        """complete: whether the measurement has ended: an interrupted one keeps its rows. Raises EngineError."""
        about: dict[str, Any] = {**self._head, **_program(), "machine": machine(self._gpu)}
        about |= {"load": {"before": self._before, "after": load()}, "complete": complete}
        result.about = {**about, **{name: value for name, value in result.about.items() if name not in about}}
        whole = result.as_json()
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in whole.pop("rows"))
        text = json.dumps(whole, indent=1, ensure_ascii=False).removesuffix("\n}")
        try:
            self.path.write_text(f'{text},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
        except OSError as error:
            raise EngineError(f"{self.path} cannot be written: {error.strerror}") from None


# -- the machine and the program -------------------------------------------------------------------------------------


def machine(gpu: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The CPU, the level that kernels are restricted to, usable cores, versions of numerical libraries, and the GPU."""
    level = os.environ.get(LEVEL_VARIABLE)
    used = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = [f"{one['internal_api']} {one['version']} ({one.get('architecture', 'unknown kernels')})" for one in used]
    return {
        "cpu": _cpu(),
        **({"restricted_to": level} if level else {}),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": ", ".join(dict.fromkeys(blas)) or "unknown",
        "blas_threads": max((library["num_threads"] for library in used), default=1),
        **({"gpu": dict(gpu)} if gpu else {}),
    }


def load() -> float:
    """Processes that ran or waited for a core in the last minute, on average."""
    return round(psutil.getloadavg()[0], 2)


def load_in_words(result: Result, *, is_timed: bool = True) -> str:
    """The load before the measurement and after; a warning if the machine was busy.

    is_timed: whether it has times or speeds, which other work changes.
    """
    before, after = result["load"]["before"], result["load"]["after"]
    warning = "; the machine had other work, so times say little" if before > _BUSY and is_timed else ""
    return f"{before:.1f} before, {after:.1f} after, on {result['machine']['cores']} cores{warning}"


def _cpu() -> str:
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        name = None
    return name[1].strip() if name else platform.processor() or platform.machine()


def digest_of_text(text: str) -> dict[str, Any]:
    """The "text_sha256" and "text_bytes" of a text as UTF-8."""
    data = text.encode("utf-8", "surrogateescape")
    return {"text_sha256": hashlib.sha256(data).hexdigest(), "text_bytes": len(data)}


def digest_of_model(files: Iterable[Path]) -> dict[str, str]:
    """The "model_sha256" of a model's files of weights, one after another in the order of their names; nothing without
    files. Raises EngineError."""
    digest, paths = hashlib.sha256(), sorted(files)
    try:
        for path in paths:
            with path.open("rb") as file:
                while part := file.read(_PART):
                    digest.update(part)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    return {"model_sha256": digest.hexdigest()} if paths else {}


def about_gpu() -> dict[str, str]:
    """The GPU's name and the versions of driver and CUDA, as a result has them."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "name": properties["name"].decode(),
        "driver": _driver(),
        "driver_cuda": _cuda_version(runtime.driverGetVersion()),
        "runtime_cuda": _cuda_version(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
    }


def _cuda_version(number: int) -> str:
    """13020 → "13.2"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver() -> str:
    """The driver's version, maximum clocks and power limit."""
    fields = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


@cache
def _program() -> dict[str, str]:
    """The "version" of an installed package, and the "commit" of a checkout, "modified" if its files are."""
    about = {"version": release()} if release() else {}
    ask = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty= modified"]
    if (_ROOT / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):  # there is no git, or it does not trust this folder
            about["commit"] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return about


def origin(measured: Mapping[str, Any]) -> str:
    """Text, model and program of a result in a line, with the first digits of digests.

    >>> origin({"text": "a.txt", "text_sha256": "bbf94c53a05abe9e", "version": "1.0", "commit": "9de2b42f modified"})
    'Text a.txt (sha256 bbf94c53a05a…); polarlm 1.0 at commit 9de2b42f modified.'
    """
    parts = []
    if "text_sha256" in measured:
        parts.append(f"text {measured['text']} (sha256 {measured['text_sha256'][:_DIGITS]}…)")
    if "model_sha256" in measured:
        parts.append(f"model {measured.get('model', 'file')} (sha256 {measured['model_sha256'][:_DIGITS]}…)")
    commit = f" at commit {measured['commit']}" if "commit" in measured else ""
    line = "; ".join([*parts, f"polarlm {measured.get('version', '')}".rstrip() + commit])
    return f"{line[0].upper()}{line[1:]}."


# -- words -----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(40), duration(200), duration(5400)
    ('40 s', '3 min', '1.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def today() -> str:
    return datetime.date.today().isoformat()


def slug(text: str) -> str:
    """`text` as part of a file name.

    >>> slug("AMD EPYC (Zen 5)")
    'amd-epyc-zen-5'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
