"""The README and docs/ say what the command line and the measurements say."""

import pytest

from scripts import make_quality_table
from scripts.make_flag_table import BEGIN, DOCUMENT, END, with_table


def test_the_table_of_flags_is_current():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_table(text), "run `make readme`"


def test_the_table_of_costs_is_what_was_measured():
    text = make_quality_table.README.read_text(encoding="utf-8")
    assert text == make_quality_table.with_table(text), "run `make readme`"


def test_a_missing_table_is_named():
    with pytest.raises(SystemExit, match="flags"):
        with_table("# A README without marks\n")


def test_only_the_table_changes():
    text = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert text.startswith(f"before\n{BEGIN}\n| Flag |")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert with_table(text) == text
