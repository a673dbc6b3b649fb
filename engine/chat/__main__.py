"""`python -m engine.chat`."""

import sys

from polarlm.engine.chat.terminal import main

if __name__ == "__main__":
    sys.exit(main())
