"""Reports of measurements: JSON files that include the machine and the command, and Markdown tables."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import FlagError, release
from polarlm.engine.config import setting
from polarlm.engine.jit.isa import VARIABLE as LEVEL_VARIABLE

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "bench" / "results"  # exists only in a checkout
LOCAL = RESULTS / "local"  # ignored by git
WRITTEN_EVERY = 15  # seconds, where figures come more often
_PART = 1 << 20  # bytes that are read at a time
_DIGITS = 12  # of a digest in a line


@dataclass(frozen=True)
class Output:
    """The flags for a measurement's destination."""

    output: str | None = setting(
        None,
        "--output",
        metavar="FILE",
        help="where the JSON goes, and pictures next to it; else <benchmark>-<subject>-<date>.json in the current "
        "folder, or in a checkout's bench/results/local",
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


@cache
def _program() -> dict[str, str]:
    """The "version" of an installed package, and the "commit" of a checkout, "modified" if its files are."""
    about = {"version": release()} if release() else {}
    ask = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty= modified"]
    if (_ROOT / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):  # there is no git, or it does not trust this folder
            about["commit"] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return about


def with_origin(table: str, measured: Mapping[str, Any], between: str = "\n\n") -> str:
    """`table`, and below it the line of `origin`, if there is one."""
    line = origin(measured)
    return f"{table}{between}{line}" if line else table


def measured_with(measured: Mapping[str, Any]) -> str:
    """When and with which command a result was measured, and its origin: Markdown for the documents."""
    return with_origin(f"measured on {measured['date']} with\n`{measured['command']}`.", measured, "\n")


def origin(measured: Mapping[str, Any]) -> str:
    """Text, model and program of a result in a line, with the first digits of digests; empty for an older one.

    >>> origin({"text": "a.txt", "text_sha256": "bbf94c53a05abe9e", "version": "1.0", "commit": "9de2b42f modified"})
    'Text a.txt (sha256 bbf94c53a05a…); polarlm 1.0 at commit 9de2b42f modified.'
    """
    parts = []
    if "text_sha256" in measured:
        parts.append(f"text {measured['text']} (sha256 {measured['text_sha256'][:_DIGITS]}…)")
    if "model_sha256" in measured:
        parts.append(f"model {measured.get('model', 'file')} (sha256 {measured['model_sha256'][:_DIGITS]}…)")
    if parts or "version" in measured:
        commit = f" at commit {measured['commit']}" if "commit" in measured else ""
        parts.append(f"polarlm {measured.get('version', '')}".rstrip() + commit)
    line = "; ".join(parts)
    return f"{line[0].upper()}{line[1:]}." if parts else ""


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(40), duration(200), duration(5400)
    ('40 s', '3 min', '1.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cpu() -> str:
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        name = None
    return name[1].strip() if name else platform.processor() or platform.machine()


def today() -> str:
    return datetime.date.today().isoformat()


def slug(text: str) -> str:
    """`text` as part of a file name.

    >>> slug("AMD EPYC (Zen 5)")
    'amd-epyc-zen-5'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def write(
    path: Path,
    kind: str,
    argv: Sequence[str],
    result: Mapping[str, Any],
    gpu: Mapping[str, str] | None = None,
    *,
    complete: bool = True,
    program: Sequence[str] = (),
) -> dict[str, Any]:
    """Write `result` with version, machine, date and command line, and return all of it. Raises EngineError.

    complete: whether the measurement is finished. Partial results are written during a measurement, so that an
    interrupted one keeps them. program: the words before `argv`; default: `python -m polarlm.bench.<kind>`.
    """
    about = {
        "benchmark": kind,
        "date": today(),
        "command": _command([*(program or ("python", "-m", f"polarlm.bench.{kind}")), *argv]),
        **_program(),
        "machine": machine(gpu),
        "complete": complete,
    }
    results = {**about, **result}
    try:
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}") from None
    return results


def _command(words: Sequence[str]) -> str:
    command = shlex.join(words)
    level = os.environ.get(LEVEL_VARIABLE)
    return f"{LEVEL_VARIABLE}={shlex.quote(level)} {command}" if level else command


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right.

    >>> print(table(["type", "KL"], [["f16", "0.1"]]))
    | type |  KL |
    |:-----|----:|
    | f16  | 0.1 |
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(aligned)} |"

    rule = "|".join([f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])])
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])
