"""The model of a chat that names none: asked for once at a terminal and kept in a file, else the demonstration."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from polarlm.model_loaders.demo import FILE_BYTES
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import state_folder

CHOICES = (
    ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "answers everyday questions"),
    ("Qwen/Qwen3-4B-GGUF:Q4_K_M", "writes, explains and programs well, on a GPU or with patience"),
)
_SECONDS = 4.0  # for the hub, since a network may drop what is sent, and a chat begins
_DEMO = "the demonstration: fast, and often wrong"
_BETTER = (
    "This is a small model for a demonstration. A better one is one command away: polarlm chat "
    f"{CHOICES[0][0].partition(':')[0]}, or any other USER/REPO of huggingface.co that polarlm fit USER/REPO says fits."
)


def remembered_name() -> str | None:
    """The model that was chosen; None for the demonstration model, or if none was."""
    return _read("model") or None


def forget(name: str) -> None:
    """Choose no model, if this one is chosen."""
    if remembered_name() == name:
        _write("model", "")


def choose(tell: Callable[[str], None], ask: Callable[[str], str]) -> str | None:
    """The model that was chosen, or is chosen now among three, if nobody was asked before; None for the demonstration
    model. The hub says how large models are; without it a later chat asks. Raises EOFError or KeyboardInterrupt."""
    from polarlm.model_loaders.hub.choice import size_text

    if _read("model") is not None:
        return remembered_name()
    if (sizes := _sizes()) is None:
        return None  # the first answer is followed by what to do
    rows = [*zip((*CHOICES, ("SmolLM2-135M", _DEMO)), (*sizes, FILE_BYTES), strict=True)]
    tell("Which model should answer? You are asked once; polarlm chat MODEL takes any other.")
    for number, ((name, meaning), size) in enumerate(rows, 1):
        tell(f"  {number}  {name.partition(':')[0]:22} {size_text(size):>9}  {meaning}")
    while (answer := ask("1, 2 or 3 (Enter takes 1): ").strip() or "1") not in ("1", "2", "3"):
        tell(f"{answer} is none of 1, 2 and 3.")
    choice = [*(name for name, _ in CHOICES), ""][int(answer) - 1]
    _write("model", choice)
    return choice or None


def better() -> str | None:
    """How to get a better model than the demonstration, the first time that this is asked; else None."""
    if _read("told") is not None:
        return None
    _write("told", "")
    return _BETTER


def _sizes() -> list[int] | None:
    """Bytes of the choices; None if the hub does not say them in time."""
    from polarlm.model_loaders import hub

    results: list[list[int]] = []

    def look() -> None:
        with suppress(LoadError):
            results.append([hub.size(hub.parse(name)) for name, _ in CHOICES])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return results[0] if results else None


def _file(name: str) -> Path | None:
    folder = state_folder()
    return None if folder is None else folder / name


def _read(name: str) -> str | None:
    """What a file of the state folder says; None if there is none."""
    file = _file(name)
    with suppress(OSError, UnicodeDecodeError):
        return None if file is None else file.read_text(encoding="utf-8").strip()
    return None


def _write(name: str, text: str) -> None:
    file = _file(name)
    with suppress(OSError):
        if file is not None:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
