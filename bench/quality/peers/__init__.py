"""Cache types of other projects as references in NumPy, to compare with ours: one file each, from what they publish.

They are codecs as in `engine.codecs`, but no engine has them: they are known only `while_measured`. As others
publish them, they have no conditioning: `polarlm quality text.txt --types nvfp4:plain`. The first block of a
sequence is in full precision with every type, also where its project codes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules

from polarlm.engine import codecs

_MODULES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
NAMES = tuple(name for module in _MODULES for name in module.NAMES)


@contextmanager
def while_measured() -> Iterator[None]:
    """Let `codecs.get` make these types."""
    with codecs.more_types(_MODULES):
        yield
