"""The README and docs/ say what the command line and the measurements say."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route

from polarlm.engine import Engine, SamplingParams, codecs
from polarlm.engine.errors import EngineError
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.model_loaders.families import families
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import create_app
from polarlm.server.http.errors import _ENGINE_STATUS, _REFUSED_STATUS
from scripts import (
    make_cache_tables,
    make_flag_table,
    make_quality_table,
    make_speed_table,
)
from scripts.make_quality_table import ROOT, newest, with_tables

EMBEDDING, SERVER = (ROOT / "docs" / name for name in ("embedding.md", "server.md"))
NUMBERS = {"n_ctx", "n_prompt_tokens", "lacking"}  # of an EngineError
SCRIPTS = (
    make_flag_table,
    make_quality_table,
    make_cache_tables,
    make_speed_table,
)
TABLES = [
    pytest.param(document, {name: table}, id=f"{document.name}: {name}")
    for script in SCRIPTS
    for document, tables in script.TABLES.items()
    for name, table in tables.items()
]


@pytest.mark.parametrize(("document", "tables"), TABLES)
def test_a_table_of_a_document_is_current(document, tables):
    text = document.read_text(encoding="utf-8")
    assert text == with_tables(text, tables), "run `make readme`"


# What the table of the README calls a family, and whether it is among the mixtures of experts there.
FAMILIES = {
    "bert": "BERT",
    "gemma2": "Gemma 2 and 3 (text)",
    "gemma3": "Gemma 2 and 3 (text)",
    "gemma4": "Gemma 4 (text)",
    "glm4_moe": "experts: GLM 4.5 and 4.6",
    "gpt_oss": "experts: gpt-oss",
    "granitemoehybrid": "Granite 4 H",
    "lfm2": "LFM2 and LFM2-MoE",
    "lfm2_moe": "LFM2 and LFM2-MoE",
    "llama": "Llama 2 and 3.x",
    "mistral": "Mistral",
    "mixtral": "experts: Mixtral",
    "muse_glimmer": "Muse Glimmer (text)",
    "nemotron_h": "Nemotron-H and Nemotron 3 Nano",
    "nomic_bert": "nomic-embed",
    "olmo2": "OLMo 2",
    "olmoe": "experts: OLMoE",
    "phi3": "Phi-3 to Phi-4",
    "qwen2": "Qwen2 and 2.5",
    "qwen2_moe": "experts: Qwen2 (A2.7B, 57B-A14B)",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5 to 3.8 (text)",
    "qwen3_5_moe": "Qwen3.5 to 3.8 (text)",
    "qwen3_moe": "experts: Qwen3 (30B-A3B, Coder)",
    "qwen3_next": "Qwen3-Next",
    "smollm3": "SmolLM3",
    "xlm_roberta": "XLM-R",
}


def test_the_readme_names_every_family():
    assert FAMILIES.keys() == set(families())
    (row,) = re.findall(r"^\| Families \| (.*) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    parts = re.split("(mixtures of experts: |; for embeddings: )", row)
    experts, others = parts[2], f"{parts[0]}, {parts[4]}"
    for name in FAMILIES.values():
        of_experts = name.removeprefix("experts: ")
        part = others if name == of_experts else experts
        assert re.search(rf"(?:^|[,:;] |and ){re.escape(of_experts)}(?=$|[,;]| \(| and )", part), name


def test_a_missing_table_is_named():
    with pytest.raises(SystemExit, match="<!-- flags -->"):
        with_tables("# A README without marks\n", {"flags": str})


def test_only_the_tables_change():
    tables = {"flags": make_flag_table.flag_table, "more": lambda: "new"}
    text = with_tables(
        "before\n<!-- flags -->\nold\n<!-- /flags -->\nbetween\n<!-- more --><!-- /more -->after\n", tables
    )
    assert text.startswith("before\n<!-- flags -->\n| Flag |")
    assert text.endswith("|\n<!-- /flags -->\nbetween\n<!-- more -->\nnew\n<!-- /more -->after\n")
    assert with_tables(text, tables) == text


def test_the_parts_of_encoding_are_worth_what_the_document_says():
    whole, *_, none = (row["kl_mean"] for row in newest("ablation-*")["rows"] if row["scored_as"] == "as served")
    text = " ".join(make_quality_table.DOCUMENT.read_text(encoding="utf-8").split())
    assert f"cut KL to {whole / none:.0%}".replace("%", " %") in text


def test_the_headline_is_what_the_default_costs():
    measurements = make_quality_table.newest_of_each(f"quality-{make_quality_table.DEMO}")
    ((measured, rows),) = (one for one in measurements if "ring4/ring3.5" in one[1])
    default = rows["ring4/ring3.5"]["as served"]
    more = 100 * (default["perplexity"] / measured["exact_perplexity"] - 1)
    text = " ".join(make_quality_table.README.read_text(encoding="utf-8").split())
    assert f"raises perplexity by {more:.1f} %" in text
    assert 3.9 < default["bits_per_value"] < 4.1


def rows(document, header):
    """The cells of each row of the table of `document` whose header begins so."""
    table = document.read_text(encoding="utf-8").split(f"\n| {header} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"cache_type": "f16"}], ids=["default", "f16"])
def test_the_conversation_of_the_readme_shows_that_the_model_remembers(demo_path, settings):
    """Its second question can only be answered by who has read the first."""
    text = make_quality_table.README.read_text(encoding="utf-8")
    first, second = re.search(r"printf '(.*)\\n(.*)\\n' \| polarlm chat", text).groups()
    assert re.findall(r'"role": "user", "content": "(.*?)"', text)[-2:] == [first, second]  # the same in Python
    with Engine.load(ctx_size=1024, device="cpu", **settings) as engine:
        messages = [{"role": "user", "content": first}]
        answer = engine.chat(messages, SamplingParams(max_tokens=60)).text
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": second}]
        assert "Rome" in engine.chat(messages, SamplingParams(max_tokens=60)).text


def test_every_code_of_an_error_is_explained():
    told = {code for row in rows(EMBEDDING, "Code") for code in re.findall(r"`(\w+)`", row[0])}
    assert told == {*re.findall(r'"(\w+)"', EngineError.__doc__)} - NUMBERS


def test_every_code_that_the_engine_raises_is_told():
    raised = {"invalid_request"}  # the default
    for path in (ROOT / "engine").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search("(Engine|Constraint)Error", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("EngineError", "ConstraintError"):
                codes = node.args[1:2] or [more.value for more in node.keywords if more.arg == "code"]
                raised.update(ast.literal_eval(code) for code in codes)
    assert raised == {*re.findall(r'"(\w+)"', EngineError.__doc__)} - NUMBERS


def test_every_status_of_an_error_is_explained():
    told = {
        (int(status), code)
        for row in rows(SERVER, "Status")
        for status in row[0].split(", ")
        for code in re.findall(r"`(\w+)`", row[1])
    }
    assert {(status, code) for code, status in {**_ENGINE_STATUS, **_REFUSED_STATUS}.items()} <= told


def test_every_endpoint_is_explained():
    def shared(method: str, path: str) -> tuple[str, str]:  # most paths are there with /v1 and without
        return method, path.removeprefix("/v1")

    told = {shared(*pair) for row in rows(SERVER, "Endpoint") for pair in re.findall(r"`(\w+) (\S+)`", row[0])}
    shape = CacheShape(8, (LayerShape(codecs.get("f16"), codecs.get("f16"), 1, 8),))
    engine = SimpleNamespace(model=SimpleNamespace(tokenizer=None), context=0, kept_blocks=object(), cache_shape=shape)
    config = ServerConfig(share_blocks=True)
    driver = cast(Any, SimpleNamespace(engine=engine, config=config))
    routes = cast(list[Route], create_app(driver, config).routes)
    there = {shared(next(iter({*route.methods} - {"HEAD"})), re.sub(r"{.*?}", "NAME", route.path)) for route in routes}
    assert told == there


def test_every_room_of_the_engine_is_explained():
    told = {
        name
        for row in rows(ROOT / "ARCHITECTURE.md", "Folder | What is in it | Start reading at")
        for name in names(row)
    }
    files = {path.relative_to(ROOT / "engine").parts for path in (ROOT / "engine").rglob("*.py")}
    there = {parts[0] if len(parts) == 1 else f"{parts[0]}/" for parts in files}  # compiled leftovers are no room
    assert told == {name for name in there if not name.startswith("_")}


def test_the_way_of_a_token_is_as_short_as_the_text_says():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    walk = text[text.index("**Where a token comes from**") :].split("\n\n")[1]
    files = re.findall(r"^\d\. `(\S+)`: ", walk, re.M)
    assert len(files) == 6
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 1260


def test_every_folder_of_kernels_is_explained():
    told = {name for row in rows(ROOT / "cuda" / "README.md", "Folder | Contents") for name in names(row)}
    assert told == {f"{path.name}/" for path in (ROOT / "cuda").iterdir() if path.is_dir()}


def names(row):
    """What stands in code spans in the first cell of a row."""
    return re.findall(r"`([^`]+)`", row[0])
