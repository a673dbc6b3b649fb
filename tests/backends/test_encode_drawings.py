"""The drawings of encoding name the files of their folders, and nothing that is not there."""

import re
from pathlib import Path

import pytest

from polarlm.engine.backends.cuda.device.kernel_source import folder
from polarlm.engine.backends.native.kernels import encode


@pytest.mark.parametrize("place", [folder() / "encode", Path(encode.__path__[0])], ids=["cuda", "native"])
def test_a_drawing_names_what_is_in_the_folder(place: Path) -> None:
    readme = (place / "README.md").read_text(encoding="utf-8")
    files = {file.name: file.read_text(encoding="utf-8") for file in place.glob("*.*") if file.suffix != ".md"}
    assert {name for name in files if name not in readme} <= {"__init__.py"}
    assert {name for name in re.findall(r"\w+\.(?:cuh?|py)\b", readme) if name in files} == {*files} - {"__init__.py"}
    names = re.findall(r"\b\w*_\w+\b", readme.split("```")[1])
    assert names
    code = "".join([*files.values(), *files])
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
