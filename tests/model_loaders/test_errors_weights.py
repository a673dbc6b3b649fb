"""Bad input ends in one sentence that names the file, what is wrong with it, and what to do."""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.safetensors_source import open_safetensors, read_header
from polarlm.model_loaders.files.tensors import READABLE, StoredWeights
from tests.model_loaders.checkpoints import MODELS, as_gguf, copied, finish, read, read_all, safetensors_file
from tests.model_loaders.hub_server import Hub


def refused(path: Path | str) -> str:
    with pytest.raises(LoadError) as caught:
        load_weights(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a model in one file, for breaking."""
    return Path(shutil.copytree(MODELS / "llama_mha", tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "mistral_window_sharded", tmp_path / "sharded"))


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_header(path: Path, change: Callable[[dict], object]) -> None:
    """Changes the header of a safetensors file, and keeps its data."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    safetensors_file(path, header, raw[8 + length :])


def test_a_name_on_a_hub_is_told_from_a_path(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused("meta-llama/Llama-3.2-1B")
    assert message.startswith("There is no model meta-llama/Llama-3.2-1B on the hub (")
    assert "nor is there such a folder here" in message
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("./llama3", "../x", "~/x", "C:\\x", "C:/x", "models/llama3.gguf", "models/x"):
        message = refused(path)
        assert message.startswith(f"{os.path.expanduser(path)} does not exist")
        assert "hub" not in message
    for name, words in (("llama3", "llama3"), ("qwen3:0.6b", "qwen3+0.6b"), ("library/phi4/x:latest", "x")):
        message = refused(name)
        assert message.startswith(f"{name} does not exist; give USER/REPO of the Hugging Face hub, such as Qwen/")
        assert f"/models?library=gguf&search={words} what there is." in message


def test_a_name_of_another_program_leads_to_the_model_that_is_here(tmp_path: Path, hub: Hub) -> None:
    for repo in ("Qwen--Qwen3-0.6B-GGUF", "Qwen--Qwen3-4B-GGUF"):
        file = Path(constants.HF_HUB_CACHE, f"models--{repo}", "snapshots", "1", "m-Q8_0.gguf")
        file.parent.mkdir(parents=True)
        file.touch()
    assert refused("qwen3:0.6b") == "qwen3:0.6b does not exist; give Qwen/Qwen3-0.6B-GGUF:Q8_0."
    assert "give USER/REPO" in refused("qwen3")  # of two


def test_an_odd_value_that_is_not_needed(folder: Path) -> None:
    whole = (folder / "config.json").read_text()
    odd = [("architectures", value) for value in ("LlamaForCausalLM", {"a": 1}, [None])]
    odd += [(key, value) for key in ("quantization_config", "rope_scaling") for value in ([], "", False, {})]
    for key, value in odd:
        (folder / "config.json").write_text(json.dumps({**json.loads(whole), key: value}))
        load_weights(folder)[1].close()


# Tensors against the configuration


def moved(new: str, old: str = "lm_head.weight") -> Callable[[dict], object]:
    """A change of a header: a tensor gets another name."""
    return lambda header: header.update({new: header.pop(old)})


NORM, Q_OF_FOUR = "model.norm.weight", "model.layers.3.self_attn.q_proj.weight"
Q_BIAS, FREQUENCIES = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"
# A stored model, what changes in its configuration, and the sentence.
MISFITS: list[tuple[str, dict[str, object], str]] = [
    ("llama_mha", {"intermediate_size": 65}, r"gate_proj\.weight has the shape \(64, 32\), .* asks for \(65, 32\)"),
    ("llama_mha", {"num_hidden_layers": 3}, r"lacks the tensor model\.layers\.2\.input_layernorm\.weight.* and 6 more"),
    ("llama_mha", {"quantization_config": {"quant_method": "mxfp4"}}, "has a quantization_config"),
    ("gpt_oss_mxfp4", {"quantization_config": {"quant_method": "gptq"}}, "has a quantization_config"),
    ("gpt_oss_transposed", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("gpt_oss_transposed", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
    ("olmoe_all_heads", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but .* only 8 experts"),
    ("olmoe_all_heads", {"num_experts": 9}, r"lacks .*experts\.8\.gate_proj.* and 3 more"),
    ("gemma4_experts_beside", {"top_k_experts": 5}, "top_k_experts is 5, but each layer has only 4"),
    ("deepseek_v3_yarn", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3_yarn", {"kv_lora_rank": 23}, "kv_lora_rank.*even"),
    ("deepseek_v3_yarn", {"n_group": 3, "topk_group": 2}, "n_group.*divide 8 experts"),
    ("deepseek_v3_yarn", {"n_group": 8, "topk_group": 4}, "n_group.*divide 8 experts"),  # a group's score is of two
    ("deepseek_v3_yarn", {"n_group": 4, "topk_group": 1}, "topk_group.*3 experts"),
    ("deepseek_v3_yarn", {"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
    ("qwen3_5_tied", {"layer_types": ["linear_attention"] * 4}, "a model without attention in any layer is not"),
    ("qwen3_5_tied", {"layer_types": ["linear_attention", "mamba"] * 2}, "must say linear_attention or full_attention"),
    ("qwen3_5_tied", {"linear_num_value_heads": 3}, "not a multiple of the 2 key heads"),
    ("qwen3_5_tied", {"linear_num_key_heads": 1}, "has the shape"),
    ("granite_hybrid_tied", {"layer_types": ["mamba"] * 3}, "without attention in any layer"),
    ("granite_hybrid_tied", {"layer_types": ["mamba", "linear"]}, "must say mamba, linear_attention, "),
    ("granite_hybrid_tied", {"mamba_n_groups": 3}, "not a multiple of the 3 groups"),
    ("granite_hybrid_tied", {"mamba_d_head": "auto", "mamba_n_heads": 5}, "does not divide the 64 channels"),
    ("granite_hybrid_experts", {"num_local_experts": 5}, "asks for .* belong to different models"),
    ("nemotron_h_dense", {"layers_block_type": ["mlp", "mamba", "attention"]}, "a network that does not follow"),
    ("nemotron_h_dense", {"layers_block_type": ["mamba", "attention"]}, "a model without networks"),
    ("nemotron_h_dense", {"layers_block_type": ["mamba", "rwkv"]}, "must name linear_attention"),
    ("nemotron_h_dense", {"mlp_hidden_act": "silu"}, "only relu2 is supported"),
    ("nemotron_h_latent", {"moe_latent_size": 8}, "has the shape"),
    ("nemotron_h_experts", {"n_group": 2}, "chosen by groups"),
    ("kimi_linear_nope", {"mla_use_nope": False}, "mla_use_nope is False, but only True"),
    (
        "kimi_linear_nope",
        {"linear_attn_config": {"full_attn_layers": []}},
        "a model without attention in any layer is not",
    ),
    ("kimi_linear_nope", {"linear_attn_config": {"full_attn_layers": [3]}}, "lacks the tensor model.layers.1"),
]


def test_a_configuration_that_does_not_fit_its_weights_or_is_not_supported(tmp_path: Path) -> None:
    for number, (name, changes, sentence) in enumerate(MISFITS):
        assert re.search(sentence, refused(copied(name, tmp_path / str(number), **changes))), changes


EXPERTS, OF_ALL = "model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.0.experts.gate_up_proj"
Tensors = dict[str, np.ndarray]
# A stored model, what happens to its tensors, and the sentence.
UNFIT: list[tuple[str, Callable[[Tensors], object], str]] = [
    (
        "llama_mha",
        lambda x: x.update({Q_BIAS: x.pop("lm_head.weight")}),
        f"has the tensor '{Q_BIAS}'",
    ),
    ("llama_mha", lambda x: x.update({NORM: x[NORM].astype(np.int32)}), r"model\.norm\.weight is stored as I32.*F32"),
    ("olmoe_all_heads", lambda x: x.update({EXPERTS: x[EXPERTS][:31]}), r"experts\.3\.down_proj.* has the shape \(31"),
    ("gemma4_experts_beside", lambda x: x.update({OF_ALL: x[OF_ALL][:3]}), r"\(3, 32, 64\), but .* \(4, 32, 64\)"),
    ("qwen3_5_tied", lambda x: x.pop(Q_OF_FOUR), r"lacks the tensor model\.layers\.3\.self_attn\.q_proj\.weight"),
]


def test_tensors_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    for number, (name, change, sentence) in enumerate(UNFIT):
        file = copied(name, tmp_path / str(number)) / "model.safetensors"
        tensors = read_all(open_safetensors(file.parent))
        change(tensors)
        save_file(tensors, file)
        assert re.search(sentence, refused(file.parent))


def test_derived_tensors_of_old_checkpoints_are_ignored_and_a_missing_head_is_tied(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_weights(folder)[1].names()
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    edit_header(folder / "model.safetensors", moved(FREQUENCIES))
    config, weights, _ = load_weights(folder)
    assert config.tied_head
    assert not weights.names() & {"lm_head.weight", FREQUENCIES}


# safetensors files


def test_a_file_of_another_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for keep in (5, 8, 100, 3000, -1):
        path.write_bytes(whole[:keep])
        message = refused(folder)
        assert "model.safetensors" in message
        assert "truncated" in message
    path.write_bytes(whole + b"\0")
    assert "1 bytes follow" in refused(folder)
    for length in (2**64 - 1, 101_000_000, 3):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        assert f"header of {length:,}" in refused(folder)


def test_a_name_that_cannot_be_printed(folder: Path) -> None:
    """JSON can hold halves of surrogate pairs, and printing one would raise."""
    edit_header(folder / "model.safetensors", moved("model.layers.0.\ud800"))
    refused(folder).encode()


ELSEWHERE = ("../secret.safetensors", "/etc/passwd", "a\\b.safetensors", "weights.bin", "", "\ud800.safetensors")
INDICES: list[tuple[dict[str, object], str]] = [
    ({"model.layers.0.nothing.weight": "model-00001-of-00004.safetensors"}, "lacks the tensor 'model.layers.0.nothing"),
    *(({"a.weight": name}, "which is not a safetensors file in this folder") for name in ELSEWHERE),
    ({"a.weight": 7}, "a.weight is 7"),
    ({"\ud800": 7}, "is 7"),
]


def test_an_index_that_does_not_fit(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00004.safetensors", sharded.parent / "secret.safetensors")
    index = sharded / "model.safetensors.index.json"
    whole = index.read_text()
    for places, sentence in INDICES:
        index.write_text(whole)
        edit_json(index, lambda content, places=places: content["weight_map"].update(places))
        message = refused(sharded)
        assert sentence in message
        message.encode()  # can be printed


def header_error(path: Path, header: object, data: bytes = b"") -> str:
    source = FileBytes(safetensors_file(path, header, data))
    with pytest.raises(LoadError) as caught:
        read_header(source)
    source.close()
    return str(caught.value)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


HEADERS: list[tuple[object, str]] = [
    (b"not json", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 50_000, "not JSON"),
    ([], "not a JSON object"),
    ({"x": 1}, "'x'"),
    ({"x": {}}, "'x'"),
    ({"x": entry(dtype=1)}, "type 1"),
    ({"x": entry(dtype="F4")}, "F4"),
    ({"x": entry(shape="2")}, "shape"),
    ({"x": entry(shape=[-2])}, "shape"),
    ({"x": entry(shape=[True])}, "shape"),
    ({"x": entry(shape=[1] * 9)}, "shape"),
    ({"x": entry(shape=[2**62, 2**62])}, "takes 8 bytes"),
    ({"x": entry(data_offsets=[0])}, "place"),
    ({"x": entry(data_offsets=[-8, 0])}, "place"),
    ({"x": entry(data_offsets=[8, 0])}, "takes -8 bytes"),
    ({"x": entry(data_offsets=[0, 2**70])}, "place"),
    ({"x": entry(data_offsets=[4, 12])}, "not at 0"),
    ({"x": entry(), "y": entry()}, "not at 8"),
    ({"x": entry(), "y": entry(data_offsets=[8, 16])}, "truncated"),
    (b'{"x": {}, "x": {}}', "twice"),
    ({"\ud800": entry(shape=[3])}, "ud800"),
]


def test_hostile_headers(tmp_path: Path) -> None:
    for header, problem in HEADERS:
        message = header_error(tmp_path / "x.safetensors", header, bytes(8))
        assert problem in message
        assert str(tmp_path / "x.safetensors") in message
        message.encode()  # can be printed


# GGUF files


def gguf_error(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(LoadError) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def gguf_bytes(tensors: int, entries: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


GGUF_HEADERS = [
    *((raw, "not a GGUF file") for raw in (b"PK\3\4" + bytes(100), b"mine=1\n")),
    (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version field 0x1"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(100), "little-endian"),
    (b"", "is empty; download it again"),
    (b"GGUF\3", "truncated"),
    (gguf_bytes(2**60, 0, b""), "counts"),
    (gguf_bytes(0, 2**60, b""), "counts"),
    (gguf_bytes(0, 1, struct.pack("<Q", 2**63) + bytes(99)), "counts"),
    (gguf_bytes(0, 1, text(b"k" * 70_000) + bytes(99)), "a name"),
    (gguf_bytes(0, 1, text(b"key") + struct.pack("<I", 99) + bytes(99)), "type number 99"),
    (gguf_bytes(0, 1, text(b"key") + struct.pack("<IIQ", 9, 9, 1) + bytes(99)), "type number 9"),
    (gguf_bytes(0, 1, text(b"key") + struct.pack("<IIQ", 9, 8, 2**50) + bytes(99)), "counts"),
    (gguf_bytes(0, 1, text(b"key") + struct.pack("<IIQQ", 9, 8, 1, 2**50) + bytes(99)), "truncated"),
    (gguf_bytes(0, 1, text(b"key") + struct.pack("<IIQ", 9, 4, 25) + bytes(99)), "counts"),
    (gguf_bytes(0, 2, 2 * (text(b"key") + struct.pack("<IB", 0, 1)) + bytes(99)), "twice"),
    (gguf_bytes(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 3)), "alignment 3"),
    (gguf_bytes(1, 0, text(b"t") + struct.pack("<I", 5) + bytes(99)), "5 dimensions"),
    (gguf_bytes(1, 0, text(b"t") + struct.pack("<IIQ", 0, 8, 0) + bytes(99)), "multiple of the 32"),
    (gguf_bytes(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 77, 0) + bytes(99)), "type number 77"),
    (gguf_bytes(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(99)), "multiple of the 32"),
    (gguf_bytes(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 2**63, 0, 0) + bytes(99)), "truncated"),
    (gguf_bytes(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(99)), "truncated"),
    (gguf_bytes(2, 0, 2 * (text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)) + bytes(99)), "twice"),
]


def test_hostile_gguf_headers(tmp_path: Path) -> None:
    for raw, problem in GGUF_HEADERS:
        assert problem in gguf_error(tmp_path / "x.gguf", raw)


def test_gguf_types_that_are_not_supported(tmp_path: Path) -> None:
    config, weights, _ = load_weights(MODELS / "llama_mha")
    tensors = read_all(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    message = refused(as_gguf(tmp_path / "model.gguf", "llama", config, tensors))
    assert "output_norm.weight" in message  # the file's own name
    assert "F64" in message


# Fuzz: whatever the bytes, it is a LoadError or a model


def valid_safetensors() -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}, "x": entry(), "y": entry(data_offsets=[8, 16])}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def valid_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("tokens", ["a", "bc"])
        writer.add_uint32("general.alignment", 32)
        writer.add_array("scores", [0.5, 1.0])
        writer.add_tensor("x", np.zeros((2, 32), np.float32))
        finish(writer)
        return path.read_bytes()


VALID_GGUF = valid_gguf()
_EDITS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=4
)  # (where, how many bytes go, what comes instead)


def edited(raw: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for start, count, new in edits:
        raw = raw[:start] + new + raw[start + count :]
    return raw


def parse(path: Path) -> StoredWeights:
    """The tensors of a file of either format, of any model."""
    if path.suffix == ".gguf":
        file = GgufFile(path)
        return StoredWeights(path, file.tensors, file.files)
    source = FileBytes(path)
    try:
        return StoredWeights(path, read_header(source), [source])
    except LoadError:
        source.close()
        raise


def read_or_refuse(path: Path, raw: bytes) -> bool:
    """Whether the bytes are accepted; if so, checks that all tensors of supported types can be read."""
    path.write_bytes(raw)
    try:
        weights = parse(path)
    except LoadError:
        return False
    for name in weights.names():
        if weights.stored_dtype(name) in READABLE:
            read(weights, name)
    weights.close()
    return True


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=40)
@given(edits=_EDITS)
def test_edited_files(edits: list[tuple[int, int, bytes]], scratch: Path) -> None:
    for name, valid in (("x.safetensors", valid_safetensors()), ("x.gguf", VALID_GGUF)):
        assert read_or_refuse(scratch / name, valid)
        read_or_refuse(scratch / name, edited(valid, edits))


_VALUES = st.none() | st.booleans() | st.integers(-3, 40) | st.text(max_size=4) | st.sampled_from(["F32", "BF16"])
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8"]) | _VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | _VALUES,
        "data_offsets": st.tuples(st.integers(-1, 40), st.integers(-1, 40)) | _VALUES,
    }
)


@settings(max_examples=25)
@given(header=st.dictionaries(st.text(max_size=3), _ENTRIES | _VALUES, max_size=3), size=st.integers(0, 60))
def test_any_json_header(header: dict[str, object], size: int, scratch: Path) -> None:
    raw = json.dumps(header).encode()
    read_or_refuse(scratch / "x.safetensors", struct.pack("<Q", len(raw)) + raw + bytes(size))
