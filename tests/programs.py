"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def output_of(*command: object, folder: Path = ROOT, **variables: str | None) -> str:
    """What a command prints, which has to succeed. variables: of its environment; None takes one away."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
