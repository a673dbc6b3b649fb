"""`python -m tests.replay_digest [--no-prompts] FOLDER` prints the digest of a model's replayable answers."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.test_replayable import digest

if __name__ == "__main__":
    print(digest(Path(sys.argv[-1]), with_prompts="--no-prompts" not in sys.argv))
