"""Writes the generated parts of the documents, between their marks, from the code.

    python -m scripts.docs

A part lies between `<!-- name -->` and `<!-- /name -->`; PARTS says what writes it. `bench.lab.tables` writes tables of
measurements. `tests/test_documents.py` fails if a document is not what both write. Then it prints how many lines the
house has, room by room, beside its ceilings.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from polarlm.engine import codecs
from polarlm.engine.chat.config import GROUPS
from polarlm.engine.cli.flags import IGNORED, describe
from polarlm.engine.config import EngineConfig
from polarlm.engine.params import SamplingParams
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.families import families
from polarlm.server.config import ServerConfig
from polarlm.server.reading.fields import FIELDS, RULES, Field

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"<!-- ([\w -]+) -->\n.*?<!-- /\1 -->", re.DOTALL)


def table(header: str, rows: list[str]) -> str:
    """A Markdown table; header and rows: cells with " | " between them."""
    line = "---|" * (header.count(" | ") + 1)
    return "\n".join([f"| {header} |", f"|{line}", *(f"| {row} |" for row in rows)])


# -- settings --------------------------------------------------------------------------------------------------------


def flags() -> str:
    """A row for each flag, in the order and the groups of `--help`."""
    rows = []
    for title, config in {**GROUPS, "Server (`make serve`)": ServerConfig}.items():
        rows.append(f"**{title}** | ")
        rows += [f"`{_cell(names)}` | {_cell(meaning)}" for names, meaning in describe(config)]
    rows.append("**Flags of llama.cpp without effect** | ")
    rows += [f"`{' '.join((', '.join(names), value)).strip()}` | {why}" for names, (value, why) in IGNORED.items()]
    return table("Flag | Meaning", rows)


def settings(config: type) -> str:
    """A row for each field of a dataclass that is no flag by its name: the name, its default, its meaning."""
    flags = {name.strip() for names, _ in describe(config) for name in re.split("[, ]", names)}
    rows = []
    for field in fields(config):
        if f"--{field.name.replace('_', '-')}" in flags:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        prefix = "`False`: " if default is True else ""  # the help describes a flag that switches the field off
        # Parts of the help that are about the command line alone.
        meaning = re.sub("(, as in 42.*)?; may be repeated", "", _cell(field.metadata["help"]))
        meaning = re.sub("--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", meaning)
        rows.append(f"`{field.name}` | `{default!r}` | {prefix}{meaning}")
    return table("Field | Default | Meaning", rows)


def _cell(text: str) -> str:
    """The text of a cell: vertical bars are escaped, which would end the cell even inside a code span."""
    return text.replace("|", "\\|")


def request_fields(standing: str, about: str) -> str:
    """A row for each field of a request that has this standing, or for several of which the same is said."""
    said: dict[str, list[Field]] = {}
    for field in FIELDS.values():
        if field.treatment == standing:
            said.setdefault(field.sentence, []).append(field)
    rows = []
    for sentence, each in said.items():
        names = ", ".join(f"`{field.name}`" for field in each)
        apis = ", ".join(dict.fromkeys(api for field in each for api in field.apis.split(", ")))
        values = {field.name: text for field in each if (text := _neutral_values(field))}
        same = len(values) == len(each) and len({*values.values()}) == 1
        neutral = [next(iter(values.values()))] if same else [f"`{name}`: {text}" for name, text in values.items()]
        rows.append(f"{names} | {apis} | {sentence} | {'; '.join(neutral)}")
    return table(f"Field | Known to | {about} | Values that ask for nothing", rows)


def _neutral_values(field: Field) -> str:
    rule = RULES.get(field.name)
    return rule.text if rule else " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)


# -- models and cache types ------------------------------------------------------------------------------------------


def model_families() -> str:
    """A row for each family: the first sentence of its file."""
    rows = []
    for name in sorted(families()):
        text = (ROOT / "model_loaders" / "families" / f"{name}.py").read_text(encoding="utf-8")
        sentence = " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
        family, _, what = sentence.partition(": ")
        rows.append(f"{family} | `{name}` | {what.split('. ')[0].rstrip('.')}")
    return table("Models | `model_type` | What its layers have", sorted(rows, key=str.lower))


BLOCK, MEAN_BITS = EngineConfig().block_size, 8
SIDES = {"k": "keys", "v": "values"}


def bits() -> str:
    """A row for each codec: the sides that it stores, and its bits."""
    rows = []
    for name in codecs.available():
        codec = codecs.get(name)
        sides = " and ".join(side for letter, side in SIDES.items() if letter in codec.serves)
        values = [f"{codecs.bits_per_value(codec, BLOCK, head_dim):.3f}" for head_dim in (128, 64)]
        rows.append(f"`{name}` | {sides} | {' | '.join(values)}")
    return table("Type | Stores | bits/value, D = 128 | D = 64", rows)


def presets() -> str:
    """A row for each preset: its types, and its bits in texts of some lengths, with heads of 128."""
    rows = []
    for name, preset in PRESETS.items():
        keys, values, recent = codecs.get(preset.keys), codecs.get(preset.values), preset.recent_blocks
        shape = CacheShape(BLOCK, (LayerShape(keys, values, 1, 128, MEAN_BITS, recent_blocks=recent),))
        bits = [f"{shape.bits_of_text(tokens):.2f}" for tokens in (2048, 8192, 32768)]
        older = "/".join(dict.fromkeys(preset[:2]))
        rows.append(f"`{name}` | {recent * BLOCK} | `{older}` | {' | '.join(bits)}")
    return table("Preset | newest tokens in full precision | older | bits/value of 2,048 tokens | 8,192 | 32,768", rows)


# -- the lines of a step and of a prompt -----------------------------------------------------------------------------

# (file below engine/, first and last definition, what happens there). A definition is a function, or CLASS.METHOD.
STEP = (
    ("requests/batches.py", "Batches.open_step", "Batches._commit", "rows of all requests: open, compute, commit"),
    ("state/store.py", "KVStore.open_step", "KVStore.open_step", "the store opens a place for a token's K/V"),
    ("model/forward.py", "Transformer._run", "Transformer._embed", "embedding, layers, logits, a token"),
    ("model/decoder.py", "DecoderLayer", "_compute_chunk", "the loop over the layers: mixer and feed-forward network"),
    ("model/layers/attention.py", "Attention.project", "Attention.mix", "queries, keys, values, projection"),
    ("backends/numpy/ops.py", "NumpyOps.append_kv", "NumpyOps.attention", "keys and values go to their block"),
    ("backends/numpy/attention.py", "attend_sequence", "read_blocks", "attention over codes and full-precision blocks"),
    ("codecs/parts/pair_codec.py", "PairCodec.dequantize", "PairCodec.dequantize", "codes become pairs of values"),
    ("model/layers/gated_mlp.py", "GatedMLP.add", "GatedMLP.add", "the feed-forward network"),
    ("sampling/sample.py", "sample_all", "Candidates", "logits become a token"),
    ("state/store.py", "KVStore.commit_steps", "KVStore._encode_filled", "the token counts, an old block is encoded"),
    ("requests/request.py", "Request.take", "Request._take", "the token becomes text"),
)
# Without what STEP has already.
PROMPT = (
    ("requests/runner.py", "Runner.run_unit", "Runner._next_batch", "a unit of work: the next batch"),
    ("requests/prefills.py", "Prefills.open", "Prefills._longest_prefix", "what the store has of the prompt"),
    ("requests/plan.py", "plan_of", "plan_of", "its plan: what it lacks, and how that is computed"),
    ("requests/batches.py", "Batches.open_prompts", "Batches._sample", "rows of what is missing, in chunks"),
    ("state/store.py", "KVStore.open_batch", "KVStore._open", "the store opens a place for all their K/V"),
    ("state/kv_blocks.py", "KVBlocks.open", "KVBlocks._copy", "a buffer of a layer's K/V; what stays, what is encoded"),
    ("model/forward.py", "Transformer.chunks", "Transformer.chunks", "embedding, layers"),
    ("model/decoder.py", "cut", "PromptRows.project", "the rows of a chunk, and the end of a layer"),
    ("state/store.py", "KVStore.begin_layer", "KVStore._seal", "a layer's K/V are kept once all rows have them"),
    ("quantization/encode.py", "encode_with_metric", "encode_centred", "keys lose their mean; codes of least cost"),
    ("codecs/parts/pair_codec.py", "PairCodec.norms", "PairCodec.quantize", "pairs of values become codes"),
    ("requests/sampler.py", "Sampler.next", "Sampler.next", "what the token after the last row is drawn with"),
)
WALKS = {"step": STEP, "prompt": PROMPT}


def places(walk: str) -> list[tuple[str, int, int, str]]:
    """(file, first and last line, what happens there) of each place. Raises LookupError for what is not there."""
    found = []
    for file, first, last, what in WALKS[walk]:
        path = ROOT / "engine" / file
        lines = _definitions(ast.parse(path.read_text(encoding="utf-8") if path.exists() else ""))
        for name in {first, last} - lines.keys():
            raise LookupError(f"{walk.upper()} in scripts/docs.py names {name}: engine/{file} does not define it")
        found.append((file, lines[first][0], lines[last][1], what))
    return found


def lines_of(walk: str) -> str:
    """A line for each place of a walk, with its first and last line, and the number of lines in all."""
    texts, total = [], 0
    for number, (file, begin, end, what) in enumerate(places(walk), 1):
        total += end - begin + 1
        texts.append(f"{number}. [`engine/{file}`](engine/{file}#L{begin}-L{end}), lines {begin}–{end}: {what}")
    return "\n".join([*texts, "", f"{total} lines in {len(texts)} places."])


def _definitions(tree: ast.AST, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Name of a definition → its first and last line."""
    places: dict[str, tuple[int, int]] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            places[prefix + node.name] = first, node.end_lineno or node.lineno
            places |= _definitions(node, f"{prefix}{node.name}.")
    return places


# Kind → the folder that has a file for each, what its text matches, and the most lines of a new one.
_EXPERTS = r"families\._(experts|latent) import"
PRICES = {
    "a dense family": ("model_loaders/families", rf"(?!.*{_EXPERTS})", 20),
    "a family with experts": ("model_loaders/families", f".*{_EXPERTS}", 45),
    "a weight format": ("engine/weight_formats", "", 16),
    "a pair codec": ("engine/codecs", "", 160),
}


def prices() -> str:
    """A row for each kind of file: what a new one may have, and what those have that are there."""
    rows = []
    for kind, (folder, form, most) in PRICES.items():
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("[!_]*.py")]
        lines = sorted(text.count("\n") for text in texts if re.match(form, text, re.DOTALL))
        within = sum(count <= most for count in lines)
        rows.append(f"{kind} | {most} | {len(lines)} | {within} | {lines[len(lines) // 2]} | {lines[-1]}")
    return table("A file of | lines at most | files in the folder | within it | median | longest", rows)


# -- the lines of the house ------------------------------------------------------------------------------------------

CEILINGS = ROOT / "scripts" / "ceilings.json"
"""The most lines that product and tests may have."""
PRODUCT = ("engine", "cuda", "model_loaders", "server", "bench", "scripts")
SOURCES = {".py", ".cu", ".cuh", ".js", ".css", ".html"}


def lines_of_rooms() -> dict[str, dict[str, int]]:
    """ "product" and "tests" → room → its lines: of sources, without what is vendored."""
    lines: dict[str, dict[str, int]] = {"product": {}, "tests": {}}
    for folder in (*PRODUCT, "tests"):
        rooms = lines["tests" if folder == "tests" else "product"]
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if path.suffix in SOURCES and "vendor" not in inside:
                room = "/".join(inside[:-1][:2])
                rooms[room] = rooms.get(room, 0) + path.read_text(encoding="utf-8").count("\n")
    return lines


def report_lines() -> str:
    """A line for each room, and for product and tests their sum and their ceiling."""
    ceilings, text = json.loads(CEILINGS.read_text(encoding="utf-8")), []
    for half, rooms in lines_of_rooms().items():
        text += [f"{room:32}{count:8,}" for room, count in rooms.items()]
        text.append(f"{half:32}{sum(rooms.values()):8,} of at most {ceilings[half]:,}")
    return "\n".join(text)


PARTS: Mapping[str, Callable[[], str]] = {
    "prices": prices,
    "flags": flags,
    "settings": lambda: settings(EngineConfig),
    "sampling": lambda: settings(SamplingParams),
    "honoured": lambda: request_fields("honoured", "What it does, and its default"),
    "harmless": lambda: request_fields("harmless", "Why it changes nothing"),
    "ignored": lambda: request_fields("ignored", "Why"),
    "refused": lambda: request_fields("refused", "Why it is refused"),
    "step": lambda: lines_of("step"),
    "prompt": lambda: lines_of("prompt"),
    "families": model_families,
    "bits": bits,
    "presets": presets,
}
"""Name of a mark → what writes the text between it and its end."""


def written(text: str, parts: Mapping[str, Callable[[], str]] = PARTS) -> str:
    """`text` with every part that `parts` names as it is now."""
    return MARK.sub(
        lambda mark: f"<!-- {mark[1]} -->\n{parts[mark[1]]()}\n<!-- /{mark[1]} -->" if mark[1] in parts else mark[0],
        text,
    )


def write(parts: Mapping[str, Callable[[], str]] = PARTS) -> None:
    """Write these parts of all documents anew."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    write()
    print(report_lines())
