"""A file is found in every spelling of a data URL that programs write."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from polarlm.engine.data_urls import file_in
from polarlm.server.reading.parts import image_in

FILE = b"\x89PNG\r\n\x1a\n\xfb\xef\xff?>" + bytes(range(250, 256)) * 2  # its base64 has + and /, and padding
DATA = base64.b64encode(FILE).decode()
SPELLINGS = {
    "alone": DATA,
    "usual": f"data:image/png;base64,{DATA}",
    "capitals": f"DATA:image/PNG;BASE64,{DATA}",
    "another type": f"data:image/jpg;base64,{DATA}",
    "no type": f"data:;base64,{DATA}",
    "parameters": f"data:image/png;charset=utf-8;name=a.png;base64,{DATA}",
    "a comma in a name": f'data:image/png;name="a,b.png";base64,{DATA}',
    "a parameter behind": f"data:image/png;base64;name=a.png,{DATA}",
    "spaces in the head": f" data:image/png; charset=utf-8 ;base64, {DATA}\n",
    "lines": f"data:image/png;base64,\n{DATA[:8]}\r\n{DATA[8:]}\n",
    "no padding": f"data:image/png;base64,{DATA.rstrip('=')}",
    "too much padding": f"data:image/png;base64,{DATA}==",
    "of URLs": f"data:image/png;base64,{base64.urlsafe_b64encode(FILE).decode()}",
    "percent signs": f"data:image/png;base64,{quote(DATA, safe='')}",
    "no base64": f"data:image/png,{quote(FILE)}",
    "no mark of base64": f"data:image/png,{DATA}",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_file_in_a_data_url(name: str) -> None:
    assert "+" in DATA
    assert "/" in DATA
    assert image_in("messages[0]", {"type": "image_url", "image_url": {"url": SPELLINGS[name]}}) == FILE


@pytest.mark.parametrize("wrong", ["data:image/png;base64,*", "data:image/png;base64", "data:image/png;base64,A", "é"])
def test_what_is_no_data(wrong: str) -> None:
    with pytest.raises(ValueError):
        file_in(wrong)
