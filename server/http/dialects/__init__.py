"""APIs other than OpenAI's older ones, one module each: every file `dialects/NAME.py` is served.

Such a module defines
- `PATHS`: the first parts of its paths, such as "/api"; every error there has its shape;
- `error_body(error)`: an ApiError in that shape;
- `routes(driver)`: its endpoints. One that generates is a `Generation` with an `Endpoint` of the module, which turns
  the body of a request into our own names (`server.reading.parameters`) and returns a writer of the API's shapes.
Modules that begin with an underscore are helpers. A dialect does not import another dialect.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def dialects() -> tuple[Any, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in names)
