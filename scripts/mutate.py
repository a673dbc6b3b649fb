"""Changes the product in small ways, one at a time, and counts how many of the changes the tests find.

    python -m scripts.mutate [--number 100] [--seed 0] [--rooms engine/state,cuda] [--suite FOLDER] [--jobs 1]

Each mutation is made in a copy of the tracked files. The tests of the mutated room run there until the first test
fails: first the tests of `make test`, then, if they miss the mutation, the slow tests of `make test-all`. So the table
shows what the short run loses. `--suite` takes the tests of another checkout: the same seed gives the same mutations of
the same product, so that two suites can be compared. Surviving mutations are printed: some change nothing that could be
seen.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import keyword
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
KILLED, KILLED_SLOWLY, SURVIVED = "killed", "killed by a slow test", "survived"
_MARKS = {KILLED: "not slow", KILLED_SLOWLY: "slow"}  # outcome → the tests that lead to it
_SECONDS = 1800  # for the tests of one mutation; a mutation that hangs counts as killed
_NO_TESTS = 5  # pytest's exit status

# Room → the tests that are about it.
ROOMS: Mapping[str, Sequence[str]] = {
    "engine/state": ("tests/state", "tests/model/test_forward.py", "tests/test_prefix.py"),
    "engine/requests": ("tests/requests", "tests/test_engine.py"),
    "engine/model": ("tests/model", "tests/test_golden.py"),
    "engine/sampling": ("tests/sampling",),
    "engine/storage/tiers": ("tests/tiers",),
    "engine/codecs": ("tests/codecs",),
    "engine/quantization": ("tests/quantization", "tests/codecs"),
    "engine/backends/native/kernels": ("tests/backends/native",),
    "engine/jit": ("tests/jit",),
    "model_loaders": ("tests/model_loaders",),
    "server": ("tests/server",),
    "cuda": ("tests/cuda",),
}

_PYTHON = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "+", "//": "*", "%": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&",
    "and": "or", "or": "and", "not": "", "True": "False", "False": "True",
}  # fmt: skip
_CUDA = re.compile(r"(?<=[\w)\]] )(<=?|>=?|==|!=|[+\-*%]|&&|\|\|)(?= [\w(])|\b__syncthreads\(\);")
_IN_CUDA = {**_PYTHON, "&&": "||", "||": "&&", "__syncthreads();": ";"}


@dataclass(frozen=True)
class Mutation:
    """A change of one token. place: its first character in the text of the file."""

    room: str
    file: str
    line: int
    place: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old} → {self.new or 'nothing'}"


def mutations(root: Path, rooms: Sequence[str] = tuple(ROOMS)) -> Iterator[Mutation]:
    """All mutations of the product in `root`."""
    for room in rooms:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                text = path.read_text(encoding="utf-8")
                changes = _in_python(text) if path.suffix == ".py" else _in_cuda(text)
                for place, old, new in changes:
                    line = text.count("\n", 0, place) + 1
                    yield Mutation(room, path.relative_to(root).as_posix(), line, place, old, new)


def _in_python(text: str) -> Iterator[tuple[int, str, str]]:
    """Operators and truth values, and numbers that grow by 1, of statements that run: no signatures or imports."""
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    runs, before = _rows_that_run(text), ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (row, column), word = token.start, token.string
        is_binary = re.search(r"[\w)\]}'\"]$", before) and not keyword.iskeyword(before)
        before = word
        if row not in runs:
            continue
        if token.type == tokenize.NUMBER and word.isdigit():
            yield starts[row - 1] + column, word, str(int(word) + 1)
        elif token.type in (tokenize.OP, tokenize.NAME) and word in _PYTHON and (is_binary or word not in "+-*"):
            yield starts[row - 1] + column, word, _PYTHON[word]


def _rows_that_run(text: str) -> set[int]:
    """The rows of statements in functions, without the signatures of these."""
    rows: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                if not isinstance(statement, (ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Assert)):
                    rows |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return rows


def _in_cuda(text: str) -> Iterator[tuple[int, str, str]]:
    """Operators between words, and barriers, outside of comments and of the preprocessor's lines."""
    start = 0
    for row in text.splitlines(keepends=True):
        code = "" if row.lstrip().startswith(("#", "//", "template")) else row.split("//")[0]
        for match in _CUDA.finditer(code):
            yield start + match.start(), match[0], _IN_CUDA[match[0]]
        start += len(row)


def chosen(mutations: Sequence[Mutation], number: int, seed: int) -> list[Mutation]:
    """`number` of the mutations, as many of each room as of every other one, in random order."""
    rng = random.Random(seed)
    by_room: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        by_room.setdefault(mutation.room, []).append(mutation)
    for several in by_room.values():
        rng.shuffle(several)
    in_turn = [m for place in range(number) for several in by_room.values() for m in several[place : place + 1]]
    return in_turn[:number]


def passes(room: str, product: Path, suite: Path, marks: str, mutation: Mutation | None = None) -> bool:
    """Whether the tests of a room in `suite` with these marks pass in a copy of `product`, with the mutation."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        _copy(product, copy)
        shutil.rmtree(copy / "tests")
        shutil.copytree(suite / "tests", copy / "tests", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        kernels = Path(".pytest_cache", "kernels")  # kernels of unchanged sources need not be compiled again
        if (product / kernels).is_dir():
            shutil.copytree(product / kernels, copy / kernels)
        if mutation is not None:
            path = copy / mutation.file
            text = path.read_text(encoding="utf-8")
            after = mutation.place + len(mutation.old)
            path.write_text(text[: mutation.place] + mutation.new + text[after:], encoding="utf-8")
        tests = [test for test in ROOMS[room] if (copy / test).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment = {**os.environ, **one_thread, "PYTHONPATH": str(copy)}
        try:
            ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return ran.returncode in (0, _NO_TESTS)


def _copy(product: Path, copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=product, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(product / name, copy / name, follow_symlinks=False)


def table(outcomes: Mapping[Mutation, str]) -> str:
    """Mutations of each room that `make test` kills, those that `make test-all` kills, and how many there are."""
    rooms = Counter(mutation.room for mutation in outcomes)
    short, long = (
        Counter(mutation.room for mutation, what in outcomes.items() if what in kinds)
        for kinds in ([KILLED], [KILLED, KILLED_SLOWLY])
    )
    rows = [(room, short[room], long[room], count) for room, count in rooms.items()]
    rows.append(("all", short.total(), long.total(), rooms.total()))
    head = f"{'':32} {'make test':>9} {'test-all':>9} {'of':>4}"
    return "\n".join([head, *(f"{room:32} {a:9} {b:9} {count:4}" for room, a, b, count in rows)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, default=100, help="mutations [100]")
    parser.add_argument("--seed", type=int, default=0, help="of the choice [0]")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders of the product, with commas [all]")
    parser.add_argument("--suite", type=Path, default=ROOT, help="a checkout whose tests run [this one]")
    parser.add_argument("--jobs", type=int, default=1, help="mutations that are tried at a time [1]")
    parser.add_argument("--output", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args(argv)
    picked = chosen(list(mutations(ROOT, options.rooms.split(","))), options.number, options.seed)
    rooms = list(dict.fromkeys(mutation.room for mutation in picked))
    with ThreadPoolExecutor(options.jobs) as pool:
        unchanged = pool.map(lambda room: passes(room, ROOT, options.suite, _MARKS[KILLED]), rooms)
        for room, has_passed in zip(rooms, unchanged, strict=True):
            if not has_passed:
                print(f"error: The tests of {room} do not pass as they are, so they tell nothing", file=sys.stderr)
                return 1
    outcomes = dict.fromkeys(picked, SURVIVED)
    for kind, marks in _MARKS.items():
        left = [mutation for mutation, what in outcomes.items() if what == SURVIVED]
        with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(left), unit="mutation", disable=None) as bar:
            survives = pool.map(lambda m, marks=marks: passes(m.room, ROOT, options.suite, marks, m), left)
            for mutation, has_survived in zip(left, survives, strict=True):
                bar.update()
                if not has_survived:
                    outcomes[mutation] = kind
                if options.output:
                    rows = [{**asdict(one), "outcome": told} for one, told in outcomes.items()]
                    options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for mutation, what in outcomes.items():
        if what == SURVIVED:
            print(f"survived: {mutation}")
    print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
