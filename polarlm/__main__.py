"""`python -m polarlm`."""

import sys

from polarlm.command import main

if __name__ == "__main__":
    sys.exit(main())
