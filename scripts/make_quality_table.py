"""Writes the README's table of what cache types cost, between its `<!-- quality -->` marks, from bench/results."""

import json
from pathlib import Path

from engine.kv.cache_types import PRESETS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- quality -->", "<!-- /quality -->"
SERVED, CODED = "as served", "every token coded"


def newest() -> Path:
    """The latest measurement of the demonstration model."""
    return max((ROOT / "bench" / "results").glob("quality-smollm2-135m-instruct-????-??-??.json"))


def quality_table(measured: dict) -> str:
    """A Markdown table with a line per cache type, fewest bits first, and the command that measured it."""
    presets = {"/".join(dict.fromkeys(types)): name for name, types in PRESETS.items()}
    rows: dict[str, dict[str, dict]] = {}
    for row in measured["rows"]:
        rows.setdefault(row["type"], {})[row["scored_as"]] = row
    exact = measured["exact_perplexity"]
    lines = [
        "| Keys/values | bits/value | perplexity, KL as served | perplexity, KL, every token coded |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: item[1][SERVED]["bits_per_value"]):
        preset = f" = **{presets[name]}**" if name in presets else ""
        published = name.removesuffix(":plain")
        label = f"`{published}`{preset}" + (", as published" if published != name else "")
        cells = (f"{row[SERVED]['bits_per_value']:.3f}", _cost(row[SERVED], exact), _cost(row[CODED], exact))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    text = (
        f"{measured['model']} on {measured['text']}, {measured['windows']} windows of {measured['window']:,} tokens, "
        f"perplexity {exact:.2f} in full precision; measured on {measured['date']} with\n"
        f"`{measured['command']}`."
    )
    return "\n".join([*lines, "", text])


def _cost(row: dict, exact: float) -> str:
    return f"{100 * (row['perplexity'] / exact - 1):+.1f} %, {row['kl_mean']:.2g}"


def with_table(text: str) -> str:
    """`text` with the current table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{quality_table(json.loads(newest().read_text()))}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
