"""The README and docs/ say what the command line and the measurements say."""

from __future__ import annotations

import pytest

from scripts import make_quality_table
from scripts.make_flag_table import BEGIN, DOCUMENT, END, with_table
from scripts.make_quality_table import TABLES, newest, with_tables

SPEED = make_quality_table.ROOT / "docs" / "speed.md"


def test_the_table_of_flags_is_current():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_table(text), "run `make readme`"


@pytest.mark.parametrize("document", TABLES, ids=lambda path: path.name)
def test_the_tables_of_costs_are_what_was_measured(document):
    text = document.read_text(encoding="utf-8")
    assert text == with_tables(text, TABLES[document]), "run `make readme`"


def test_a_missing_table_is_named():
    with pytest.raises(SystemExit, match="flags"):
        with_table("# A README without marks\n")
    with pytest.raises(SystemExit, match="<!-- costs -->"):
        with_tables("# A README without marks\n", {"costs": str})


def test_only_the_table_changes():
    text = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert text.startswith(f"before\n{BEGIN}\n| Flag |")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert with_table(text) == text


def test_steps_of_many_sequences_are_as_fast_as_the_document_says():
    measured = newest("speed-*-batches")
    one, eight, sixteen = (
        figure["ours"]["median"] for figure in measured["figures"] if figure["name"].startswith("steps of ")
    )
    text = " ".join(SPEED.read_text(encoding="utf-8").split())
    assert f"8 of them make {eight:.0f} tokens/s together and 16 make {sixteen:.0f}, where one makes {one:.0f}" in text
    assert f"{eight / one:.1f} and {sixteen / one:.1f} times as many" in text
    assert measured["date"] in text
    assert f"`{measured['command']}`" in text


def test_the_parts_of_encoding_are_worth_what_the_document_says():
    whole, *_, none = (row["kl_mean"] for row in newest("ablation-*")["rows"] if row["scored_as"] == "as served")
    text = " ".join(make_quality_table.DOCUMENT.read_text(encoding="utf-8").split())
    assert f"cut KL to {whole / none:.0%}".replace("%", " %") in text


def test_the_headline_is_what_the_default_costs():
    rows = newest(f"quality-{make_quality_table.DEMO}")
    (default,) = (r for r in rows["rows"] if (r["type"], r["scored_as"]) == ("ring4/ring3.5", "as served"))
    more = 100 * (default["perplexity"] / rows["exact_perplexity"] - 1)
    text = " ".join(make_quality_table.README.read_text(encoding="utf-8").split())
    assert f"raises perplexity by {more:.1f} %" in text
    assert 3.9 < default["bits_per_value"] < 4.1
