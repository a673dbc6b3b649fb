"""ik_llama.cpp as a peer of the speed measurement: how its program is run, and what is made of what it prints.

What is printed in tests/fixtures/peers was printed by the real program, of the version that it names.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.speed.child import Child
from polarlm.bench.speed.peers import NoPeer, ik_llama_cpp
from tests.conftest import FIXTURES

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="the stand-in is a script, which Windows does not start by its name"
)
SAID = FIXTURES.parent / "peers" / "ik_llama_cpp.json"


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that prints what `llama-bench` has printed for the same flags, and notes them."""
    path = tmp_path / "llama-bench"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        f"runs = json.load(open({str(SAID)!r}, encoding='utf-8'))\n"
        "flags = ' '.join(sys.argv[sys.argv.index('json') + 1:])\n"
        "run = runs.get(flags if '-m model.gguf' in ' '.join(sys.argv) else 'missing')\n"
        "sys.stdout.write(run['stdout']), sys.stderr.write(run['stderr']), sys.exit(run['status'])\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def test_llama_bench_is_run_for_each_figure(program: str) -> None:
    runs: dict[str, Any] = json.loads(SAID.read_text(encoding="utf-8"))
    other = ik_llama_cpp.start("model.gguf", 4096, 2, "f16", program)
    (prompt,) = json.loads(runs["-p 100 -n 0 -r 2"]["stdout"])
    assert len(prompt["samples_ts"]) == 2
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_threads"]) == (100, 0, 2)
    assert other.prompt_rate([5] * 100) == prompt["samples_ts"][1], "the first one is a warm-up"
    (steps,) = json.loads(runs["-p 0 -n 0 -gp 101,16 -r 1"]["stdout"])
    assert steps["test"] == "tg16@pp101"
    assert other.generation_rate([5] * 100, [6] * 17) == steps["samples_ts"][0]
    assert steps["samples_ts"][0] == pytest.approx(16 / (steps["samples_ns"][0] / 1e9)), "of the steps alone"
    # Linux counts a program's memory from its parent's memory, here a process of the tests.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert 1 << 20 < other.memory()["peak"] < max(1 << 30, 2 * own)
    calls = [json.loads(line) for line in (Path(program).parent / "calls").read_text(encoding="utf-8").splitlines()]
    for call in calls:
        assert call[:12] == ["-m", "model.gguf", "-t", "2", "-ctk", "f16", "-ctv", "f16", "-fa", "1", "-rtr", "1"]


def test_llama_bench_says_what_it_was_built_with(program: str) -> None:
    about = ik_llama_cpp.start("model.gguf", 64, 2, "f16", program).about()
    assert about == {"version": "8337e4cd3 (build 4840)", "built_with": "AVX2 kernels; -fa 1 -rtr 1"}


def test_what_llama_bench_cannot_do_is_named(program: str, tmp_path: Path) -> None:
    with pytest.raises(NoPeer, match=r"^llama-bench ended with exit code 1: .*failed to load model 'missing\.gguf'$"):
        ik_llama_cpp.start("missing.gguf", 64, 2, "f16", program).prompt_rate([5] * 8)
    with pytest.raises(NoPeer, match=r"nowhere/llama-bench does not exist$"):
        ik_llama_cpp.start("model.gguf", 64, 2, "f16", str(tmp_path / "nowhere" / "llama-bench"))
    with pytest.raises(NoPeer, match=r"^no-such-llama-bench cannot be started: No such file or directory$"):
        ik_llama_cpp.start("model.gguf", 64, 2, "f16", "no-such-llama-bench").prompt_rate([5] * 8)
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\n", encoding="utf-8")
    silent.chmod(0o755)
    with pytest.raises(NoPeer, match=r"^llama-bench has printed no figures$"):
        ik_llama_cpp.start("model.gguf", 64, 2, "f16", str(silent)).prompt_rate([5] * 8)


def test_a_program_ends_with_the_measurement_that_runs_it(tmp_path: Path) -> None:
    """Also during a run: nobody would read its figures."""
    lasting, pipe = tmp_path / "lasting", tmp_path / "pipe"
    os.mkfifo(pipe)
    lasting.write_text(f"#!/bin/sh\nexec > {pipe}\nsleep 10\necho survived\n", encoding="utf-8")
    lasting.chmod(0o755)
    child = Child("polarlm.bench.speed.peers.ik_llama_cpp")
    child.call("start", "model.gguf", 64, 1, "f16", str(lasting))
    child._process.tell(["prompt_rate", [[5] * 8]])
    with pipe.open(encoding="utf-8") as held:  # opens when the program runs
        child.close()
        assert held.read() == "", "its end closes the pipe"
