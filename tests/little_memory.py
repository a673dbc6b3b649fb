"""A process that has little private memory, and loads a model in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """
import gc, json, resource, sys
from polarlm.engine import Engine, EngineError, SamplingParams
path, room, first, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
settings |= dict(device="cpu", threads=1, ctx_size=64, parallel=1, kept_sequences=0, calibration=False)
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
with Engine.load(path, **{**settings, **first}) as engine:  # libraries and kernels are loaded
    engine.generate([5, 6, 7], params)
gc.collect()  # the first engine's weights, which would otherwise be freed only later
(data,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
limit = int(data.split()[1]) * 1024 + (room << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    with Engine.load(path, **settings) as engine:
        print(engine.generate([5, 6, 7], params).token_ids)
except EngineError as error:
    print(error)
"""


def answer_in(room: int, path: Path, first: dict[str, Any], **settings: Any) -> str:
    """The ids of an answer, or an error's sentence, of a model that is loaded where `room` MiB of private memory are
    left to what a process has that has loaded it before with the settings `first`, which `settings` replace."""
    with_first = json.dumps(first), json.dumps({**first, **settings})
    command = [sys.executable, "-c", _PROGRAM, str(path), str(room), *with_first]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
