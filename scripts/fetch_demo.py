"""`python -m scripts.fetch_demo` downloads the demonstration model into the cache folder, unless it is there.

Exit code 1, with a message, if that fails.
"""

from __future__ import annotations

import sys

from polarlm.model_loaders import LoadError
from polarlm.model_loaders.demo import demo_model


def main() -> int:
    try:
        demo_model(lambda sentence: print(sentence, file=sys.stderr))
    except LoadError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
