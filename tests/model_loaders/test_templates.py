"""Chat templates: where they come from, what they can do, and what they can not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polarlm.model_loaders import limited_process
from polarlm.model_loaders.chat import template_worker, templates
from polarlm.model_loaders.chat.templates import ChatTemplate, for_folder, for_gguf
from polarlm.model_loaders.errors import LoadError
from tests.model_loaders import vocabularies as vocab
from tests.rendering import rendered
from tests.shared_data import shared

HELLO = [{"role": "user", "content": "Hello"}]


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, **tokens)


def render(source: str, **variables: object) -> str:
    return rendered(template(source), HELLO, **variables)


def gguf(**metadata: object) -> SimpleNamespace:
    return vocab.tiny_bpe(**metadata)


class TestWhereItComesFrom:
    def test_tokenizer_config(self, tmp_path: Path) -> None:
        made = for_folder(tmp_path, {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<s>",
                                      "eos_token": {"content": "</s>"}})  # fmt: skip
        assert (rendered(made, HELLO), made.is_default) == ("<s></s>", False)
        assert made.missing_note("its own") is None

    @pytest.mark.parametrize(
        ("files", "settings", "used"),
        [
            ({}, {"chat_template": [{"name": name, "template": name} for name in ("rag", "default")]}, "default"),
            ({"chat_template.jinja": "Grüß"}, {"chat_template": "other"}, "Grüß"),
            ({"chat_template.jinja": "\ufeffGrüß"}, {}, "Grüß"),
            ({}, {"chat_template": "\ufeffGrüß"}, "Grüß"),
            ({"chat_template.json": '{"chat_template": {"default": "Hi"}}'}, {}, "Hi"),
            ({"chat_template.json": '{"chat_template": {"default": "Hi"}}'}, {"chat_template": "x"}, "x"),
        ],
    )
    def test_one_of_several(self, files: dict[str, str], settings: dict, used: str, tmp_path: Path) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        assert for_folder(tmp_path, settings).source == used

    def test_one_for_tools_is_taken_where_there_are_tools(self, tmp_path: Path) -> None:
        """Of a list in tokenizer_config.json, a file of its own, and a key of a GGUF file."""
        texts = {"default": "{{ messages[0].content }}\n", "tool_use": "{%- set n = tools | length %}{{ n }} tools\n"}
        named = [{"name": name, "template": texts[name]} for name in ("tool_use", "default")]
        folder = tmp_path / "files"
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "chat_template.jinja").write_text(texts["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
        keys = {"tokenizer.chat_template": texts["default"], "tokenizer.chat_template.tool_use": texts["tool_use"]}
        for made in (
            for_folder(tmp_path / "none", {"chat_template": named}),
            for_folder(folder, {}),
            for_gguf(gguf(**keys)),
        ):
            assert (rendered(made, HELLO), rendered(made, HELLO, tools=[{}])) == ("Hello", "1 tools")

    def test_gguf(self) -> None:
        metadata = {"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}", "tokenizer.ggml.bos_token_id": 256}
        made = for_gguf(gguf(**metadata))
        assert (rendered(made, HELLO), made.is_default) == ("he|", False)

    def test_chatml_where_the_vocabulary_has_it(self, tmp_path: Path) -> None:
        chatml = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        inside = for_gguf(vocab.tiny_bpe(("<|im_start|>", vocab.CONTROL)))
        beside = for_folder(tmp_path, {"additional_special_tokens": ["<|im_start|>"]})
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<|im_start|>"}]}))
        for made in (inside, beside, for_folder(tmp_path, {})):
            assert (rendered(made, HELLO), made.is_default) == (chatml, True)
            assert "note: base has no chat template: " in made.missing_note("base")
            assert "in ChatML" in made.missing_note("base")

    def test_plain_words_where_it_has_not(self, tmp_path: Path) -> None:
        for made in (for_gguf(gguf()), for_folder(tmp_path, {})):
            assert (rendered(made, HELLO), made.is_default) == ("User: Hello\nAssistant:", True)
            assert rendered(made, HELLO, add_generation_prompt=False) == "User: Hello\n"
            assert 'as lines of "User:" and "Assistant:"' in made.missing_note("base")

    def test_a_chat_template_that_is_not_text_is_left_out_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        value = [{"name": "default", "template": 7}]
        assert for_folder(tmp_path, {"chat_template": value}).is_default
        assert for_gguf(gguf(**{"tokenizer.chat_template": value})).is_default
        says = "chat_template is a list of 1 value, which is no text; it is left out"
        assert caplog.messages == [f"{file}: {says}" for file in (tmp_path / "tokenizer_config.json", "tiny.gguf")]

    def test_a_chat_template_json_that_is_none_is_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "chat_template.json").write_text("{")
        assert for_folder(tmp_path, {}).is_default
        assert "chat_template.json is not valid JSON" in caplog.text

    def test_an_unreadable_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(LoadError, match=r"chat_template\.jinja"):
            for_folder(tmp_path, {})


class TestWhatItCanDo:
    def test_what_model_authors_rely_on(self) -> None:
        for source, text in (
            ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}", "x\n"),  # blocks leave no white space
            ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
            ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
            ("{{ strftime_now('%d') | length }}", "2"),
            ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
            ("{% if tools %}tools{% else %}none{% endif %}", "none"),
            ("{{ messages[0]['content'] | trim }}{{ messages[0].absent }}", "Hello"),
            ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}", "7"),
            ("{{ add_generation_prompt }}", "True"),
        ):
            assert render(source) == text
        assert render("{{ enable_thinking }}", enable_thinking=False) == "False"

    def test_any_text_passes_through(self) -> None:
        for text in ("\ud83d", "﷐\x00", "{{ 1 }}", "\r\n", "🦙"):
            assert rendered(template("{{ messages[0].content }}"), [{"role": "user", "content": text}]) == text

    def test_real_templates_write_what_their_models_were_trained_on(self) -> None:
        config = json.loads(shared("tokenizers", "qwen2_5", "tokenizer_config.json").read_text())
        brief = [{"role": "system", "content": "Be brief."}, *HELLO]
        assert rendered(for_folder(shared("tokenizers", "qwen2_5"), config), brief) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        )
        config = json.loads(shared("tokenizers", "llama3", "tokenizer_config.json").read_text())
        assert rendered(for_folder(shared("tokenizers", "llama3"), config), HELLO) == (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )


class TestWhatItCanNotDo:
    def test_errors_carry_the_templates_words(self) -> None:
        for source, complaint in (
            ("{{ raise_exception('Roles must alternate.') }}", r"Roles must alternate\.$"),
            ("{% if %}", "line 1"),
            ("a\n{{ 1 / 0 }}", "division by zero"),
            ("{{ messages[0].content.nope() }}", "nope"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe"),
            ("{% include '/etc/hostname' %}", "no loader"),
        ):
            with pytest.raises(LoadError, match=rf"^The model's chat template failed: .*{complaint}"):
                render(source)

    def test_a_hostile_template_ends_without_harm(self) -> None:
        """Each template takes all memory or the whole stack, and ends at once."""
        for source in (
            "{{ 'a' * 10**10 }}",
            "{{ ([0] * 10**8) * 10**8 }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ ('a' * 10**5).replace('a', 'b' * 10**6) }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ " + "(" * 5000 + ")" * 5000 + " }}",
            "{% set n = namespace(x='a') %}{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        ):
            with pytest.raises(LoadError, match=r"^The model's chat template failed: it "):
                render(source)
        assert render("fine") == "fine"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "source",
        [
            "{{ 9 ** 9 ** 9 }}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        ],
    )
    def test_a_template_that_takes_long_ends_at_the_limit(self, source: str) -> None:
        """Each computes for the seconds that a template has."""
        with pytest.raises(LoadError, match=r"^The model's chat template failed: it "):
            render(source)

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals that say why a process ended")
    @pytest.mark.parametrize(
        ("name", "reason"), [("SIGPROF", "it needs too much time"), ("SIGKILL", r"its process crashed \(SIGKILL\)")]
    )
    def test_the_error_names_the_signal_that_ended_the_worker(
        self, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
    ) -> None:
        slow = template("{% for _ in range(10**5) %}{% for _ in range(10**5) %}{% endfor %}{% endfor %}")
        slow._process._start()
        worker = slow._process._worker
        monkeypatch.setattr(worker, "tell", lambda *said: os.kill(worker.pid, getattr(signal, name)))
        with pytest.raises(LoadError, match=rf"failed: {reason}\.$"):
            rendered(slow, HELLO)

    def test_the_error_names_too_little_memory_for_an_answer(self) -> None:
        program = """
import json, runpy, sys
def dumps(answer):
    raise MemoryError
json.dumps = dumps
runpy.run_path(sys.argv[1], run_name="__main__")
"""
        command = [sys.executable, "-c", program, template_worker.__file__]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
            worker.communicate(b'"fine"\n[{}]\n', 60)
        assert limited_process.why_ended(worker.returncode) == "it needs too much memory"

    def test_a_worker_that_was_killed_while_idle_is_replaced(self) -> None:
        usable = template("fine")
        rendered(usable, HELLO)
        worker = usable._process._worker
        worker.kill()
        worker.wait(60)
        assert rendered(usable, HELLO) == "fine"

    def test_its_process_ends_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(templates, "LimitedProcess", limited_process.LimitedProcess)  # one of its own
        used = template("fine")
        rendered(used, HELLO)
        worker = used._process._worker
        assert worker.poll() is None
        del used
        assert worker.poll() is not None
