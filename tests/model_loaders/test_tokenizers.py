"""Text to ids and back, for every kind of vocabulary."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE

from polarlm.engine.sampling import detokenizer
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_folder, load_for_gguf, patterns
from tests.model_loaders import vocabularies as vocab
from tests.pairs import mostly_slow
from tests.shared_data import shared
from tests.tiny import VOCABULARY, tokenizer_json

VECTORS = {  # llama.cpp's name of its test vectors → tokenizers that must agree with them
    "llama-bpe": ("llama3-gguf",),  # the vocabularies in other files agree with it
    "qwen2": ("qwen2-gguf", "qwen2.5-json"),
    "llama-spm": ("llama2-gguf", "stories15M-json"),
}
KINDS = ("llama3-tiktoken", "qwen2.5-json", "llama2-model", "stories260K-json")  # a vocabulary of each library
WORDS = json.loads((Path(__file__).parents[1] / "fixtures" / "words.json").read_text(encoding="utf-8"))
SPECIAL_LOOKING = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<unk>", "<|eot_id|>", "<|begin_of_text|>", "<|", "|>", "<0x0A>", "<"]
)
TEXTS = st.lists(st.one_of(SPECIAL_LOOKING, st.text(max_size=12), st.sampled_from(" \n\t")), max_size=8).map("".join)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def expected_text(name: str, text: str) -> str:
    """What the bytes of a text's tokens spell: the text itself, but for what the model's authors normalise."""
    if name == "qwen2.5-json":
        return unicodedata.normalize("NFC", text)
    if name == "stories260K-json":
        text = re.sub(" {2,}", " ", text.strip(" "))
    if name in vocab.SENTENCE_PIECE:
        return " " * bool(text) + text.replace("▁", " ")
    return text


@pytest.mark.parametrize(("vectors", "name"), [(key, name) for key, names in VECTORS.items() for name in names])
def test_ids_agree_with_llama_cpps_vectors(vectors: str, name: str) -> None:
    stem = f"ggml-vocab-{vectors}.gguf"
    texts = shared("tokenizers", "llama.cpp-vocab", f"{stem}.inp").read_bytes().decode()
    lines = shared("tokenizers", "llama.cpp-vocab", f"{stem}.out").read_text()
    cases = texts.split("\n__ggml_vocab_test__\n")[:-1]  # the last is the end of the file
    tokenizer = vocab.real(name)
    assert len(cases) == lines.count("\n") > 40
    for text, line in zip(cases, lines.splitlines(), strict=True):
        assert tokenizer.tokenize(text) == [int(token_id) for token_id in line.split()], text


@mostly_slow("name", KINDS, KINDS[1:])  # Llama 3's takes six seconds
@given(text=TEXTS)
def test_the_bytes_of_the_tokens_spell_the_text_and_none_is_a_control_token(name: str, text: str) -> None:
    tokenizer, expected = vocab.real(name), expected_text(name, text)
    ids = tokenizer.tokenize(text)
    assert text_of(tokenizer, ids) == expected
    assert not set(ids) & set(tokenizer.control_tokens().values())
    assert text_of(tokenizer, tokenizer.tokenize(text, continued=True)) == expected[tokenizer.strips_leading_space :]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_names_of_control_tokens_come_back(name: str) -> None:
    """With the text around them, whether or not the tokenizer adds a space to it."""
    tokenizer = vocab.real(name)
    end = next(control for control, i in tokenizer.control_tokens().items() if i in tokenizer.eos_ids)
    for text in (f"the{end}end", f"{end}{end}end{end}", f"one{end}"):
        ids = tokenizer.tokenize(text, control=True)
        assert set(ids) & tokenizer.eos_ids
        assert detokenizer.text_of(tokenizer, ids, control=True) == text
        assert end not in text_of(tokenizer, ids)


@mostly_slow("name", ["llama3-json", "llama2-json"], ["llama2-json"])
@settings(max_examples=25)
@given(text=TEXTS)
def test_control_agrees_with_the_library_reading_the_whole_text(name: str, text: str) -> None:
    library = vocab.library(name)
    assert vocab.real(name).tokenize(text, control=True) == library.encode(text, add_special_tokens=False).ids


TAKES = {"<before>": {"lstrip": True}, "<behind>": {"rstrip": True}, "<both>": {"lstrip": True, "rstrip": True}}
TAKES |= {"<word>": {"single_word": True}, "word": {"single_word": True, "lstrip": True}}
SPACED = st.lists(
    st.one_of(st.sampled_from([*TAKES, "<neither>", " ", "  ", "\n", "a", "he", "\u3000", "\x1c"]), st.text(max_size=3))
).map("".join)


@cache
def spaced(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A tokenizer.json, of bytes or of pieces, whose control tokens take white space, and the library's reading. Those
    that are found in normalized text take none if its spaces are "▁"."""
    if kind != "pieces":
        tokens = [*pre_tokenizers.ByteLevel.alphabet(), "he"]
        library = tokenizers.Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [("h", "e")]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.normalizer = normalizers.Replace(" ", "▁") if kind == "normalized" else None
    else:
        library = tokenizers.Tokenizer.from_file(str(shared("tokenizers", "llama2", "tokenizer.json")))
    is_normalized = kind == "normalized"
    added = [tokenizers.AddedToken(name, special=True, normalized=is_normalized, **TAKES[name]) for name in TAKES]
    library.add_special_tokens(added)
    library.add_special_tokens(["<neither>"])
    with tempfile.TemporaryDirectory() as folder:
        library.save(str(Path(folder, "tokenizer.json")))
        return load_for_folder(Path(folder), {}, {}), library


@pytest.mark.parametrize("kind", ["bytes", "pieces", "normalized"])
@given(text=SPACED)
def test_control_tokens_take_white_space_as_the_library_has_it(kind: str, text: str) -> None:
    tokenizer, library = spaced(kind)
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.tokenize(text, control=True) == ids


@pytest.mark.parametrize("names", [("llama3-json", "llama3-tiktoken", "llama3-gguf"), ("llama2-gguf", "llama2-model")])
@given(text=TEXTS)
def test_the_same_vocabulary_in_other_files_gives_the_same_ids(names: tuple[str, ...], text: str) -> None:
    for control in (False, True):
        first, *others = (vocab.real(name).tokenize(text, control=control) for name in names)
        assert all(ids == first for ids in others)


# Models whose GGUF files do not say all: the real vocabulary that the model extends, what its file says, and its added
# tokens (name, GGUF's type, flags in tokenizer.json).
_BEHIND, _WORD = {"special": True, "rstrip": True}, {"special": False}
KNOWN_BY_NAME: dict[str, tuple[str, dict[str, str], list[tuple[str, int, dict[str, bool]]]]] = {
    "phi-3": (
        "llama2",
        {"general.name": "Phi 3.5 Mini"},
        [("<|endoftext|>", vocab.CONTROL, {"special": True})]
        + [(name, vocab.CONTROL, _BEHIND) for name in ("<|user|>", "<|assistant|>", "<|end|>", "<|placeholder1|>")],
    ),
    "phi-4-mini": (
        "llama3",
        {"general.architecture": "phi3", "general.name": "Phi 4 Mini Instruct"},
        [(name, vocab.CONTROL, _BEHIND) for name in ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")]
        + [(name, vocab.CONTROL, {"special": True}) for name in ("<|endoftext|>", "<|tool|>")],
    ),
    "gemma": (
        "llama3",
        {"general.architecture": "gemma3"},
        [("<end_of_turn>", vocab.USER_DEFINED, {"special": True}), ("</s>", vocab.CONTROL, _WORD)]
        + [(name, vocab.USER_DEFINED, _WORD) for name in ("<s>", "<b>", "</b>", "<table>", "\n\n\n")],
    ),
}


@cache
def known_by_name(model: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """The GGUF file's tokenizer, and the library's with the same vocabulary."""
    base, says, added = KNOWN_BY_NAME[model]
    metadata = {**vocab.metadata(f"{base}-gguf"), **says}
    for key, value in (("tokens", 0), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *(token[value] for token in added)]
    if base == "llama2":
        metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], *[0.0] * len(added)]
    library = tokenizers.Tokenizer.from_str(vocab.library(f"{base}-json").to_str())
    for name, _, flags in added:
        library.add_tokens([tokenizers.AddedToken(name, normalized=False, **flags)])
    return load_for_gguf(vocab.SimpleNamespace(path=Path("known.gguf"), metadata=metadata)), library


@mostly_slow("model", KNOWN_BY_NAME, ["phi-3"])
@given(data=st.data())
def test_what_a_gguf_file_does_not_say_is_known_by_name(model: str, data: st.DataObject) -> None:
    """Building each of the larger vocabularies twice takes four seconds."""
    tokenizer, library = known_by_name(model)
    names = [name for name, _, _ in KNOWN_BY_NAME[model][2]]
    parts = st.one_of(st.sampled_from([*names, " ", "  ", "\n", "a", "he", "\u3000", "\x1c"]), st.text(max_size=3))
    text = data.draw(st.lists(parts).map("".join))
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.tokenize(text, control=True) == ids


def test_a_mark_hides_control_strings_and_leaves_no_trace() -> None:
    tokenizer = load_for_gguf(vocab.tiny_bpe(("<|end|>", vocab.CONTROL)))
    assert text_of(tokenizer, tokenizer.tokenize("a\ud83d")) == "a�"  # half a surrogate pair
    assert tokenizer.tokenize("he<|end|>he<#|end|>", control=True, mark="#") == [
        *tokenizer.tokenize("he"), 257, *tokenizer.tokenize("he<|end|>")
    ]  # fmt: skip


@pytest.mark.parametrize("tiny", [vocab.tiny_bpe, vocab.tiny_spm])
def test_a_ggufs_user_defined_tokens_are_text_and_control_tokens_are_not(tiny) -> None:
    gguf = tiny(("<think>", vocab.USER_DEFINED), ("<|im_end|>", vocab.CONTROL))
    think, end = len(gguf.metadata["tokenizer.ggml.tokens"]) - 2, len(gguf.metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = load_for_gguf(gguf)
    ids = tokenizer.tokenize("<think>he<|im_end|>")
    assert think in ids
    assert end not in ids
    assert text_of(tokenizer, ids).strip() == "<think>he<|im_end|>"
    assert tokenizer.tokenize("<|im_end|>", control=True) == [end]
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.token_name(end) == "<|im_end|>"
    assert end in tokenizer.eos_ids


@pytest.mark.parametrize("kind", [vocab.CONTROL, vocab.USER_DEFINED])
def test_ends_that_a_gguf_names_or_that_are_known_by_name(kind: int) -> None:
    """</s> is a word where Gemma's turns are, whatever its type, unless the file says that it ends a text."""
    for more, ends in ENDS:
        for eos in (0, 2):  # <unk>, </s>
            gguf = vocab.tiny_spm(*more, **{"tokenizer.ggml.eos_token_id": eos})
            gguf.metadata["tokenizer.ggml.token_type"][2] = kind
            tokenizer = load_for_gguf(gguf)
            wanted = ends | {gguf.metadata["tokenizer.ggml.tokens"][eos]}
            assert {gguf.metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.eos_ids} == wanted
            assert tokenizer.token_bytes(2) == (b"" if "</s>" in wanted else b"</s>")
            assert (2 in tokenizer.tokenize("<s></s>")) == ("</s>" not in wanted)


ENDS: list[tuple[list[tuple[str, int]], set[str]]] = [
    # added tokens with their types, besides <unk>, <s> and </s>; and the ends
    ([("<end_of_turn>", vocab.CONTROL)], {"<end_of_turn>"}),
    ([("<turn|>", vocab.USER_DEFINED), ("<|tool_response>", vocab.NORMAL)], {"<turn|>", "<|tool_response>"}),
    ([("<EOT>", vocab.USER_DEFINED), ("[EOS]", vocab.NORMAL)], {"</s>", "<EOT>", "[EOS]"}),
    ([("<|file_sep|>", vocab.USER_DEFINED), ("<|repo_name|>", vocab.NORMAL)], {"</s>", "<|file_sep|>"}),
    ([("<|call|>", vocab.NORMAL), ("<|im_end|>", vocab.UNUSED)], {"</s>", "<|call|>", "<|im_end|>"}),
]


@pytest.mark.parametrize(
    ("says", "words"),
    [({}, ["E", "É"]), ({"lowercase": True}, ["e", "e"]), ({"lowercase": True, "strip_accents": False}, ["e", "é"])],
)
def test_a_gguf_says_how_words_are_normalized(says: dict[str, bool], words: list[str]) -> None:
    tokens = ["[UNK]", "[CLS]", "[SEP]", *(f"▁{letter}" for letter in "eéEÉ")]
    metadata = {"model": "bert", "tokens": tokens, "token_type": [vocab.CONTROL] * 3 + [vocab.NORMAL] * 4}
    metadata |= {"unknown_token_id": 0, **{f"normalizer.{key}": value for key, value in says.items()}}
    gguf = vocab.tiny_bpe(**{f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    tokenizer = load_for_gguf(gguf)
    assert [tokenizer.token_name(i).strip() for i in tokenizer.tokenize("E É")] == words


def test_a_unigram_vocabulary_has_the_defaults_of_llama_cpp() -> None:
    """Texts end with EOS and do not begin with BOS; white space before <mask> goes, as XLM-R has it."""
    gguf = vocab.tiny_spm(("<mask>", vocab.CONTROL), **{"tokenizer.ggml.model": "t5"})
    tokenizer = load_for_gguf(gguf)
    assert (tokenizer.bos_id, tokenizer.closing_id) == (None, 2)
    assert tokenizer.tokenize("he \n<mask>", control=True) == [*tokenizer.tokenize("he"), 263]


def test_a_vocabulary_without_types() -> None:
    """Bytes are known by their names, and control tokens by the keys that name them."""
    typed, gguf = vocab.tiny_spm(), vocab.tiny_spm()
    del gguf.metadata["tokenizer.ggml.token_type"]
    tokenizer = load_for_gguf(gguf)
    for text in ("he é\n", "<s>he</s>"):
        assert tokenizer.tokenize(text, control=True) == load_for_gguf(typed).tokenize(text, control=True)
    assert text_of(tokenizer, tokenizer.tokenize("he é\n")) == " he é\n"


def test_a_gguf_that_does_not_say_how_it_cuts_words_is_cut_as_llama_cpp_does() -> None:
    """Its default takes digits by three, from the left; GPT-2, all together."""
    merges = {"tokenizer.ggml.merges": ["h e", "1 2", "12 3", "123 4"]}
    more = tuple((token, vocab.NORMAL) for token in ("12", "123", "1234"))
    cuts = {}
    for pre in (None, "default", "gpt-2"):
        gguf = vocab.tiny_bpe(*more, **merges, **{"tokenizer.ggml.pre": pre})
        if pre is None:
            del gguf.metadata["tokenizer.ggml.pre"]
        tokenizer = load_for_gguf(gguf)
        cuts[pre] = [tokenizer.token_name(i) for i in tokenizer.tokenize("1234")]
    assert cuts == {None: ["123", "4"], "default": ["123", "4"], "gpt-2": ["1234"]}


def test_rebuilt_sentencepiece_vocabulary_obeys_the_files_settings() -> None:
    spaced, bare = (
        load_for_gguf(vocab.tiny_spm(**{"tokenizer.ggml.add_space_prefix": flag})) for flag in (True, False)
    )
    assert (text_of(spaced, spaced.tokenize("  he")), text_of(bare, bare.tokenize("  he"))) == ("   he", "  he")
    assert (spaced.strips_leading_space, bare.strips_leading_space) == (True, False)


def test_space_after_a_control_token_is_sentencepieces_own() -> None:
    tokenizer = vocab.real("llama2-model")
    library = sentencepiece.SentencePieceProcessor(model_file=str(shared("tokenizers", "llama2", "tokenizer.model")))
    assert tokenizer.tokenize("Hi</s>Hi", control=True) == [*library.encode("Hi"), 2, *library.encode("Hi")]


class TestBosAndEos:
    def test_bos_and_eos_of_known_models(self) -> None:
        for name, bos, eos in (
            ("llama3-gguf", "<|begin_of_text|>", {"<|end_of_text|>", "<|eot_id|>"}),
            ("llama3-json", "<|begin_of_text|>", {"<|end_of_text|>", "<|eot_id|>"}),
            ("llama3-tiktoken", "<|begin_of_text|>", {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}),
            ("qwen2-gguf", None, {"<|endoftext|>", "<|im_end|>"}),
            ("qwen2.5-json", None, {"<|endoftext|>", "<|im_end|>"}),
            ("llama2-gguf", "<s>", {"</s>"}),
            ("llama2-json", "<s>", {"</s>"}),
            ("llama2-model", "<s>", {"</s>"}),
        ):
            tokenizer = vocab.real(name)
            assert tokenizer.bos_id == (None if bos is None else tokenizer.control_tokens()[bos])
            assert tokenizer.eos_ids == {tokenizer.control_tokens()[string] for string in eos}

    def test_llama_3s_tiktoken_file_numbers_its_control_tokens_as_tokenizer_json_does(self) -> None:
        here, there = (vocab.real(name).control_tokens() for name in ("llama3-tiktoken", "llama3-json"))
        named = {string: i for string, i in there.items() if "reserved" not in string}
        assert named.items() <= here.items()
        assert sorted(here.values()) == sorted(there.values())

    def test_config_and_generation_config_add_ends(self) -> None:
        folder = shared("models", "stories260K")
        assert load_for_folder(folder, {"eos_token_id": 7}, {}).eos_ids == {2, 7}
        assert load_for_folder(folder, {}, {"eos_token_id": [7, 2]}).eos_ids == {2, 7}

    @pytest.mark.parametrize("tiny", [vocab.tiny_bpe, vocab.tiny_spm])
    def test_a_gguf_says_whether_bos_is_added(self, tiny) -> None:
        def bos(**metadata: object) -> int | None:
            return load_for_gguf(tiny(**{"tokenizer.ggml.bos_token_id": 1}, **metadata)).bos_id

        assert bos(**{"tokenizer.ggml.add_bos_token": True}) == 1
        assert bos(**{"tokenizer.ggml.add_bos_token": False}) is None
        assert bos() == (1 if tiny is vocab.tiny_spm else None)

    def test_tokenizer_config_overrules_the_vocabularys_habit(self, tmp_path: Path) -> None:
        shutil.copy(shared("tokenizers", "llama2", "tokenizer.json"), tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
        assert load_for_folder(tmp_path, {}, {}).bos_id is None

    @pytest.mark.parametrize("flag", [None, False, True])
    def test_gemma_4_begins_with_bos_whatever_its_files_say(self, flag: bool | None, tmp_path: Path) -> None:
        more = [("<bos>", vocab.CONTROL), ("<turn|>", vocab.CONTROL)]
        gguf = vocab.tiny_spm(*more, **{"tokenizer.ggml.bos_token_id": 263, "tokenizer.ggml.add_bos_token": flag})
        assert load_for_gguf(gguf).bos_id == 263
        shutil.copy(shared("tokenizers", "llama2", "tokenizer.json"), tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": flag}))
        assert load_for_folder(tmp_path, {"model_type": "gemma4"}, {}).bos_id == 1

    def test_a_gguf_that_names_no_token(self, caplog: pytest.LogCaptureFixture) -> None:
        """An id that its vocabulary lacks is left out with a warning; where none is named, llama.cpp's is taken."""
        for value in (100000, "<s>"):
            caplog.clear()
            assert load_for_gguf(vocab.tiny_spm(**{"tokenizer.ggml.bos_token_id": value})).bos_id is None
            warned = f"tiny.gguf: tokenizer.ggml.bos_token_id is {value!r}, which is none of its 263 tokens"
            assert [warned in message for message in caplog.messages] == [True]
        gguf = vocab.tiny_spm()
        del gguf.metadata["tokenizer.ggml.bos_token_id"]
        assert load_for_gguf(gguf).bos_id == 1

    @pytest.mark.parametrize("tiny", [vocab.tiny_bpe, vocab.tiny_spm])
    def test_an_end_that_a_gguf_takes_for_a_word_is_a_control_token(self, tiny) -> None:
        """If its name or a key says that it is an end, and text never becomes it."""
        gguf = tiny(("<eos>", vocab.NORMAL), ("<|fin|>", vocab.NORMAL), ("<x>", vocab.NORMAL))
        size = len(gguf.metadata["tokenizer.ggml.tokens"])
        gguf.metadata["tokenizer.ggml.eot_token_id"] = size - 2
        tokenizer = load_for_gguf(gguf)
        assert {size - 3, size - 2} <= tokenizer.eos_ids
        assert tokenizer.tokenize("<eos><|fin|>", control=True)[-2:] == [size - 3, size - 2]
        assert tokenizer.token_bytes(size - 3) == tokenizer.token_bytes(size - 2) == b""
        assert tokenizer.token_bytes(size - 1) == b"<x>"
        assert not tokenizer.eos_ids & set(tokenizer.tokenize("<eos><|fin|>"))

    def test_an_end_that_is_merged_stays_a_word(self) -> None:
        merges = ["< /", "</ s", "</s >"]
        words = ("</", "</s", "</s>")
        gguf = vocab.tiny_bpe(*((word, vocab.NORMAL) for word in words), **{"tokenizer.ggml.merges": merges})
        tokenizer = load_for_gguf(gguf)
        assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"</s>"
        assert tokenizer.vocab_size - 1 not in tokenizer.eos_ids

    def test_the_end_that_tokenizer_config_names_is_a_control_token(self, tmp_path: Path) -> None:
        library = tokenizers.Tokenizer.from_file(str(shared("tokenizers", "llama2", "tokenizer.json")))
        library.add_tokens(["<|fin|>", "<tool>"])
        library.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|fin|>"}}')
        tokenizer = load_for_folder(tmp_path, {}, {})
        end = tokenizer.control_tokens()["<|fin|>"]
        assert end in tokenizer.eos_ids
        assert end not in tokenizer.tokenize("<|fin|>")
        assert "<tool>" not in tokenizer.control_tokens()

    def test_smollm2_has_no_bos(self, demo_path: Path) -> None:
        from polarlm.model_loaders.files.gguf_file import GgufFile

        tokenizer = load_for_gguf(GgufFile(demo_path))
        assert tokenizer.bos_id is None
        ends = ("<|im_end|>", "<|endoftext|>", "<reponame>")
        assert tokenizer.eos_ids == {tokenizer.control_tokens()[name] for name in ends}
        assert text_of(tokenizer, tokenizer.tokenize("Grüße 2024 🦙")) == "Grüße 2024 🦙"


def sentencepiece_folder(folder: Path, **settings: object) -> Path:
    """A folder with the tiny SentencePiece vocabulary, and with settings in tokenizer_config.json; returns it."""
    model = sentencepiece_model_pb2.ModelProto()
    metadata = vocab.tiny_spm().metadata
    for token, kind, score in zip(
        *(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores")), strict=True
    ):
        model.pieces.add(piece=token, type=kind, score=score)
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


ADDED = {"263": {"content": "<|im_end|>", "special": True}, "264": {"content": "<tool_call>", "special": False}}


class TestTokenizerModelFolders:
    def test_added_tokens_follow_the_vocabulary(self, tmp_path: Path) -> None:
        tokenizer = load_for_folder(sentencepiece_folder(tmp_path, added_tokens_decoder=ADDED), {}, {})
        assert tokenizer.vocab_size == 265
        assert tokenizer.tokenize("<|im_end|>", control=True) == [263]
        assert 263 not in tokenizer.tokenize("<|im_end|>")
        assert 264 in tokenizer.tokenize("he<tool_call>")
        assert 263 in tokenizer.eos_ids

    def test_ids_beyond_the_embedding_are_in_no_text(self, tmp_path: Path) -> None:
        folder = sentencepiece_folder(tmp_path, added_tokens_decoder=ADDED, add_bos_token=True)
        tokenizer = load_for_folder(folder, {"bos_token_id": 1, "eos_token_id": [2, 100_000, 2**32 - 1]}, {})
        tokenizer.keep_rows(263)
        assert tokenizer.left_out == (range(263, 265), {100_000})  # 2³² − 1 is none
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (263, 1, {2})
        assert text_of(tokenizer, tokenizer.tokenize("he<|im_end|><tool_call>he", control=True)) == " he<|im_end|>he"
        tokenizer.keep_rows(1)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, frozenset())

    def test_an_added_word_beyond_the_embedding_is_plain_text(self, tmp_path: Path) -> None:
        library = tokenizers.Tokenizer.from_str(tokenizer_json())
        library.add_tokens([tokenizers.AddedToken("ice"), tokenizers.AddedToken("rain")])
        (tmp_path / "tokenizer.json").write_text(library.to_str())
        tokenizer = load_for_folder(tmp_path, {}, {})
        tokenizer.keep_rows(VOCABULARY + 1)
        ids = tokenizer.tokenize("ice and rain")
        assert VOCABULARY in ids
        assert text_of(tokenizer, ids) == "ice and rain"

    def test_added_tokens_take_white_space(self, tmp_path: Path) -> None:
        added = {"263": {"content": "<|end|>", "special": True, "rstrip": True}, "²": {}, "264": None}
        tokenizer = load_for_folder(sentencepiece_folder(tmp_path, added_tokens_decoder=added), {}, {})
        assert tokenizer.tokenize("he<|end|>\n he", control=True) == tokenizer.tokenize("he<|end|>he", control=True)

    def test_space_only_at_the_start_unless_legacy(self, tmp_path: Path) -> None:
        tokenizer = load_for_folder(sentencepiece_folder(tmp_path, legacy=False), {}, {})
        assert text_of(tokenizer, tokenizer.tokenize("he</s>he", control=True)) == " hehe"


def test_words_are_cut_as_llama_cpp_cuts_them() -> None:
    """The file has the words of its `unicode_regex_split`, as in llama-cpp-python 0.3.36. SmolLM3 and OLMo 2
    have the expression of Llama 3, but words of the vocabulary are not taken whole there."""
    for name, words in {**WORDS, **dict.fromkeys(("smaug-bpe", "dbrx"), WORDS["llama-bpe"])}.items():
        cutter = patterns.pre_tokenizer(name)
        assert {text: [text[slice(*span)] for _, span in cutter.pre_tokenize_str(text)] for text in words} == words
    assert not patterns.takes_known_words_whole("smaug-bpe")


CUTS = [  # as the expressions of the published tokenizers do; 4,000 random texts have llama.cpp's tokens in qwen35
    ("qwen2", "n\u0303o it's 12!\n x", ["n", "\u0303o", " it", "'s", " ", "1", "2", "!\n", " x"]),
    ("qwen35", "n\u0303o it's 12!\n x", ["n\u0303o", " it", "'s", " ", "1", "2", "!\n", " x"]),
    (
        "gpt-4o",
        "HelloWorld's ABCdef 1234 a:/\n x",
        ["Hello", "World's", " ABCdef", " ", "123", "4", " a", ":/\n", " x"],
    ),
    ("lfm2", "it's 1234 a", ["it", "'s", " ", "123", "4", " a"]),
    ("glm4", "it's 1234 a", ["it", "'s", " ", "123", "4", " a"]),
    # A word begins at any script's capitals; llama.cpp considers the case of ASCII letters only.
    ("hunyuan-dense", "x_id=1234 春がn\u0303o!\n", ["x", "_id", "=", "123", "4", " ", "春が", "n\u0303o", "!\n"]),
    ("command-r", "it's 12!\n x", ["it", "'s", " ", "1", "2", "!", "\n", " x"]),
    ("tekken", "ÉcoleÉLÈVE жЖ", ["École", "ÉLÈVE", " ж", "Ж"]),
]


def test_words_are_cut_as_the_models_were_trained() -> None:
    for name, text, words in CUTS:
        assert [text[slice(*span)] for _, span in patterns.pre_tokenizer(name).pre_tokenize_str(text)] == words
        assert patterns.takes_known_words_whole(name) == (name in ("lfm2", "tekken"))


class TestErrors:
    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        for file, content in (
            ("tokenizer.model", b""),
            ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\n"),
            ("tokenizer.model", b"IQ== 0\n!!!! 1\n"),
            ("tokenizer.model", b"IQ== 0\nIg==\n"),
            ("tokenizer.json", b"{"),
            ("tokenizer.json", b"[]"),
            ("tokenizer.json", b"\xff\xfe"),
            ("tokenizer.json", b'{"model": {"type": "BPE"}}'),
        ):
            (tmp_path / file).write_bytes(content)
            with pytest.raises(LoadError, match=re.escape(str(tmp_path / file))):
                load_for_folder(tmp_path, {}, {})

    @pytest.mark.parametrize(("charsmap", "reads"), [("AAAA", False), ("BAAAAP////8=", True)])
    def test_a_panic_of_the_library_is_an_error_like_others(self, tmp_path: Path, charsmap: str, reads: bool) -> None:
        damaged = json.loads(tokenizer_json())
        damaged["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
        (tmp_path / "tokenizer.json").write_text(json.dumps(damaged))
        with pytest.raises(LoadError, match="Tokenizing failed" if reads else re.escape(str(tmp_path))):
            load_for_folder(tmp_path, {}, {}).tokenize("a ship")

    def test_a_damaged_tokenizer_config_is_named(self, tmp_path: Path) -> None:
        (sentencepiece_folder(tmp_path) / "tokenizer_config.json").write_text("[]")
        with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
            load_for_folder(tmp_path, {}, {})

    def test_an_unusable_gguf_vocabulary(self) -> None:
        for tiny, key, value, complaint in (
            (vocab.tiny_bpe, "model", "rwkv", "'rwkv'"),
            (vocab.tiny_spm, "tokens", "text", r"tokenizer\.ggml\.tokens"),
            (vocab.tiny_bpe, "tokens", [1, 2], r"tokenizer\.ggml\.tokens"),
            (vocab.tiny_spm, "token_type", [1], r"1 entries in tokenizer\.ggml\.token_type"),
            (vocab.tiny_bpe, "pre", "jina-v9", "jina-v9.*llama-bpe"),
            (vocab.tiny_bpe, "merges", None, "merges"),
            (vocab.tiny_bpe, "merges", ["no such"], "merges"),
            (vocab.tiny_bpe, "merges", ["single"], "merges"),
            (vocab.tiny_spm, "scores", [0.0], "scores"),
            (vocab.tiny_spm, "token_type", [vocab.UNKNOWN] * 263, "vocabulary"),
            (vocab.tiny_spm, "token_type", [9] * 263, "token_type"),
        ):
            with pytest.raises(LoadError, match=rf"^tiny\.gguf .*{complaint}"):
                load_for_gguf(tiny(**{f"tokenizer.ggml.{key}": value}))

    def test_empty_and_repeated_entries_are_padding(self) -> None:
        tokenizer = load_for_gguf(vocab.tiny_spm(("", vocab.NORMAL), ("he", vocab.NORMAL)))
        assert tokenizer.vocab_size == 265
        assert text_of(tokenizer, tokenizer.tokenize("he")) == " he"
