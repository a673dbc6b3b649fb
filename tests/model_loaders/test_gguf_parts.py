"""GGUF files in parts: one model, opened by its first part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polarlm.model_loaders import LoadError, load, load_weights
from tests.model_loaders.checkpoints import read_all
from tests.random_model import random_model, write_in_parts

NAMES = [f"random-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
Parts = list[Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("whole"))


def write(whole: Path, folder: Path, tensors: int) -> Parts:
    """The parts of a model, in a new folder."""
    folder.mkdir()
    write_in_parts(folder / "random-Q8_0.gguf", whole, tensors)
    return sorted(folder.iterdir())


def test_parts_are_the_same_model_as_a_whole_file(whole: Path, tmp_path: Path) -> None:
    parts = write(whole, tmp_path / "parts", 8)
    assert [part.name for part in parts] == NAMES
    expected_config, expected, _ = load_weights(whole)
    config, weights, dtype = load_weights(parts[0])
    assert (config, dtype, weights.names()) == (expected_config, "Q8_0", expected.names())
    joined = read_all(weights)
    for name, values in read_all(expected).items():
        np.testing.assert_array_equal(joined[name], values)


def cut_off(parts: Parts, whole: Path, more: list[Parts]) -> Path:
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    return parts[0]


# What happens to the parts, given also the whole file and the parts of other divisions; and the sentence.
BROKEN: dict[str, tuple[Callable[[Parts, Path, list[Parts]], object], str]] = {
    "missing": (lambda parts, whole, more: parts[2].unlink(), "{2} is missing: " + NAMES[0] + " has 3 parts; download"),
    "a later one": (lambda parts, whole, more: parts[1], "{1} is part 2 of 3; give the first one, {0}."),
    "another name": (
        lambda parts, whole, more: parts[0].rename(parts[0].with_name("model.gguf")),
        "is part 1 of 3, but its name does not say so; give it the name that it was published under, which ends with "
        "-00001-of-00003.gguf.",
    ),
    "another place": (lambda parts, whole, more: shutil.copy(parts[2], parts[1]) and None, "{1} does not belong to"),
    # The last tensors of the second part are those that the third part begins with.
    "another division": (lambda parts, whole, more: shutil.copy(more[0][1], parts[1]) and None, "{2} does not belong"),
    "of two": (lambda parts, whole, more: shutil.copy(more[1][1], parts[1]) and None, "{1} does not belong to"),
    "a whole file": (lambda parts, whole, more: shutil.copy(whole, parts[1]) and None, "{1} does not belong to"),
    "cut off": (cut_off, "{1} is truncated"),
}


def test_parts_that_do_not_fit_are_named(whole: Path, tmp_path: Path) -> None:
    others = [write(whole, tmp_path / f"by {tensors}", tensors) for tensors in (9, 12)]
    for number, (change, sentence) in enumerate(BROKEN.values()):
        parts = write(whole, tmp_path / str(number), 8)
        path = change(parts, whole, others)
        with pytest.raises(LoadError) as caught:
            load(path or parts[0])
        assert sentence.format(*parts) in str(caught.value)
