"""The chat without a terminal: messages come through a pipe, answers go to one, everything else to standard error."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

import pytest

from polarlm.engine.chat.console import Console
from polarlm.engine.chat.session import ChatSession
from polarlm.engine.chat.terminal import main
from polarlm.engine.errors import EngineError
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.errors import LoadError
from tests.pairs import mostly_slow

from .fake_engine import FakeEngine

FAKE_CHAT = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "polarlm"


@pytest.fixture
def chat(engine, capsys, monkeypatch):
    """Runs the chat on lines of input; gives its exit code, standard output and standard error."""

    def run(*argv, lines="", load=engine.load):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(argv, load=load)
        return code, *capsys.readouterr()

    return run


def fails(error):
    def load(*_args, **_settings):
        raise error

    return load


def test_a_single_turn_answers_once(chat, engine):
    code, out, _ = chat("-p", "hi there", "-st")
    assert (code, out) == (0, "you said: hi there\n")
    assert engine.prompts == [[{"role": "user", "content": "hi there"}]]
    assert engine.closed


def test_a_command_adds_no_message(chat):
    assert chat("-st", lines="/regen\n/stats\none\ntwo\n")[:2] == (0, "you said: one\n")


@pytest.mark.parametrize("words", [["-no-cnv"], ["-no-cnv", "-p", ""]])
def test_plain_text_without_a_prompt_is_refused_before_a_model_is_loaded(chat, words):
    code, out, err = chat(*words, load=fails(AssertionError("loaded")))
    assert (code, out) == (2, "")
    assert err.startswith("error: -no-cnv/--no-conversation needs a prompt")


def test_a_setting_without_effect_is_told_as_the_flag_that_was_given(chat, engine):
    def load(path, *, config, verbose):
        verbose("cpu_moe has no effect on a CPU: all experts are in its memory.")
        return engine

    assert "--cpu-moe has no effect on a CPU" in chat("-p", "hi", "-st", load=load)[2]


def test_the_prompt_the_file_and_what_is_piped_in_are_one_message(chat, engine, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("From a file.\n\n")
    for flags, message in (
        (["-p", "Summarize:"], "Summarize:\n\npiped\nlines"),
        (["-p", "Summarize:", "-f", str(file)], "Summarize:\n\nFrom a file.\n\n\npiped\nlines"),
        (["-f", str(file), "-st"], "From a file.\n\n\npiped\nlines"),
        (["model.gguf", "Summarize:"], "Summarize:\n\npiped\nlines"),
    ):
        assert chat(*flags, lines="piped\nlines\n")[:2] == (0, f"you said: {message}\n")
        assert engine.prompts.pop()[0]["content"] == message
    assert chat("-no-cnv", "-p", "Once", lines="upon\n")[1] == "you said: Once\n\nupon\n"
    assert chat("-no-cnv", lines="line one\nline two\n")[1] == "you said: line one\nline two\n"


def test_a_pipe_that_stays_open_is_told_of(chat, monkeypatch):
    class Slow(io.StringIO):
        def read(self, size=-1):
            time.sleep(0.1)
            return super().read(size)

    monkeypatch.setattr("polarlm.engine.chat.console._WAIT", 0.01)
    monkeypatch.setattr(io, "StringIO", Slow)
    assert "Reading standard input, which is a part of the message" in chat("-p", "hi", "-st")[2]


def test_every_line_of_a_pipe_is_one_turn(chat):
    code, out, err = chat("-p", "zero", "--lines", lines="one\n\ntwo \\\nlines")
    assert chat(lines="one\n")[1] == "you said: one\n"
    assert (code, out) == (0, "you said: zero\nyou said: one\nyou said: two \nlines\n")
    assert not any(mark in err for mark in (">", "\x1b", "tokens/s"))


def test_the_loaded_model_is_noted_on_standard_error(chat):
    _, out, err = chat("-p", "hi", "-st")
    assert "Reading the weights of fake" in err
    assert err.count("fake · context 128 tokens\n") == 1
    assert "fake" not in out
    assert "fake: a context of 128 tokens fits" in chat("-p", "hi", "-st", "-v")[2]


def test_a_model_without_a_template_says_so_before_it_chats(chat, engine):
    assert "no chat template" not in chat("-p", "hi", "-st")[2]
    engine.model.template.is_default = True
    assert "note: fake has no chat template" in chat("-p", "hi", "-st")[2]
    assert "no chat template" not in chat("-no-cnv", "-p", "Once upon")[2]


@pytest.mark.parametrize(
    ("argv", "driver", "said"),
    [([], None, False), (["-v"], None, True), (["-v"], 13000, False), (["-v", "--device", "cpu"], None, False)],
)
def test_why_there_is_no_gpu_is_said_with_verbose(chat, monkeypatch, argv, driver, said):
    monkeypatch.setattr("polarlm.engine.chat.terminal.driver_version", lambda: driver)
    assert ("No NVIDIA driver found: running on the CPU." in chat(*argv, "-p", "hi", "-st")[2]) == said


def test_sampling_flags_reach_the_engine(chat, engine):
    chat("-p", "hi", "-st", "--temp", "0", "-r", "###", "-c", "64")
    assert engine.params[0].temperature == 0
    assert engine.params[0].stop == ("###",)
    assert engine.config.ctx_size == 64


def test_regen_answers_the_last_message_again(chat, engine):
    _, out, err = chat(lines="/regen\none\n/regen\n")
    assert "There is no answer yet." in err
    assert out == "you said: one\n" * 2
    assert engine.prompts[0] == engine.prompts[1] == [{"role": "user", "content": "one"}]


def test_a_looping_answer_is_stopped(chat, engine):
    code, out, err = chat(lines="loop\none\n")
    first, second = out.splitlines()
    assert (code, second) == (0, "you said: one")
    assert len(first.split()) == 301  # "so", and then nothing but the same four words
    assert err.count("its last 300 tokens are the same ones over and over. --no-loop-check") == 1
    assert engine.cancelled == 1
    assert engine.prompts[-1][1]["content"] == first


def test_a_looping_answer_goes_on_with_no_loop_check(chat, engine):
    code, out, err = chat("-p", "loop", "-st", "--no-loop-check")
    assert (code, len(out.split())) == (0, 4001)
    assert "over and over" not in err
    assert engine.cancelled == 0


def test_clear_and_system_leave_the_system_prompt_alone(chat, engine):
    chat("-sys", "Be brief.", lines="one\n/clear\ntwo\n/regen\n")
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}
    assert engine.prompts[1] == engine.prompts[2] == [system, user]
    _, _, err = chat(lines="/system\none\n/system Answer in verse.\\\nRhyme.\n/system\ntwo\n")
    assert "There is no system prompt" in err
    assert err.count("Answer in verse.\nRhyme.") == 1
    assert engine.prompts[-1] == [{"role": "system", "content": "Answer in verse.\nRhyme."}, user]


@pytest.mark.parametrize("named", [True, False])
def test_a_saved_conversation_goes_on(chat, engine, state, tmp_path, named):
    file = tmp_path / "my talk" if named else state / "chat.session"
    name = f" {file}" if named else ""
    code, out, err = chat("-sys", "Be brief.", lines=f"one\n/save{name}\n")
    assert (code, out) == (0, "you said: one\n")
    assert f"The conversation is saved in {file}: 12 tokens." in err
    code, out, err = chat(lines=f"two\n/load{name}\n/system\nthree\n")
    assert (code, out) == (0, "you said: two\nyou said: three\n")
    assert f"The conversation saved in {file} continues: 12 tokens.\n> one\nyou said: one\nBe brief.\n" in err
    assert engine.prompts[-1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "you said: one", "token_ids": [100, 101, 102]},
        {"role": "user", "content": "three"},
    ]


def test_a_loaded_answer_can_be_given_again(chat, engine, state):
    chat("-sys", "Be brief.", lines="one\n/save\n")
    _, out, err = chat("-sys", "Be long.", lines="/load\n/stats\n/regen\n/clear\ntwo\n")
    assert out == "you said: one\nyou said: two\n"
    assert "There is no answer yet." in err  # none whose speed is known
    assert [message["content"] for message in engine.prompts[-1]] == ["Be brief.", "two"]


def test_a_home_folder_is_found(chat, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    chat(lines="one\n/save ~/talk\n")
    assert (tmp_path / "talk").exists()


def test_long_messages_are_recalled_in_brief(chat, tmp_path):
    chat(lines=f"{'word ' * 100}\n/save {tmp_path / 'talk'}\n")
    lines = chat(lines=f"/load {tmp_path / 'talk'}\n")[2].splitlines()[-2:]
    assert all(len(line) <= 203 and line.endswith(" …") for line in lines)


def test_images_go_with_the_next_message_and_are_saved(chat, engine, tmp_path):
    for name in ("a.png", "two words.png"):
        (tmp_path / name).write_bytes(b"A")
    commands = f"/image {tmp_path / 'a.png'}\n/image '{tmp_path / 'two words.png'}'\n"
    chat(lines=f"{commands}one\ntwo\n/save {tmp_path / 'talk'}\n")
    (tmp_path / "a.png").unlink()
    *_, err = chat(lines=f"/load {tmp_path / 'talk'}\n/image {tmp_path / 'a.png'}\n/image\nthree\n")
    image = {"type": "image_url", "image_url": {"url": "data:;base64,QQ=="}}
    question = {"role": "user", "content": [image, image, {"type": "text", "text": "one"}]}
    assert [prompt[0] for prompt in engine.prompts] == [question] * 3
    assert [one["content"] for one in engine.prompts[-1] if one["role"] == "user"][1:] == ["two", "three"]
    assert "a.png cannot be read: No such file" in err
    assert "Which image?" in err
    (tmp_path / "notes.txt").write_text("no image")
    *_, err = chat(lines=f"/image {tmp_path / 'notes.txt'}\nfour\n")
    assert f"error: {tmp_path / 'notes.txt'}: this is no image of a kind that is read" in err
    assert engine.prompts[-1][-1]["content"] == "four"  # it does not go with the message
    engine.reads_images = False
    assert "fake takes text alone" in chat(lines=f"/image {tmp_path / 'two words.png'}\n")[2]


@pytest.mark.parametrize("lines", ["/save\n", "one\n/clear\n/save\n"])
def test_without_an_answer_nothing_is_saved(chat, state, lines):
    code, _, err = chat(lines=lines)
    assert code == 2
    assert "error: There is no answer yet" in err
    assert not (state / "chat.session").exists()


NOTES = (  # of sessions, which are no conversations
    None,
    {"messages": [{"role": "user", "content": "one"}]},
    {"messages": ["one", "two"]},
    {"messages": [{"role": "user"}, {"role": "assistant", "content": "one"}]},
    {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "one"}]},
)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("error", "the prompt has 200 tokens"),
        ("/save /no/such/folder", "The session"),
        ("/load /no/such/file", "The session"),
        *((f"/load {number}", f"{number} holds no conversation: give a file that /save has") for number in range(5)),
    ],
)
def test_what_fails_leaves_the_conversation_as_it_was(chat, engine, tmp_path, monkeypatch, line, told):
    monkeypatch.chdir(tmp_path)
    for number, note in enumerate(NOTES):
        (tmp_path / str(number)).write_text(json.dumps(note))
    code, out, err = chat(lines=f"one\n{line}\ntwo\n")
    assert err.count(f"error: {told}") == 1
    assert out == "you said: one\nyou said: two\n"
    assert [message["content"] for message in engine.prompts[-1]] == ["one", "you said: one", "two"]
    assert code == 2  # a script learns of it


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("/etc/hosts", "There is no command /etc/hosts. /help lists them"),
        ("/regne", "There is no command /regne. Did you mean /regen? /help"),
        ("/ststs", "There is no command /ststs. Did you mean /stats? /help"),
        ("/lod x", "There is no command /lod. Did you mean /load? /help"),
        (
            "/set tempratur 1",
            "there is no parameter tempratur; did you mean temperature? /set takes dry-allowed-length",
        ),
        ("/set temp warm", "--temp: takes a number, not 'warm'"),
        ("/set top-p 0", "--top-p: this is 0.0, but must be a number above 0 and at most 1"),
    ],
)
def test_what_is_wrong_is_not_sent_and_answered_with_what_was_meant(chat, engine, typed, told):
    assert told in chat(lines=f"{typed}\n")[2]
    assert engine.prompts == []


@pytest.mark.parametrize(("argv", "lines"), [(["--show-timings"], "hi\n"), ([], "hi\n/stats\n")])
def test_the_numbers_of_a_turn(chat, argv, lines):
    _, _, err = chat(*argv, lines=lines)
    assert "prompt: 30 tokens, 20 of them cached, 20.0 tokens/s" in err  # 10 tokens in half a second
    assert "answer: 3 tokens, 1.0 tokens/s" in err  # the first comes with the prompt, two more in two seconds
    assert "context: 12 of 128 tokens" in err
    assert "cache: 3.0 MiB, 4.0× smaller than f16 (12.0 MiB)" in err
    assert "with 128 tokens: 30.0 MiB, 4.0× smaller than f16 (120.0 MiB), 4.25 bits per value" in err


def test_parameters_are_set_by_any_of_their_names(chat, engine):
    lines = "/set temperature 0.5\n/set parameter top-k 3\n/set n 2\n/set ignore-eos\nhi\n/set\n"
    said = chat(lines=lines)[2].splitlines()[-1]
    assert said.startswith("predict 2, temp 0.5, top-k 3, top-p 0.95, ")
    assert said.endswith(", ignore-eos on, reasoning-budget -1")
    (params,) = engine.params
    assert (params.temperature, params.top_k, params.max_tokens, params.ignore_eos) == (0.5, 3, 2, True)


def test_parameters_that_nobody_set_have_the_models_values(chat, engine):
    engine.model.generation = GenerationDefaults({"top_k": 20}, greedy=True, max_tokens=300, banned=(7,))
    err = chat(lines="/set\n")[2]
    assert "predict 300, temp 0, top-k 20, top-p 0.95, min-p 0.05, top-n-sigma -1, " in err
    assert ", repeat-penalty 1, " in err


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_chat_is_left_by_each_name(chat, word):
    assert chat(lines=f"one\n{word}\nnot read\n")[1] == "you said: one\n"


def test_how_to_get_a_better_model_is_told_once(chat, state):
    hint = "A better one is one command away: polarlm chat Qwen/Qwen3-0.6B-GGUF"
    assert hint not in chat("-m", "x.gguf", "-p", "hi")[2]
    assert chat(lines="one\ntwo\n")[2].count(hint) == 1
    assert hint not in chat("-p", "hi")[2]
    assert (state / "told").exists()


@pytest.mark.parametrize("argv", [[], ["--verbose"]])
def test_the_kernels_are_named_with_verbose(chat, argv):
    """At the start, and by /stats, when there may be more."""
    err = chat(*argv, lines="hi\n/stats\n")[2]
    assert err.count("Compiled kernels:\n  merge 8\n  product f16_1\n") == 2 * len(argv)


def test_stats_say_how_many_threads_a_step_takes_and_why(chat):
    said = "CPU threads of a step: 1 (a step took 20.0 ms with 1, 80.0 ms with 2)"
    assert said in chat(lines="hi\n/stats\n")[2]
    assert said not in chat("--show-timings", lines="hi\n")[2]


def test_a_limit_of_the_models_is_told_and_one_of_the_users_counts(chat, engine):
    engine.model.generation = GenerationDefaults(max_tokens=2)
    assert "2 tokens that answers of this model have; /set predict N" in chat("-p", "hi", "-st")[2]
    assert "ends here" not in chat("-p", "hi", "-st", "-n", "-1")[2]
    assert "1 token that -n/--predict allows." in chat("-p", "hi", "-st", "-n", "1")[2]


def test_an_answer_that_is_given_again_differs(chat, engine):
    """Unless the user wants the most likely words."""
    engine.model.generation = GenerationDefaults(greedy=True)
    chat("-s", "5", lines="one\n/regen\n/regen\ntwo\n")
    assert [params.temperature for params in engine.params] == [None, 0.6, 0.6, None]
    assert [params.seed for params in engine.params] == [5, 6, 7, 5]
    assert "temp is 0, and so the answer is the same" in chat("--temp", "0", lines="one\n/regen\n")[2]
    assert engine.params[-1].temperature == 0


def test_raw_completion_goes_on_from_the_text_itself(chat, engine):
    code, out, err = chat("-no-cnv", "-p", "Once upon", "-sys", "Be brief.")
    assert (code, out) == (0, "you said: Once upon\n")
    assert engine.prompts == ["Once upon"]
    assert engine.options == [PromptOptions(parse_special=True)]  # it may be written in the model's own template
    assert "-sys has no effect with -no-cnv" in err


@pytest.mark.parametrize("argv", [["--nope"], ["-c", "-1"], ["-f", "/no/such/file"], ["-p", ""]])
def test_a_flag_that_cannot_be_understood_ends_in_a_sentence(chat, argv):
    code, out, err = chat(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_model_that_cannot_be_loaded_ends_in_its_sentence(chat):
    sentence = "/models/x.gguf is cut short; fetch it again"
    assert chat(load=fails(EngineError(sentence, "model_unavailable"))) == (2, "", f"error: {sentence}\n")


def test_an_unexpected_error_is_one_sentence_or_a_traceback_on_request(chat):
    code, _, err = chat("-p", "crash", "-st")
    assert code == 1
    assert "unexpected ZeroDivisionError: division by zero; run with --verbose" in err
    assert "Traceback" not in err
    code, _, err = chat("-p", "crash", "-st", "--verbose")
    assert code == 1
    assert "Traceback" in err


def test_ctrl_c_while_loading_is_quiet(chat):
    assert chat(load=fails(KeyboardInterrupt())) == (130, "", "")


def test_input_that_is_not_utf8_ends_in_a_sentence(chat, monkeypatch, engine, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"gr\xfc\xdfe\n")))
    assert main([], load=engine.load) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_input_is_utf8_whatever_the_locale_says():
    done = run_fake(input="größe\n".encode("utf-8-sig"), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout == b"you said: gr??e\n"


@pytest.mark.slow
def test_a_prompt_is_utf8_whatever_the_locale_says():
    """Two processes are started."""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    words = ["-p", "größe", "-sys", "für", "-r", "ß?", "-st"]
    done = run_fake(*(word.encode() for word in words), env=plain)
    assert (done.returncode, done.stdout.decode()) == (0, "you said: größe\n")
    done = run_fake("-p", b"gr\xfc\xdfe", "-st", env=plain)
    assert done.returncode == 2
    assert b"-p/--prompt: this is not UTF-8 text" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="a user of Windows has a folder that no variable names")
def test_a_user_without_a_home_folder_can_chat(tmp_path):
    program = tmp_path / "homeless.py"
    program.write_text(
        "import os, pwd, runpy, sys\n"
        "for name in [name for name in os.environ if name == 'HOME' or name.startswith('XDG_')]: del os.environ[name]\n"
        "def none(number): raise KeyError(number)\n"
        "pwd.getpwuid = none\n"
        f"runpy.run_path({str(FAKE_CHAT)!r}, run_name='__main__')\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, program], input=b"one\n/save\n/save talk\n", capture_output=True, timeout=60, cwd=work
    )
    assert done.stdout == b"you said: one\n"
    assert b"error: There is no home folder for a file without a name: give a path" in done.stderr
    assert [file.name for file in work.iterdir()] == ["talk"]  # and no folder called ~


def test_color_is_forced_on_notes_but_never_on_the_answer(chat):
    _, out, err = chat("--color", "on", "-p", "hi", "-st")
    assert "\x1b[" in err
    assert "\x1b" not in out


def test_control_characters_of_the_model_reach_a_pipe_unchanged(chat):
    assert chat("-p", "\x1b[2J", "-st")[1] == "you said: \x1b[2J\n"


def run_fake(*argv, **options):
    return subprocess.run([sys.executable, FAKE_CHAT, *argv], capture_output=True, timeout=60, **options)


def start_fake(*argv, **options):
    return subprocess.Popen(
        [sys.executable, FAKE_CHAT, *argv], bufsize=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **options
    )


def test_a_reader_that_leaves_ends_the_chat_quietly():
    with start_fake("-p", "slow", "-st", stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(timeout=60) == 141
    assert "Traceback" not in err
    assert "Exception" not in err
    assert "error" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_ends_the_chat_with_a_sentence():
    with open("/dev/full", "w") as full:
        process = [sys.executable, FAKE_CHAT, "-p", "hi", "-st"]
        done = subprocess.run(process, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("error: standard output cannot be written: No space left on device\n")


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the outputs")
@mostly_slow("closed", [">&-", "2>&-", BOTH := ">&- 2>&-"], [BOTH])
def test_a_chat_without_an_output_answers_all_the_same(closed):
    line = f'exec "{sys.executable}" "{FAKE_CHAT}" -p hi -st {closed}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert done.stdout == ("" if closed.startswith(">") else "you said: hi\n")
    assert "error" not in done.stderr


@pytest.mark.parametrize("ends_the_process", [False, True])
def test_ctrl_c_while_a_prompt_is_prepared_is_no_error(engine, ends_the_process):
    """It stops this answer alone, unless the process of the template ends as well."""

    class Slow(ChatTemplate):
        @cached_property
        def channels(self):
            signal.raise_signal(signal.SIGINT)
            if ends_the_process:
                raise LoadError("its process crashed (SIGINT)")

    engine.model.template = Slow("{{ messages }}")
    session = ChatSession(engine, SamplingParams(), Console())
    if ends_the_process:
        with pytest.raises(KeyboardInterrupt):
            session.send("hi")
    else:
        turn = session.send("hi")
        assert (turn.finish_reason, turn.token_ids) == ("cancelled", ())


def test_ctrl_c_without_a_terminal_ends_the_chat():
    with start_fake("-p", "slow", stderr=subprocess.PIPE) as process:
        assert process.stdout.read(4) == b"slow"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n")  # the line of the answer is not left open
    assert b"Traceback" not in err
