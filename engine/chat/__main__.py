"""`python -m polarlm.engine.chat`."""

import sys

from polarlm.engine.chat.config import CHECKS, GROUPS
from polarlm.engine.chat.terminal import main

__all__ = ["CHECKS", "GROUPS", "main"]

if __name__ == "__main__":
    sys.exit(main())
