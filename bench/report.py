"""What a measurement leaves behind: a JSON file that says where it was made, and a table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from engine import EngineError
from engine.flags import FlagError

_RESULTS = Path(__file__).parent / "results"


def machine(gpu: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What speed depends on: CPU, cores this process may use, the libraries that compute, and the GPU that is used."""
    blas = [
        f"{library['internal_api']} {library['version']} ({library.get('architecture', 'unknown kernels')})"
        for library in threadpool_info()
        if library["user_api"] == "blas"
    ]
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": ", ".join(dict.fromkeys(blas)) or "unknown",
        **({"gpu": dict(gpu)} if gpu else {}),
    }


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def today() -> str:
    return datetime.date.today().isoformat()


def slug(text: str) -> str:
    """A part of a file name.

    >>> slug("AMD EPYC (Zen 5)")
    'amd-epyc-zen-5'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def output_path(given: str | None, kind: str, subject: str) -> Path:
    """Where the JSON goes: the file of --output, else bench/results/<kind>-<subject>-<date>.json.

    Raises FlagError before anything is measured if no file can be made there.
    """
    path = Path(given) if given is not None else _RESULTS / f"{kind}-{slug(subject)}-{today()}.json"
    if given is None:
        path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        raise FlagError(f"--output {path} is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise FlagError(f"--output {path} cannot be written; name a file in a folder that exists and is yours")
    return path


def write(
    path: Path, kind: str, argv: Sequence[str], result: Mapping[str, Any], gpu: Mapping[str, str] | None = None
) -> None:
    """`result` with the machine, the date and the command line that made it. Raises EngineError."""
    about = {
        "benchmark": kind,
        "date": today(),
        "command": shlex.join(["python", "-m", f"bench.{kind}", *argv]),
        "machine": machine(gpu),
    }
    try:
        path.write_text(json.dumps({**about, **result}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}") from None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up: the first one to the left, the others to the right.

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
