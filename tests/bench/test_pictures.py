"""The picture on a page of quality."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from polarlm.bench.quality.pictures import pictures_of
from polarlm.bench.quality.scores import contestant
from polarlm.bench.result import Result


def test_types_as_published_are_hollow_and_every_type_is_named() -> None:
    """Fewer bits are further to the left, and a larger KL is further up."""
    types = [("f16", 16.0, 1e-7), ("polarquant", 4.0, 0.01), ("polarquant:plain", 3.875, 0.04), ("ring4", 4.125, 0.005)]
    result = Result({"types": {}})
    for type, bits, kl in types:
        for scoring, times in (("as served", 1), ("every token coded", 4)):
            who = contestant(type, scoring)
            result["types"][who] = {"type": type, "pair": type.removesuffix(":plain"), "scored_as": scoring}
            result.add_all("text", who, {"bits_per_value": bits, "kl_mean": kl * times})
    (svg,) = pictures_of(result).values()
    _, served, coded, *legend = ElementTree.fromstring(svg)  # after the name of the axis
    assert [group.find("text").text for group in legend] == [type for type, *_ in types[1:]]  # type: ignore[union-attr]
    marks = [group.find("path").attrib for group in legend]  # type: ignore[union-attr]
    assert [mark["fill"] == "none" for mark in marks] == [False, True, False]
    assert len({mark["d"] for mark in marks}) == 3
    assert marks[0]["stroke"] == marks[1]["stroke"] != marks[2]["stroke"]
    for panel in (served, coded):
        assert [group.find("path").attrib for group in panel.findall("g")] == marks  # type: ignore[union-attr]
        places = [re.findall(r"[\d.]+", group.attrib["transform"]) for group in panel.findall("g")]
        (x, y), (x_plain, y_plain), (x_ring, y_ring) = (map(float, place) for place in places)
        assert x_plain < x < x_ring
        assert y_plain < y < y_ring
