"""Flags from variables and from a file: which one counts, and what is said of a wrong one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from polarlm.engine.chat import config as chat
from polarlm.engine.cli.commands import command
from polarlm.engine.cli.flags import FlagError, parser
from polarlm.engine.config import FORMER_SETTINGS
from polarlm.server import config as server
from polarlm.server.models.registry import Registry

ROOT = Path(__file__).resolve().parents[1]

SERVER = """
[server]
ctx_size = 300
no-calibration = true
log-prompts = false
idle-unload = 0.5
cors-origin = ["https://a.example.com", "https://b.example.com"]
lora = {sql = "adapters/sql", tone = "tone.gguf"}
"""


def written(folder: Path, text: str) -> str:
    (folder / "flags.toml").write_text(text, encoding="utf-8")
    return str(folder / "flags.toml")


def test_keys_of_a_file_are_flags(tmp_path: Path) -> None:
    engine, served = server.read_command_line(["--config", written(tmp_path, SERVER), "--models", str(tmp_path)], {})
    assert (engine.ctx_size, engine.calibration, served.log_prompts, served.idle_unload) == (300, False, False, 0.5)
    assert served.cors_origin == ("https://a.example.com", "https://b.example.com")
    assert engine.lora == {"sql": "adapters/sql", "tone": "tone.gguf"}


def test_what_is_typed_counts_before_a_variable_and_a_variable_before_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[chat]\ntemp = 0.1\nseed = 1\nreverse-prompt = ["a", "b"]\nthreads = 1\nhf-repo = "a/b"')
    variables = {"POLARLM_CONFIG": file, "POLARLM_SEED": "2", "POLARLM_THREADS": "2", "POLARLM_REVERSE_PROMPT": "c"}
    words = ["-t3", "--reverse-prompt", "--threads", "-m", "x.gguf"]
    engine, sampling, _ = chat.read_command_line(words, variables)
    assert (sampling.temperature, sampling.seed, sampling.stop, engine.threads) == (0.1, 2, ("--threads",), 3)
    assert (engine.weights, engine.hf_repo) == ("x.gguf", None)
    assert chat.read_command_line([], variables)[1].stop == ("c",)


def test_a_switch_is_turned_on_or_off_by_a_variable() -> None:
    for value, is_on in {"1": True, "True": True, "off": False}.items():
        assert server.read_command_line([], {"POLARLM_LOG_PROMPTS": value})[1].log_prompts is is_on


@pytest.mark.parametrize("one", [chat, server])
def test_an_empty_variable_is_not_set(one: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    flags = parser(one.GROUPS, prog="", description="")._option_string_actions
    names = {f"POLARLM_{flag[2:].upper().replace('-', '_')}" for flag in flags if flag.startswith("--")}
    for empty in ("", " \n"):
        assert one.read_command_line([], dict.fromkeys(names, empty)) == one.read_command_line([], {})
    assert capsys.readouterr().err == ""


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "marked"
    for text in ("[server]\r\nport = 1\r\n", "[chat]\nctx-size = 256\njson-schema = '" + str(file) + ".json'"):
        file.with_suffix(".json").write_text("{}", encoding="utf-8-sig")
        file.write_bytes(text.encode("utf-8-sig"))
        one = server if "server" in text else chat
        assert one.read_command_line(["--config", str(file)], {}) != one.read_command_line([], {})
    file.write_bytes(text.encode("utf-8-sig"))
    assert chat.read_prompt(chat.ChatConfig(file=str(file)), lambda: "") == text
    file.write_bytes(text.encode("utf-16"))
    with pytest.raises(FlagError, match="is not UTF-8 text"):
        chat.read_command_line(["--config", str(file)], {})


def test_models_and_the_servers_flags_share_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    file = written(tmp_path, '[a]\npath = "a.gguf"\n[server]\nport = 1\npin = ["a"]\n')
    engine, served = server.read_command_line(["--models", file], {"POLARLM_PORT": "2", "POLARLM_WEIGHTS": "b.gguf"})
    assert (served.port, served.pin) == (2, ("a",))
    assert [one.name for one in Registry(engine, Path(file), (), served.pin).models()] == ["a"]


VARIABLES = {
    "POLARLM_PORT=x": "POLARLM_PORT: takes a whole number",
    "POLARLM_PORT=65536": "POLARLM_PORT: a port is a number",
    "POLARLM_LOG_PROMPTS=maybe": "POLARLM_LOG_PROMPTS: takes true or false",
    "POLARLM_STATE_TYPE=q": "POLARLM_STATE_TYPE: invalid choice",
    "POLARLM_CONFIG=/no/such": "POLARLM_CONFIG: there is no file /no/such",
    "POLARLM_CTX_SIZE=-1": r"--ctx-size -1: give a number.*\(POLARLM_CTX_SIZE\)",
    "POLARLM_MODEL=a POLARLM_HF_REPO=a/b": r"leave one .*\(POLARLM_HF_REPO\)",
}
FILES = {
    "[sever]\nport = 1": r"\[server\]: there is no such table",
    "server = 1": r"\[server\]: there is no such table",
    "[server": "is not a TOML file",
    "[server]\nprot = 1": r"\[server\]: there is no flag prot; did you mean port\?",
    '[server]\nkv-events = "ipc://x"': "there is no flag kv-events: there are no messages for routers",
    '[server]\nconfig = "x"': "there is no flag config",
    "[server]\nport = true": r"\[server\] port: takes a value, not true or false",
    "[server]\nport = [1, 2]": r"\[server\] port: takes one value",
    "[server]\nlog-prompts = 1": r"\[server\] log-prompts: takes true or false",
    "[server]\nparallel = 0": r"--parallel 0: .*\(--config .*: \[server\] parallel\)",
}


def test_a_wrong_value_is_named_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, sentence in {**VARIABLES, **FILES}.items():
        words = ["--config", written(tmp_path, given)] if given in FILES else []
        variables = {} if words else dict(one.split("=") for one in given.split())
        assert command(partial(server.read_command_line, environment=variables))(words) == 2
        assert re.search(sentence, capsys.readouterr().err)


def test_help_is_there_whatever_the_variables_say() -> None:
    with pytest.raises(SystemExit):
        server.read_command_line(["--help"], {"POLARLM_PORT": "x"})


def test_an_unknown_variable_gets_a_note_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a variable of another command, or one that is no flag."""
    for read in (chat.read_command_line, server.read_command_line):
        read([], {"POLARLM_CTX_SZIE": "8", "POLARLM_FOO": "1", "POLARLM_PREFILL_AT": "x"})
        assert capsys.readouterr().err.splitlines() == [
            "note: POLARLM_CTX_SZIE has no effect; did you mean POLARLM_CTX_SIZE?",
            "note: POLARLM_FOO has no effect: no flag has this name",
            f"note: POLARLM_PREFILL_AT has no effect: {FORMER_SETTINGS['prefill_at']}",
        ]
        read([], {"POLARLM_KV_EVENTS": "ipc://x"})
        assert "POLARLM_KV_EVENTS has no effect: there are no messages for routers" in capsys.readouterr().err
        read([], {"POLARLM_PORT": "1", "POLARLM_MAX_SESSIONS_SIZE": "1G", "POLARLM_TEMP": "1", "POLARLM_LINES": "on"})
    chat.read_command_line([], {"POLARLM_MODELS": "/no/such", "POLARLM_MCP_CONFIG": "/no/such"})
    files = [file for room in ("engine", "model_loaders", "server") for file in (ROOT / room).rglob("*.py")]
    used = {name for file in files for name in re.findall('"(POLARLM_[A-Z_]+)"', file.read_text(encoding="utf-8"))}
    assert "POLARLM_CPU_LEVEL" in used
    chat.read_command_line([], dict.fromkeys(used, "x"))
    server.read_command_line([], dict.fromkeys(used, "x"))
    assert capsys.readouterr().err == ""


def test_a_wrong_value_of_another_commands_variable_is_told() -> None:
    for read, variable, value in (
        (server.read_command_line, "POLARLM_TEMP", "hot"),
        (server.read_command_line, "POLARLM_TOP_P", "7"),
        (server.read_command_line, "POLARLM_LINES", "maybe"),
        (chat.read_command_line, "POLARLM_PORT", "99999"),
    ):
        with pytest.raises(FlagError, match=f"^{variable}: "):
            read([], {variable: value})


def test_flags_of_llama_cpp_without_effect_are_taken_from_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.gguf").touch()
    tables = "[server]\nmetrics = true\nflash_attn = true\nn-gpu-layers = 99\n[a]\npath = 'a.gguf'\nslots = false"
    words = ["--models", written(tmp_path, tables), "--jinja"]
    engine, _ = server.read_command_line(words, {"POLARLM_MLOCK": "1"})
    assert len(Registry(engine, tmp_path / "flags.toml", (), ()).models()) == 1
    said = capsys.readouterr().err.splitlines()
    for flag in ("--metrics", "--flash-attn", "--n-gpu-layers", "--jinja", "--mlock", "[a]: slots"):
        assert sum(f"{flag} has no effect: " in line for line in said) == 1, flag
    assert len(said) == 6
    with pytest.raises(FlagError, match="there is no flag metrix; did you mean metrics"):
        server.read_command_line(["--config", written(tmp_path, "[server]\nmetrix = true")], {})
