"""The command line: what each flag means, and what is said about one that cannot be understood."""

import math
from dataclasses import MISSING, dataclass
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polarlm.engine.chat.config import GROUPS, ChatConfig, read_command_line, read_prompt
from polarlm.engine.cli.flags import FlagError, check_that, describe, in_flags, parse
from polarlm.engine.config import FORMER_SETTINGS, EngineConfig, setting
from polarlm.engine.errors import EngineError
from polarlm.engine.params import SamplingParams
from polarlm.server import config as server_config

# flag, word on the command line, group (0 engine, 1 sampling, 2 chat), field, value
WITH_VALUE = [
    ("--weights", "./llama3", 0, "weights", "./llama3"),
    ("-m", "x.gguf", 0, "weights", "x.gguf"),
    ("--device", "cpu", 0, "device", "cpu"),
    ("-c", "4096", 0, "ctx_size", 4096),
    ("-ctv", "f16", 0, "cache_type_v", "f16"),
    ("--kv-memory", "1.5GiB", 0, "kv_memory", "1.5GiB"),
    ("-t", "4", 0, "threads", 4),
    ("--predict", "64", 1, "max_tokens", 64),
    ("--temp", "0", 1, "temperature", 0.0),
    ("--top-p", "1", 1, "top_p", 1.0),
    ("--presence-penalty", "-0.5", 1, "presence_penalty", -0.5),
    ("--dry-penalty-last-n", "-1", 1, "dry_penalty_last_n", -1),
    ("--dry-sequence-breaker", "\n", 1, "dry_sequence_breakers", ("\n",)),
    ("-s", "-1", 1, "seed", -1),
    ("--logit-bias", "42-inf", 1, "logit_bias", {42: -math.inf}),
    ("--prompt", "- a list", 2, "prompt", "- a list"),
    ("-f", "prompt.txt", 2, "file", "prompt.txt"),
    ("-sys", "Be brief.", 2, "system_prompt", "Be brief."),
    ("--color", "off", 2, "color", "off"),
]
SWITCHES = [
    ("--no-calibration", 0, "calibration", False),
    ("--ignore-eos", 1, "ignore_eos", True),
    ("-no-cnv", 2, "conversation", False),
    ("--no-loop-check", 2, "loop_check", False),
    ("--verbose", 2, "verbose", True),
    ("--color", 2, "color", "on"),
]


def test_no_flags_give_the_defaults_of_the_dataclasses():
    assert read_command_line([]) == (EngineConfig(), SamplingParams(), ChatConfig())


def test_a_flag_sets_its_field():
    for flag, word, group, name, value in WITH_VALUE:
        assert getattr(read_command_line([flag, word])[group], name) == value, flag


def test_a_switch_needs_no_value():
    for flag, group, name, value in SWITCHES:
        settings = read_command_line([flag, "--temp", "0"])
        assert getattr(settings[group], name) == value, flag
        assert settings[1].temperature == 0, flag


@pytest.mark.parametrize("flag", ["-ngl", "-ngl 99", "--gpu-layers -1", "-fa", "--flash-attn off", "--no-mmap"])
def test_flags_of_llama_cpp_that_mean_nothing_here_are_noted(flag, capsys):
    """By the chat and by the server: command lines are copied."""
    for read in (read_command_line, partial(server_config.read_command_line, environment={})):
        assert read([*flag.split(), "--draft-min", "2", "-c", "256"])[0].ctx_size == 256
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(f"note: {flag.split()[0]} has no effect: ")
        assert second.startswith("note: --draft-min has no effect: ")


@pytest.mark.parametrize("title", GROUPS)
def test_every_flag_of_a_group_is_explained(title, capsys):
    with pytest.raises(SystemExit) as exit_:
        read_command_line(["--help"])
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{title}: " in shown
    for names, meaning in describe(GROUPS[title]):
        assert names in shown
        assert meaning in shown


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda text: text != "--")


@settings(max_examples=10)
@given(TEXTS)
@example("-x")
@example("--no-calibration")
@example("a=b")
def test_a_text_is_taken_as_it_is(text):
    assert read_command_line(["-p", text])[2].prompt == text
    assert read_command_line(["-sys", text, "-st"])[2].system_prompt == text


@settings(max_examples=10)
@given(st.lists(TEXTS))
def test_reverse_prompts_add_up(texts):
    words = [word for text in texts for word in ("-r", text)]
    assert read_command_line(words)[1].stop == tuple(texts)


@settings(max_examples=10)
@given(st.dictionaries(st.integers(0, 200_000), st.floats(-1e6, 1e6).map(lambda x: round(x, 3))))
def test_logit_biases_add_up(biases):
    words = [word for token, bias in biases.items() for word in ("--logit-bias", f"{token}{bias:+.3f}")]
    assert read_command_line(words)[1].logit_bias == pytest.approx(biases)


def test_adapters_have_the_names_that_are_given_or_those_of_their_files():
    words = ["--lora", "mine=a/b:0.5", "--lora", "c/tone-v1.5", "--lora", "d/sql.gguf:2"]
    assert read_command_line(words)[0].lora == {"mine": "a/b:0.5", "tone-v1.5": "c/tone-v1.5", "sql": "d/sql.gguf:2"}


UNRECOGNIZED = "unrecognized arguments: "
WRONG: list[tuple[list[str], str]] = [  # words, and a part of the sentence
    (["-c", "many"], "--ctx-size"),
    (["-c"], "--ctx-size"),
    (["-t", "-1"], "--threads"),
    (["-n", "1.5"], "--predict"),
    (["--temp", "nan"], "--temp"),
    (["--dry-sequence-breaker", ""], "--dry-sequence-breaker"),
    (["--logit-bias", "42"], "--logit-bias"),
    (["--logit-bias", "word-1"], "--logit-bias"),
    (["--logit-bias", "42-nan"], "--logit-bias"),
    (["--logit-bias", "42+inf"], "--logit-bias"),
    (["--kv-memory", "-2G"], "--kv-memory"),
    (["--device", "toaster"], "--device"),
    (["--color", "blue"], "--color"),
    (["-r", ""], "--reverse-prompt"),
    (["-r", "--"], "-r"),
    (["-p", "\udcff"], "--prompt"),
    (["a.gguf", "-m", "b.gguf"], "b.gguf and a.gguf are both given as MODEL"),
    (["--cache-type", "rign4"], "--cache-type-k and --cache-type-v"),
    (["-ctk", "rign4"], "--cache-type-k rign4"),
    (["model", "prompt", "stray"], "stray"),
    (["--top-p", "0"], "--top-p: this is 0.0, but must be a number above 0 and at most 1"),
    (["--seed", "-3"], "-s/--seed: this is -3, but must be a whole number from 0 up; -1 takes a different one"),
    (["-n", "-2"], "-n/--predict: this is -2, but must be a whole number; -1 is no limit"),
    (["--temprature", "0.7"], UNRECOGNIZED + "--temprature (did you mean --temp?)"),
    (["--ctx_size", "100"], UNRECOGNIZED + "--ctx_size (did you mean --ctx-size?)"),
    (["--predic=4"], UNRECOGNIZED + "--predic=4 (did you mean --predict?)"),
    (["--tile-cache=1G"], UNRECOGNIZED + "--tile-cache=1G (weights are packed at each start; leave it out)"),
    (["--ctx"], UNRECOGNIZED + "--ctx (did you mean --ctx-size?)"),
    (["--cache-remote", "x"], UNRECOGNIZED + f"--cache-remote ({FORMER_SETTINGS['cache_remote']})"),
    (["--no-such-thing-at-all"], UNRECOGNIZED + "--no-such-thing-at-all"),
]


def test_what_is_wrong_is_told_with_the_range_or_the_flag_that_was_meant():
    for words, part in WRONG:
        with pytest.raises((FlagError, EngineError)) as error:
            read_command_line(words)
        sentence = in_flags(error.value) if isinstance(error.value, EngineError) else str(error.value)
        assert part in sentence
        assert "\n" not in sentence
        if part.startswith(UNRECOGNIZED):
            assert ("did you mean" in sentence) == ("did you mean" in part)


def test_words_are_the_model_and_the_prompt_wherever_they_stand():
    for text in (
        "x.gguf Hi -n 3",
        "-n 3 x.gguf Hi",
        "x.gguf -n 3 Hi",
        "-n 3 -fa x.gguf Hi",
        "-fa on --jinja x.gguf -n 3 Hi",
        "--mirostat-lr 0.1 x.gguf -n 3 Hi",
    ):
        words = text.split()
        engine, sampling, chat = read_command_line(words)
        assert (engine.weights, sampling.max_tokens, chat.prompt) == ("x.gguf", 3, "Hi")


def test_no_flag_is_offered_in_place_of_one_that_only_the_chat_has():
    with pytest.raises(FlagError) as error:
        server_config.read_command_line(["--temp", "0.7"])
    assert str(error.value) == "unrecognized arguments: --temp"


def test_an_error_names_settings_by_their_flags():
    settings = ("ctx_size", "kv_memory", "calibration", "device", "cache_type", "cache_type_k")
    text = "give calibration=False, raise ctx_size, device=cpu on this device, cache_type=x, cache_type_k: y"
    assert in_flags(EngineError(text, settings=settings)) == (
        "give --no-calibration, raise --ctx-size, --device cpu on this device, --cache-type x, --cache-type-k: y"
    )
    assert in_flags(EngineError("the file ctx_size is damaged")) == "the file ctx_size is damaged"


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (binary, tmp_path / "missing", tmp_path):
        with pytest.raises(FlagError) as error:
            read_prompt(ChatConfig(file=str(path)), str)
        assert str(path) in str(error.value)


def test_a_schema_comes_from_a_file(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}', encoding="utf-8")
    assert read_command_line(["--json-schema", str(file)])[1].schema == '{"type": "integer"}'
    with pytest.raises(FlagError, match=r"--json-schema: .*none\.json cannot be read: No such file"):
        read_command_line(["--json-schema", str(tmp_path / "none.json")])
    file.write_text("{", encoding="utf-8")
    with pytest.raises(FlagError, match=r"--json-schema: .*schema\.json is not JSON: Expecting property name"):
        read_command_line(["--json-schema", str(file)])


@dataclass(frozen=True)
class Reached:
    model: str = setting(MISSING, "MODEL", help="a folder or a 'file' of 100 % weights")
    count: int = setting(3, "-n", "--count", metavar="N", help="how often")


@dataclass(frozen=True)
class Painted:
    color: str = setting(MISSING, "COLOR", choices=("red", "blue"), help="one of two colours")


@dataclass(frozen=True)
class Fitted:
    model: str | None = setting(None, "MODEL", bare=None, help="a folder; without it, the demonstration model")
    count: int = setting(3, "-n", "--count", metavar="N", help="how often")


def read(kind, *argv):
    """What a command with a word of its own is asked."""
    checks = {"model": check_that(lambda text: text != "", "empty")}
    (asked,) = parse(argv, {kind.__name__: kind}, prog="ask", description="Asks.", checks=checks)
    return asked


def test_a_word_may_stand_before_and_behind_flags():
    for argv in (("x", "-n", "4"), ("-n", "4", "x"), ("--count=4", "x")):
        assert read(Reached, *argv) == Reached("x", 4)
        assert read(Fitted, *argv) == Fitted("x", 4)
    assert [read(Fitted, *argv) for argv in ((), ("-n", "4"), ("x",))] == [Fitted(), Fitted(count=4), Fitted("x")]
    assert read(Painted, "blue") == Painted("blue")


@pytest.mark.parametrize(
    ("kind", "argv", "sentence"),
    [
        (Reached, (), "MODEL is missing: a folder or a 'file' of 100 % weights"),
        (Reached, ("-n", "4"), "MODEL is missing: a folder or a 'file' of 100 % weights"),
        (Reached, ("",), "MODEL: empty"),
        (Reached, ("a", "b"), "unrecognized arguments: b"),
        (Reached, ("a", "--MODEL"), "unrecognized arguments: --MODEL"),
        (Reached, ("a", "--cuont", "4"), "unrecognized arguments: --cuont 4 (did you mean --count?)"),
        (Reached, ("--cuont=4",), "unrecognized arguments: --cuont=4 (did you mean --count?)"),
        (Painted, (), "COLOR is missing: one of two colours"),
        (Painted, ("--colour", "4"), "unrecognized arguments: --colour"),  # and no word that its value seems to be
        (Painted, ("green",), "COLOR: invalid choice: 'green'"),
    ],
)
def test_a_word_that_is_missing_or_too_much_is_named(kind, argv, sentence):
    with pytest.raises(FlagError) as error:
        read(kind, *argv)
    assert str(error.value).partition(" (choose")[0] == sentence


def test_a_word_is_explained(capsys):
    shown = []
    for kind in (Reached, Fitted):
        with pytest.raises(SystemExit):
            read(kind, "--help")
        shown.append(" ".join(capsys.readouterr().out.split()))
    assert shown[0].startswith("usage: ask MODEL [flags] Asks. ")
    assert "Reached: MODEL a folder or a 'file' of 100 % weights -n, --count N how often (default: 3)" in shown[0]
    assert shown[1].startswith("usage: ask [MODEL] [flags] ")
    assert [names for names, _ in describe(Reached)] == ["MODEL", "-n, --count N"]
