"""GGUF files in parts: one model, opened by its first part."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from polarlm.model_loaders import LoadError, load, load_weights
from tests.model_loaders.checkpoints import read_all
from tests.random_model import random_model, write_in_parts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def first(whole: Path, tmp_path: Path) -> Path:
    """The first of three parts."""
    path = write_in_parts(tmp_path / "random-Q8_0.gguf", whole, 8)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"random-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)
    ]
    return path


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load(path)
    return str(caught.value)


def later(first: Path, part: int) -> Path:
    return first.with_name(f"random-Q8_0-0000{part}-of-00003.gguf")


def test_parts_are_the_same_model_as_a_whole_file(whole: Path, first: Path) -> None:
    _, expected, _ = load_weights(whole)
    config, weights, dtype = load_weights(first)
    found = read_all(weights)
    assert {name: found[name].shape for name in found} == {name: expected.shape(name) for name in expected.names()}
    for name, values in read_all(expected).items():
        np.testing.assert_array_equal(found[name], values)
    assert (config, dtype) == (load_weights(whole)[0], "Q8_0")
    weights.close()
    expected.close()


def test_a_part_that_is_missing_is_named(first: Path) -> None:
    later(first, 3).unlink()
    assert refusal(first) == f"{later(first, 3)} is missing: {first.name} has 3 parts; download them all."


def test_a_later_part_names_the_first(first: Path) -> None:
    assert refusal(later(first, 2)) == f"{later(first, 2)} is part 2 of 3; give the first one, {first}."


def test_a_part_under_another_name_is_told_the_right_one(first: Path) -> None:
    other = first.rename(first.with_name("model.gguf"))
    assert "is part 1 of 3, but its name does not say so; give it the name" in refusal(other)
    assert "ends with -00001-of-00003.gguf" in refusal(other)


def test_a_part_of_another_place_is_noticed(first: Path) -> None:
    shutil.copy(later(first, 3), later(first, 2))
    assert refusal(first) == f"{later(first, 2)} does not belong to {first.name}; download both again."


def test_a_part_of_another_division_is_noticed(whole: Path, first: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_in_parts(tmp_path / "other" / first.name.replace("-00001-of-00003", ""), whole, 9)
    shutil.copy(later(other, 2), later(first, 2))  # its last tensors are those that the third part begins with
    assert refusal(first) == f"{later(first, 3)} does not belong to {first.name}; download both again."
    (tmp_path / "two").mkdir()
    two = write_in_parts(tmp_path / "two" / "random-Q8_0.gguf", whole, 12)
    shutil.copy(two.with_name("random-Q8_0-00002-of-00002.gguf"), later(first, 2))
    assert refusal(first) == f"{later(first, 2)} does not belong to {first.name}; download both again."


def test_a_whole_file_in_the_place_of_a_part_is_noticed(whole: Path, first: Path) -> None:
    shutil.copy(whole, later(first, 2))
    assert "does not belong to" in refusal(first)


def test_a_part_that_is_cut_off_is_noticed(first: Path) -> None:
    content = later(first, 2).read_bytes()
    later(first, 2).write_bytes(content[:-100])
    assert f"{later(first, 2)} is truncated" in refusal(first)
