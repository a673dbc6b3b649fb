"""`python -m tests.replay_digest [--no-prompts] FOLDER`: compares machines by a model's
replayable answers, whose digest it prints."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.test_replayable import SETTINGS, alone, cases
from tests.tiny import load_tiny


def digest(folder: Path, *, with_prompts: bool, requests: int = 6) -> str:
    asked = cases(np.random.default_rng(5), requests)
    if not with_prompts:
        asked = [replace(one, params=replace(one.params, prompt_logprobs=None)) for one in asked]
    with load_tiny(folder, **SETTINGS) as engine:
        answers = [alone(engine, case) for case in asked]
    return hashlib.sha256(repr(answers).encode()).hexdigest()


if __name__ == "__main__":
    print(digest(Path(sys.argv[-1]), with_prompts="--no-prompts" not in sys.argv))
