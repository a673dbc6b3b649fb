"""`polarlm speed --session N`: an agent's session of N turns over the chat API, with our server and with others.

A turn sends the whole conversation so far and one more result of a tool. As clients do, it sends back what the server
has said, so each server gets its own answers; everything else is the same for all. The tools are text of the system
prompt: there are chat templates that list no tools, and servers that then leave them out in silence.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import truediv
from pathlib import Path

from polarlm.bench.command import model_files, model_named, numbers, weight_files
from polarlm.bench.report import Report, Section, Table, cell_of, provenance
from polarlm.bench.result import Output, Result, ResultWriter, digest_of_model
from polarlm.bench.runner import Workload, WorkloadRunner
from polarlm.bench.servers import SERVE, ask, connect, running_server
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.options import PROGRAM, Options
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.calibration import TEXT_FILE

ANSWER = 64  # tokens of an answer
ALL, TIMES = "all", "times ours"  # subjects beside the turns: their sums, and a peer's over ours
TOKENS, SECONDS = ("prompt", "cached"), ("first token", "turn")  # quantities
_FLAGS = {"weights", "hf_repo", "session", "peer", "threads", "repeat", "minutes"}  # fields of Options that count here
_RESULT = 1600  # characters of a tool's result: about 450 tokens
_SYSTEM = Path(__file__).with_name("session.txt")


def run(options: Options, destination: Output, argv: Sequence[str]) -> None:
    """Measure the servers in turn, write the JSON after each session, print the report. Raises FlagError, EngineError
    or LoadError."""
    for field in fields(Options):
        if field.name not in _FLAGS and getattr(options, field.name) != field.default:
            raise FlagError(f"{field.metadata['flags'][0]}: the servers of a session have their defaults; leave it out")
    turns, programs = options.session or 0, _programs(options.peer)
    path, name = model_files(model_named(options.weights, options.hf_repo))
    threads, left_out = max(numbers("--threads", options.threads)), list[str]()
    about = {"model": name, **digest_of_model(weight_files(path)), "turns": turns, "threads": threads}
    result, sessions = Result({**about, "left_out": left_out}), {who: list[Session]() for who in programs}
    writer = ResultWriter(destination.path("session", name), "speed", argv, program=PROGRAM)
    runner = WorkloadRunner(math.inf if options.minutes is None else 60 * options.minutes)
    runner.write = lambda complete: writer.write(result, complete=complete)

    def measure(who: str) -> None:
        if who not in programs:
            return
        began = time.monotonic()
        try:
            with running_server([*programs[who], "-m", path, "-t", str(threads)]) as url:
                sessions[who].append(converse(url, turns, lambda: runner.advance(1 / turns)))
        except EngineError as error:
            if who == OURS:
                raise
            del programs[who]
            left_out.append(f"{who} is not compared: {error}")
            note(left_out[-1])
        else:
            runner.work_seconds = max(runner.work_seconds, time.monotonic() - began)
            add_sessions(result, who, sessions[who])
            note(f"{who}: {result.figures(ALL, who)['turn'].runs[-1]:,.1f} s")
            runner.write(False)

    rounds = {f"session {number} of {who}": who for number in range(1, options.repeat + 1) for who in programs}
    with runner.final_write():
        runner.run([Workload(name, 1, partial(measure, who)) for name, who in rounds.items()])
        left_out += [f"There was no time for {name}: give more --minutes" for name in runner.left_out]
    report_of(result).show(writer.path)


def _programs(peers: str | None) -> dict[str, list[str]]:
    """Name of a server → the words that start it; ours, and peers of a list of NAME=PROGRAM. Raises FlagError."""
    programs = {OURS: [*SERVE]}
    for part in [] if peers is None else peers.split(","):
        name, _, words = part.partition("=")
        if not words or name == OURS:
            raise FlagError(f"--peer {part}: in a session, give NAME=PROGRAM of a server such as llama-server")
        programs[name] = shlex.split(words)
    return programs


Session = list[Mapping[str, float]]  # quantity → value, for each turn


def converse(url: str, turns: int, advance: Callable[[], object]) -> Session:
    """A session with a server. advance: called after each turn. Raises EngineError."""
    text, session = TEXT_FILE.read_text(encoding="utf-8"), Session()
    messages = [{"role": "system", "content": _SYSTEM.read_text(encoding="utf-8")}]
    with connect(url, {"Connection": "close"}) as http:  # llama-server ends some that are kept
        for turn in range(1, turns + 1):
            start = turn * _RESULT % len(text)
            messages.append({"role": "user", "content": f"Result {turn}:\n{(text + text)[start : start + _RESULT]}"})
            body = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            answer = ask(http, "/v1/chat/completions", body, time.perf_counter())
            if answer.error or answer.completion_tokens != ANSWER:
                reason = answer.error or f"{answer.completion_tokens} of {ANSWER} tokens"
                raise EngineError(f"no whole answer in turn {turn} ({reason}); a full context needs fewer turns")
            messages.append({"role": "assistant", "content": answer.text})
            values = answer.prompt_tokens, answer.cached_tokens, answer.first_token, answer.ended
            session.append(dict(zip((*TOKENS, *SECONDS), values, strict=True)))
            advance()
    return session


def add_sessions(result: Result, who: str, sessions: Sequence[Session]) -> None:
    """Add the figures of a server with a run for each session: of turns, their sums, and of a peer these over ours."""
    for quantity in (*TOKENS, *SECONDS):
        for number, turns in enumerate(zip(*sessions, strict=True), 1):
            result.add(f"turn {number}", who, quantity, [turn[quantity] for turn in turns])
        sums = [sum(turn[quantity] for turn in session) for session in sessions]
        result.add(ALL, who, quantity, sums)
        if who != OURS and quantity in SECONDS:
            result.add(TIMES, who, quantity, map(truediv, sums, result.figures(ALL, OURS)[quantity].runs))


def report_of(result: Result) -> Report:
    return Report(
        title=f"A session of {result['turns']} turns with {result['model']}",
        lead="Tokens, and seconds: medians of the sessions",
        sections=[Section("Turns", [session_table(result)])],
        about=[("threads", str(result["threads"])), *provenance(result)],
        notes=result["left_out"],
        partial="" if result["complete"] else "This page is partial: see its last sentences.",
    )


def session_table(result: Result) -> Table:
    """A line for each turn, their sums and ratios, and a column for each quantity and server; prompts are ours."""
    subjects, servers = (dict.fromkeys(names) for names in zip(*(part[:2] for part in result.parts()), strict=True))
    columns = [f"{quantity}, {who}" for quantity in ("cached", *SECONDS) for who in servers]

    def cell(subject: str, column: str) -> str:
        quantity, _, who = column.partition(", ")
        text = "{:,.0f}" if quantity in TOKENS else "{:,.2f}×" if subject == TIMES else "{:,.3f}"
        return cell_of(result.figures(subject, who or OURS).get(quantity), text.format)

    return Table.cross("", subjects, {name: name for name in ("prompt", *columns)}, cell)
