"""`python -m scripts.platform_report` tries on this machine what differs between systems, and writes one file to send.

It runs five things with the demonstration model, each in a process of its own, so that one that crashes or hangs is a
row of the report. The file names the machine, but no folders and no users.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.report import machine, slug, table, today
from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.calibration import TEXT_FILE
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders.demo import demo_model

_SECONDS = 900  # of each part, after which it counts as one that hangs
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_GREEDY = SamplingParams(temperature=0, max_tokens=16)
_PROMPT = 256  # tokens
_SCORED = 64  # tokens, which NumPy takes one by one
_STEPS = 64
_PACKAGES = ("numpy", "llvmlite", "tokenizers", "gguf", "uvicorn", "psutil")


def levels() -> dict[str, Any]:
    """The levels of instructions that this machine can run, whether each gives right results, and who links kernels."""
    import llvmlite.binding as llvm

    from polarlm.engine.backends.native import self_test
    from polarlm.engine.errors import KernelError
    from polarlm.engine.jit.compile import images, target

    found = {}
    for level in target.levels():
        try:
            self_test.check(level)
            found[level.name] = "right"
        except KernelError as error:
            found[level.name] = str(error)
    return {
        **{"levels": found, "linked by": "this program" if images.AVAILABLE else "LLVM"},
        **{"LLVM": ".".join(map(str, llvm.llvm_version_info)), "CPU": llvm.get_host_cpu_name()},
        "features": " ".join(sorted(target.host_features())),
    }


def answers() -> dict[str, Any]:
    """An answer by compiled kernels and by NumPy, and how far their log-probabilities of a text are apart."""
    compiled = Engine.load(None, device="cpu")
    alone = Engine(assemble(settle(None, None, {"device": "cpu"}), None, ops=NumpyOps(0)))
    ids = compiled.tokenize(TEXT_FILE.read_text(encoding="utf-8"))[:_SCORED]
    texts = [engine.chat(_QUESTION, _GREEDY).text for engine in (compiled, alone)]
    assert all("Paris" in text for text in texts), f"the answers are {texts}"
    ours, theirs = (engine.score(ids).logprobs for engine in (compiled, alone))
    return {
        "kernels": len(kernels.kernels) if (kernels := compiled.status().threads) else 0,
        "answers": texts,
        "largest difference of log-probabilities": round(float(np.abs(ours - theirs).max()), 5),
    }


def speed() -> dict[str, Any]:
    """Tokens per second of prompts and of steps, the fastest of three runs, with the default cache and with f16."""
    from polarlm.bench.speed.ours import Ours

    rng, found = np.random.default_rng(0), {}
    ids, following = (rng.integers(1000, 20_000, count).tolist() for count in (_PROMPT, _STEPS + 1))
    for cache in ("balanced", "f16"):
        ours = Ours(str(demo_model(None)), _PROMPT + 2 * _STEPS, 0, {"cache_type": cache})
        prompts = [ours.prompt_rate(ids) for _ in range(3)]
        steps = [ours.generation_rate(ids, following) for _ in range(3)]
        found[cache] = {"prompt": round(max(prompts), 1), "steps": round(max(steps), 1)}
        ours.close()
    return {f"tokens/s after {_PROMPT}": found}


def files() -> dict[str, Any]:
    """A session that is saved and loaded, blocks that a second engine finds on the disk, weights that it maps."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        settings = {
            **{"device": "cpu", "cache_disk": "1G", "cache_disk_folder": str(Path(folder) / "kept blocks")},
            "tile_cache": "1G",
        }
        first = Engine.load(None, **settings)
        ids = first.tokenize(TEXT_FILE.read_text(encoding="utf-8"))[:_PROMPT]
        first.generate(ids, _GREEDY)
        session = Path(folder) / "a session"
        saved = first.save_session(session)
        first.close()
        second = Engine.load(None, **settings)
        again = second.generate(ids, _GREEDY)
        assert again.usage.cached_from.get("disk"), "no block was found on the disk"
        second.close()
        third = Engine.load(None, device="cpu")
        assert len(third.load_session(session).token_ids) == saved
        assert third.generate(ids, _GREEDY).usage.cached_tokens > 0, "the loaded session was not used"
        third.close()
        return {"tokens of the session": saved, "found on the disk": again.usage.cached_from["disk"]}


def server() -> dict[str, Any]:
    """A server: two answers at the same time, one of them streamed, and its end."""
    import httpx

    from polarlm.bench.serving.process import own_server

    body = {"messages": _QUESTION, "max_tokens": 16, "temperature": 0}
    with own_server([]) as url, httpx.Client(base_url=url, timeout=_SECONDS) as http:
        health = http.get("/health").status_code
        with ThreadPoolExecutor(2) as pool:
            whole, streamed = pool.map(
                lambda stream: http.post("/v1/chat/completions", json={**body, "stream": stream}), (False, True)
            )
        text = whole.json()["choices"][0]["message"]["content"]
        events = streamed.text.count("data: ")
    assert health == 200, f"/health answers {health}"
    assert "Paris" in text, f"the answer is {text!r}"
    assert "[DONE]" in streamed.text, "the stream has no end"
    return {"answer": text, "events of the stream": events}


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    part.__name__: part for part in (levels, answers, speed, files, server)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a part has failed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.platform_report", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="the file; else polarlm-report-<system>-<date>.json, here")
    parser.add_argument("--part", choices=PARTS, help="run this part alone, in this process, and print its result")
    options = parser.parse_args(argv)
    if options.part:
        print(json.dumps(PARTS[options.part]()))
        return 0
    system = slug(f"{platform.system()} {platform.machine()}")
    output = options.output or Path(f"polarlm-report-{system}-{today()}.json")
    result: dict[str, Any] = {"machine": _machine(), "parts": {}}
    for number, name in enumerate(PARTS, 1):
        print(f"{number} of {len(PARTS)}: {name}", file=sys.stderr, flush=True)
        result["parts"][name] = run_part(name)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # what a crash leaves is of use
    parts = result["parts"]
    rows = [
        [name, "fails" if "failure" in part else "works", f"{part['seconds']:.0f} s"] for name, part in parts.items()
    ]
    print(table(["part", "result", "time"], rows))
    failures = {name: part["failure"] for name, part in parts.items() if "failure" in part}
    for name, failure in failures.items():
        print(f"{name}: {failure}")
    print(f"Written to {output}: please attach it to an issue, whatever it says.")
    return int(bool(failures))


def run_part(name: str, command: Sequence[str] = (sys.executable, "-m", "scripts.platform_report")) -> dict[str, Any]:
    """The "result" of a part, or its "failure" as a line; and the "seconds" that it took."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--part", name], capture_output=True, text=True, encoding="utf-8", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"hangs: it was ended after {_SECONDS} s", "seconds": time.monotonic() - began}
    seconds = round(time.monotonic() - began, 1)
    if done.returncode == 0:
        return {"result": json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
    return {"failure": without_folders(f"exit code {done.returncode}: {said[-1]}"), "seconds": seconds}


def without_folders(text: str, home: str | None = None) -> str:
    r"""`text` with "~" in the place of the user's home folder, which has a name in it, however it is written.

    >>> without_folders("cannot open C:/users/jane doe/x.gguf", r"C:\Users\Jane Doe")
    'cannot open ~/x.gguf'
    """
    home = str(Path.home()) if home is None else home
    spellings = home.replace("\\", "\\\\"), home, home.replace("\\", "/")  # in quotes of Python, as it is, in a URL
    return re.sub("|".join(map(re.escape, spellings)), "~", text, flags=re.IGNORECASE)


def _machine() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {**machine(), "release": platform.release(), "byte order": sys.byteorder, "packages": packages}


if __name__ == "__main__":
    sys.exit(main())
