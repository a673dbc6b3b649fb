"""Counters of single kernels by NVIDIA's ncu (Nsight Compute): the command, and a table of what it has written."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from polarlm.bench import report
from scripts.processes import find
from tests.written_results import read as read_lines

PROGRAM = "ncu"
# What the driver says where only administrators may read counters.
FORBIDDEN = "ERR_NVGPUCTRPERM"

_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_TIME = "gpu__time_duration.sum"  # ns
_METRICS = {
    _TIME: "µs",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue %",
    _STALLED.format("long_scoreboard"): "warps waiting for memory",
    _STALLED.format("barrier"): "for a barrier",
    _STALLED.format("no_instruction"): "for instructions",
}


def command(written: Path, launches: Path) -> list[str] | None:
    """The command that writes counters to `written`, and to `launches` what was launched; None without ncu.

    Clocks stay as they are, so that times are those of use; caches are flushed before each launch.
    """
    program = find(PROGRAM)
    if program is None:
        return None
    measured = ["--metrics", ",".join(_METRICS), "--clock-control", "none", "--cache-control", "all"]
    which = ["--target-processes", "all", "--profile-from-start", "off", "--kernel-name", "regex:_kernel$"]
    to = ["--csv", "--print-units", "base", "--log-file", str(written)]
    return [program, *measured, *which, *to, sys.executable, "-m", "polarlm.bench.gpu.profiled", str(launches)]


def read(written: Path) -> list[dict[str, str]]:
    """Metric → value of each launch, in order. ncu writes a row for each metric, with an ID for the launch."""
    if not written.is_file():
        return []
    lines = written.read_text(encoding="utf-8", errors="replace").splitlines()
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        found[row["ID"]][row["Metric Name"]] = row["Metric Value"]
        found[row["ID"]]["kernel"] = row["Kernel Name"].split("(")[0].removesuffix("_kernel")
    return list(found.values())


def table(written: Path, launches: Path) -> str:
    """The counters of each launch with its part; a sentence where the two files do not have the same launches."""
    counted = read(written)
    if not counted:
        return "No counters of kernels."
    both = list(
        zip(read_lines(launches), counted, strict=False)
    )  # one that was ended has counted a launch more than it has written
    if any(part["kernel"] != counts["kernel"] for part, counts in both):
        return f"The counters in {written} are not those of the launches in {launches}."
    header = ("part", "weights", "rows", "kernel", *_METRICS.values())
    rows = [
        (part["part"], part["weights"], str(part["rows"]), part["kernel"], *_shown(counts)) for part, counts in both
    ]
    return f"Counters of single launches, by {PROGRAM}\n\n{report.table(header, rows)}"


def _shown(counts: dict[str, str]) -> Iterator[str]:
    for metric in _METRICS:
        try:
            value = float(counts.get(metric, "").replace(",", ""))
        except ValueError:  # not known to this GPU
            yield "—"
        else:
            yield f"{value / 1e3 if metric == _TIME else value:,.1f}"
