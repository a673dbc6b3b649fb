"""The tables of a speed measurement, made from its JSON for the terminal and docs/speed.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarlm.bench import report
from polarlm.bench.speed import peers
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.figures import BATCHES, GENERATION, PROMPT
from polarlm.engine.config import EngineConfig
from polarlm.engine.state.plan import format_bytes

Measured = Mapping[str, Any]
NOTHING = "—"
_OF_THE_FIRST = ("seconds", "fit", "compiling")  # figures of our first start ever


def format_tables(measured: Measured) -> str:
    """All tables, each with a title, for the terminal."""
    sections = {row["section"] for row in measured["rows"]}
    starts = f"{starts_table(measured)}\n\n{starts_in_parts(measured)}" if measured["starts"] else ""
    read = "Bytes that a step reads, and share of the memory's bandwidth"
    parts = [
        ("Prompts, tokens/s", PROMPT in sections and rates_table(measured, [PROMPT], spread=True)),
        ("Generation, tokens/s", GENERATION in sections and rates_table(measured, [GENERATION], spread=True)),
        (read, GENERATION in sections and bandwidth_table(measured)),
        ("Steps of several sequences together", BATCHES in sections and batches_table(measured)),
        ("Memory of the process", measured["memory"] and memory_table(measured)),
        ("Starts", starts),
    ]
    titled = [f"{title}\n\n{report.with_origin(t, measured)}" for title, t in parts if t]
    return "\n\n".join([_about(measured), *titled, *measured["left_out"]])


def rates_table(measured: Measured, sections: Sequence[str], *, spread: bool = False) -> str:
    """A table with a line per prompt or context and a column per contestant; ours with the ratio to the strongest peer,
    which is the fastest cache of any peer. With several peers, the last column names it.

    spread: whether to show half the distance between the slowest and the fastest run, too.
    """
    rows, several = [], len({cell["engine"] for cell in measured["contestants"] if _is_peer(cell)}) > 1
    for row in (row for section in sections for row in measured["rows"] if row["section"] == section):
        first = strongest(row["cells"])
        best = None if first is None else first["median"]
        rows.append([row["name"], *(_rate_cell(cell, best, spread) for cell in row["cells"])])
        if several:
            rows[-1].append(NOTHING if first is None else f"{label(first['engine'])} {first['cache']}")
    return report.table(["", *_columns(measured), *(["strongest peer"] if several else [])], rows)


def strongest(cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell of the fastest cache of any peer; None without one."""
    theirs = [cell for cell in cells if _is_peer(cell) and "median" in cell]
    return max(theirs, key=lambda cell: cell["median"], default=None)


def bandwidth_table(measured: Measured) -> str:
    """A table of the bytes of weights and cache that a step reads, and of the share of memory bandwidth."""
    rows = [row for row in measured["rows"] if row["section"] == GENERATION]
    return report.table(["", *_columns(measured)], [[row["name"], *map(_bytes_cell, row["cells"])] for row in rows])


def batches_table(measured: Measured) -> str:
    """A table of tokens/s of several sequences together, and their ratio to the tokens/s of one sequence."""
    rows = [row for row in measured["rows"] if row["section"] == BATCHES]
    one = next((row["cells"][0].get("median") for row in rows if row["tokens"] == 1), None)
    lines = []
    for row in rows:
        (cell,) = row["cells"]
        rate = _rate(cell["median"]) if "median" in cell else cell["failure"]
        times = f"{cell['median'] / one:.2f}" if one and "median" in cell else NOTHING
        lines.append([row["name"], f"`{cell['cache']}`", rate, times])
    return report.table(["", "cache", "tokens/s", "times one"], lines)


def memory_table(measured: Measured) -> str:
    """A table of each contestant's memory: the peak, and the parts after the steps."""
    lines = []
    for row, column in zip(measured["memory"], _columns(measured), strict=True):
        if "failure" in row:
            lines.append([column, row["failure"], *[NOTHING] * 4])
        else:
            sizes = [row.get(name) for name in ("peak", "now", "private", "file", "cache_bytes")]
            lines.append([column, *(NOTHING if size is None else format_bytes(size) for size in sizes)])
    return report.table(["", "peak", "after steps", "private", "files", "cache"], lines)


def starts_table(measured: Measured) -> str:
    """A table of the seconds from a new process to its first token, and of the memory of that process."""
    theirs = [row for row in measured["starts"] if _is_peer(row)]
    fastest = min((row["median"] for row in theirs if "median" in row), default=None)
    lines = []
    for row in measured["starts"]:
        name = f"{label(row['engine'])} {row['cache']}"
        if "median" not in row:
            lines.append([name, row["failure"], *[NOTHING] * 5])
            continue
        ratio = NOTHING if _is_peer(row) or fastest is None else f"{row['median'] / fastest:.2f}"
        sizes = [row["memory"].get(part) for part in ("peak", "weights", "store", "rest")]
        parts = [NOTHING if size is None or size < 0 else format_bytes(size) for size in sizes]  # pages nobody touched
        lines.append([name, f"{row['median']:.2f} s", ratio, *parts])
    other = "the fastest peer" if len(theirs) > 1 else label(theirs[0]["engine"] if theirs else peers.DEFAULT)
    return report.table(["", "first token", f"times {other}", "peak", "weights", "store", "rest"], lines)


def starts_in_parts(measured: Measured) -> str:
    """Lines about the parts of starts, and about our first start ever; without those that failed."""
    lines = []
    for row in measured["starts"]:
        if row.get("parts"):
            parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row["parts"].items())
            lines.append(f"{label(row['engine'])} {row['cache']}: {parts}")
        if "first" in row:
            first = row["first"]
            lines.append(
                f"The first start ever of {label(row['engine'])} {row['cache']}: {first['seconds']:.2f} s, of which "
                f"fitting the cache {first['fit']:.2f} s; compiling {first['kernels']} kernels took "
                f"{first['compiling']:.2f} s of one core"
            )
        if "mapped" in row:
            lines.append(f"With --tile-cache, {label(row['engine'])} {row['cache']}: {row['mapped']['median']:.2f} s")
    return "\n\n".join(lines)


def starts_of_models(measurements: Sequence[Measured]) -> str:
    """A table with a line for each measurement, the smallest file first: starts of both engines, and our first ever."""
    other = label(peers.DEFAULT)
    header = ["", "file", "here", other, "times", "mapped", "times"]
    header += ["peak", f"{other}'s peak", "weights", "first ever", "fit", "compiling"]
    lines = []
    for measured in sorted(measurements, key=lambda one: (one["file_bytes"], one["model"])):
        ours, theirs = _start_of(measured, OURS), _start_of(measured, peers.DEFAULT)
        mapped = ours.get("mapped", {})
        lines.append([f"{measured['model']}, {measured['weights']}", format_bytes(measured["file_bytes"])])
        lines[-1] += [_median(ours), _median(theirs), _times(ours, theirs), _median(mapped), _times(mapped, theirs)]
        sizes = [(ours, "peak"), (theirs, "peak"), (ours, "weights")]
        lines[-1] += [format_bytes(row["memory"][part]) if "memory" in row else NOTHING for row, part in sizes]
        lines[-1] += [f"{ours['first'][part]:.1f} s" if "first" in ours else NOTHING for part in _OF_THE_FIRST]
    return report.table(header, lines)


def place(measured: Measured) -> str:
    """The machine of a measurement."""
    machine = measured["machine"]
    return f"{machine['cores']} cores of an {machine['cpu']}, {machine['system']}"


def source(measured: Measured) -> str:
    """A description of the measurement in Markdown: what was measured, where, how and when."""
    runs = max((len(cell.get("runs", ())) for row in measured["rows"] for cell in row["cells"]), default=0)
    return (
        f"{_named(measured)} on {place(measured)}; "
        f"{peers_in_words(measured)}; medians of {runs} runs; "
        f"threads: {_threads(measured)}; {report.measured_with(measured)}"
    )


def peers_in_words(measured: Measured) -> str:
    """The peers of a measurement, each with its version or the reason why it is missing."""
    return ", ".join(f"{peer['name']} {peer['version_or_absence']}" for peer in measured["peers"])


def label(engine: str) -> str:
    """The name of an engine in tables."""
    return "here" if engine == OURS else peers.every()[engine].label


def _threads(measured: Measured) -> str:
    threads = measured["threads"]
    chosen = ", ".join(f"{label(engine)} {n}" for engine, n in threads["chosen"].items())
    words = f"{threads['most']} for prompts, for steps {chosen}"
    if "peers" in threads and any(_is_peer(contestant) for contestant in measured["contestants"]):
        words += f"; a peer's best of {' and '.join(map(str, threads['peers']))} in each row"
    return words


def _about(measured: Measured) -> str:
    machine = measured["machine"]
    place = machine["gpu"]["name"] if "gpu" in machine else f"{machine['cpu']}, {machine['cores']} cores"
    lines = [f"{_named(measured)} on {place}. Medians ± half the spread."]
    if ours := measured["ours"]:
        lines.append(f"polarlm, backend {ours['backend']}: {ours['loaded']}")
    for other in measured["peers"]:
        built = f" ({other['built_with']})" if other["built_with"] else ""
        lines.append(f"{other['name']}: {other['version_or_absence']}{built}")
    if measured["threads"]["chosen"] and measured["device"] == "cpu":
        lines.append(f"Threads: {_threads(measured)}")
    rates = [f"{n}: {max(rates) / 1e9:.1f} GB/s" for n, rates in measured["bytes_per_second"].items()]
    if rates:
        lines.append(f"Bandwidth of the memory by threads that read: {', '.join(rates)}")
    return "\n".join(lines)


def _named(measured: Measured) -> str:
    return f"{measured['model']} ({measured['weights']})"


def _start_of(measured: Measured, engine: str) -> Mapping[str, Any]:
    return next((row for row in measured["starts"] if row["engine"] == engine), {})


def _median(row: Mapping[str, Any]) -> str:
    return f"{row['median']:.2f} s" if "median" in row else str(row.get("failure", NOTHING))


def _times(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{row['median'] / other['median']:.2f}" if "median" in row and "median" in other else NOTHING


def _columns(measured: Measured) -> list[str]:
    """The default cache is in bold."""
    columns = []
    for contestant in measured["contestants"]:
        cache = contestant["cache"]
        if contestant["engine"] != OURS:
            columns.append(f"{label(contestant['engine'])} {cache}")
        else:
            columns.append(f"**{cache}**" if cache == EngineConfig.cache_type else cache)
    return columns


def _is_peer(cell: Mapping[str, Any]) -> bool:
    return bool(cell["engine"] != OURS)


def _rate_cell(cell: Mapping[str, Any], best: float | None, spread: bool) -> str:
    if "median" not in cell:
        runs = max(cell.get("tried", {}).values(), key=max, default=())
        return f"{cell['failure']}{': ' if runs else ''}{', '.join(map(_rate, runs))}"
    text = _rate(cell["median"])
    if spread:
        half = (max(cell["runs"]) - min(cell["runs"])) / 2
        text += f" ±{half:,.1f}" if cell["median"] < 100 else f" ±{half:,.0f}"
    return text if _is_peer(cell) or best is None else f"{text} ({cell['median'] / best:.2f}×)"


def _bytes_cell(cell: Mapping[str, Any]) -> str:
    if "bytes_read" not in cell:
        return str(cell.get("failure", NOTHING))
    sizes = " + ".join(f"{cell['bytes_read'][part] / 1e6:,.0f}" for part in ("weights", "cache"))
    share = f", {cell['bandwidth_share']:.0%}" if "bandwidth_share" in cell else ""
    return f"{sizes} MB{share}"


def _rate(median: float) -> str:
    return f"{median:,.0f}" if median >= 100 else f"{median:.1f}"
