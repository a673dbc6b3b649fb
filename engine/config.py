"""Settings as frozen dataclasses. Command-line flags, `--help` and docs/flags.md are generated from them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from polarlm.engine import limits
from polarlm.engine.errors import EngineError

DEFAULT_CACHE_TYPE = "balanced"
AS_STORED = "as-stored"
AUTO = "auto"  # tensor_split, cpu_moe: as memory allows; input_bits: as the CPU has


def setting(default: Any = MISSING, *flags: str, help: str, **metadata: Any) -> Any:
    """A dataclass field with the names of its flag and the help for it.

    metadata: the rest of what `engine.cli.flags` reads. A field without flags is not on the command line.
    elsewhere: names of it in other programs. names: of its values there → the values.
    """
    metadata = {"flags": flags, "help": help, **metadata}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


_MODEL_HELP = "folder of safetensors, a .gguf file, or USER/REPO of the Hugging Face hub; without it, a demonstration"
_HUB_HELP = "model of the Hugging Face hub, such as Qwen/Qwen3-4B-GGUF:Q4_K_M; without QUANT, the best file that fits"


def model_setting(more: str = "", *, is_word: bool = True) -> Any:
    """The field of a model: a word of the command line, unless others may stand there, or the value of a flag, the same
    in every command."""
    flags = *(("MODEL",) if is_word else ()), "--weights", "-m", "--model"
    return setting(None, *flags, metavar="MODEL", help=_MODEL_HELP + more, elsewhere=("model_path", "model_id"))


def hub_setting(more: str = "") -> Any:
    """The field of a model that is on the hub even if a folder here has its name."""
    return setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=_HUB_HELP + more)


FORMER_SETTINGS = {
    **dict.fromkeys(
        ("batches", "max_batches_size"), "polarlm batch FILE --url URL sends a file of requests to a server"
    ),
    **dict.fromkeys(
        ("kv_events", "kv_events_topic"),
        "there are no messages for routers; one that hashes a header, as nginx does, keeps a conversation on a server",
    ),
    **dict.fromkeys(
        ("typical_p", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
        "there is no such sampler; top_n_sigma, min_p and XTC are there",
    ),
    "tile_cache": "weights are packed at each start; leave it out",
    "cache_remote": "--kv-store shares conversations by a folder or an object store, such as s3://bucket/prefix",
    "share_blocks": "servers share conversations by a folder or an object store that each names with --kv-store",
    "prefill_at": "an engine elsewhere with the same --kv-store computes prompts for this one, as does a copied pack",
    **dict.fromkeys(
        ("encoding", "write"),
        "an engine takes the scales of its first pack, as polarlm pack --like does; machines with one pack share what "
        "--kv-store keeps",
    ),
}
"""Settings that have been removed, by their names in Python → what to do instead."""


class Settings:
    """A dataclass of settings. An unknown name raises EngineError with the field that it means: the field's name on the
    command line, in JSON or in another program, or one that resembles it."""

    def __new__(cls, *_: Any, **settings: Any) -> Settings:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in names:
                meant = names_of(cls).get(name) or next(iter(get_close_matches(name, names, n=1)), None)
                advice = f"did you mean {meant}?" if meant else f"there are {', '.join(sorted(names))}"
                advice = FORMER_SETTINGS.get(name, advice)
                raise EngineError(f"{cls.__name__} has no setting {name!r}; {advice}")
        return super().__new__(cls)


def names_of(cls: type) -> dict[str, str]:
    """The names that the fields of a dataclass of settings have: in Python, on the command line, in JSON and in other
    programs, as Python writes names → field."""
    return {
        other.lstrip("-").replace("-", "_"): field.name
        for field in fields(cls)
        for kind in ("flags", "json", "elsewhere")
        for other in (field.name, *(field.metadata.get(kind) or ()))
    }


@dataclass(frozen=True)
class EngineConfig(Settings):
    """How a model is loaded and how much memory its KV store may take."""

    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    model_draft: str | None = setting(
        None,
        "-md",
        "--model-draft",
        "--spec-draft-model",
        metavar="PATH",
        help="a smaller model of the same vocabulary, which drafts tokens, with a KV store of f16; with --spec-type "
        "eagle3 or assistant the head: a folder, a GGUF file, or USER/REPO",
        elsewhere=("draft_model", "speculative_model", "assistant_model"),
    )
    mmproj: str | None = setting(
        None,
        "-mm",
        "--mmproj",
        metavar="FILE",
        help="the part of a GGUF model that reads images; without it, the mmproj file beside the model, if there is "
        "one; none leaves that part of any model out, which saves its memory",
        elsewhere=("clip_model_path",),
    )
    lora: dict[str, str] = setting(
        dict,
        "--lora",
        metavar="[NAME=]PATH[:SCALE]",
        help="an adapter that requests name: a folder of peft, a GGUF file, or hf:USER/REPO; may be repeated",
    )
    packs: dict[str, str] = setting(
        dict,
        "--pack",
        metavar="[NAME=]FILE",
        help="a context that polarlm pack has computed, which requests begin with by its name, and a chat with the "
        "first one; a file, or hf:USER/REPO; may be repeated",
    )
    allowed_packs: str | None = setting(
        None,
        "--allowed-packs",
        metavar="FILE",
        help="take no pack whose SHA-256 is not in this file, which has lines as sha256sum writes them",
    )
    chat_template_file: str | None = setting(
        None, "--chat-template-file", metavar="FILE", help="a Jinja template in place of the model's own"
    )
    weight_type: str = setting(
        AS_STORED,
        "--weight-type",
        metavar="TYPE",
        help="convert matrices while they are loaded, to f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or mxfp4",
        elsewhere=("dtype", "torch_dtype", "quantization"),
    )
    input_bits: str | int = setting(
        AUTO,
        "--input-bits",
        choices=(AUTO, "8", "16", "bf16"),
        help="on a CPU, bits of the inputs that are multiplied by quantized weights: 8, as in llama.cpp, read prompts "
        "and answer several requests faster, but are rounded 256 times as coarsely as 16; bf16 multiplies "
        "prompts, and steps of 16 requests, as bfloat16, on CPUs with AMX; auto takes it there, elsewhere 16",
    )
    device: str = setting(
        "auto",
        "--device",
        metavar="DEVICE",
        help="where the model runs: cpu, cuda, or GPUs by their numbers, such as cuda:1 or cuda:0,1; auto takes a GPU "
        "if it can use one",
        elsewhere=("n_gpu_layers", "gpu_layers", "tensor_parallel_size"),
    )
    tensor_split: str | None = setting(
        None,
        "-ts",
        "--tensor-split",
        metavar="N,N,…",
        help="shares of the layers that each GPU gets, such as 3,1; auto shares them by free memory; without it, one "
        "GPU has all of them if they fit",
    )
    ctx_size: int = setting(
        0,
        "-c",
        "--ctx-size",
        metavar="N",
        help="tokens of context; 0 takes the model's own, as far as memory allows",
        elsewhere=("n_ctx", "num_ctx", "max_model_len", "max_seq_len", "context_length"),
    )
    cache_type: str = setting(
        DEFAULT_CACHE_TYPE,
        "--cache-type",
        metavar="TYPE",
        help="quality, balanced or compact, whose newest tokens are in full precision; or one type such as f16 or "
        "ring4, two as KEYS/VALUES such as ring5/ring4",
    )
    cache_type_k: str | None = setting(
        None,
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="type of keys, in place of --cache-type; ring4@0-1,ring3.5 gives layers 0 and 1 another type",
    )
    cache_type_v: str | None = setting(
        None, "-ctv", "--cache-type-v", metavar="TYPE", help="type of values, in place of --cache-type"
    )
    kv_memory: str | None = setting(
        None,
        "--kv-memory",
        metavar="SIZE",
        help="memory for the KV store, such as 512M or 2G, for requests that run and conversations that come back; "
        "without it, as much as one context needs",
        elsewhere=("gpu_memory_utilization", "kv_cache_memory_bytes"),
    )
    state_type: str = setting(
        "8bit",
        "--state-type",
        choices=("8bit", "f32"),
        help="how snapshots of recurrent layers are kept, from which a conversation continues: in 8 bits, or exactly",
    )
    state_cache: str | None = setting(
        None,
        "--state-cache",
        metavar="SIZE",
        help="memory for snapshots of recurrent layers, such as 500M; without it, two for each sequence",
    )
    key_conditioning: bool = setting(
        True, help="quantize keys without subtracting the mean of each block, and without calibration"
    )
    calibration: bool = setting(
        True,
        "--no-calibration",
        help="do not calibrate on a short text; round keys and values to the nearest codes",
    )
    threads: int = setting(
        0,
        "-t",
        "--threads",
        metavar="N",
        help="CPU threads; 0 follows OMP_NUM_THREADS, or else uses one for each core that the process may use",
    )
    expert_cache: str | None = setting(
        None,
        "--expert-cache",
        metavar="SIZE",
        help="on a CPU, keep this much of a mixture's experts in memory, such as 6G, and read the others from the file "
        "as they are chosen; without it, all, or if they do not fit, as many as memory leaves room for",
    )
    cpu_moe: str | None = setting(
        None,
        "--cpu-moe",
        metavar="N|auto",
        help="with a GPU, keep the experts of the first N layers in the computer's memory, where its CPU multiplies "
        "them; auto: of as many layers as do not fit on the GPU",
    )
    replayable: bool = setting(
        False,
        "--replayable",
        help="on a CPU, let an answer depend on the model's file, the request, the cache type and the version alone, "
        "to the bit: not on other requests, cached prefixes, restarts, threads or the CPU; prompts take longer",
    )
    block_size: int = setting(64, help="tokens in a block of the KV store; a multiple of 4")
    parallel: int = setting(
        8,
        "-np",
        "--parallel",
        metavar="N",
        help="requests that are computed at the same time",
        elsewhere=("max_num_seqs", "n_seq_max"),
    )
    spec_type: str = setting(
        "none",
        "--spec-type",
        choices=limits.DRAFTS,
        names=limits.DRAFT_NAMES,
        help="draft tokens and verify several in one step: ngram-simple drafts what followed the last occurrence of "
        "the newest tokens; draft-simple asks the draft model, and is the default where there is one; mtp asks a layer "
        "of the model that predicts several tokens, which is loaded for it alone; eagle3 a head of another file, "
        "--model-draft or the one beside the model; assistant a Gemma 4's assistant there",
    )
    draft_max: int = setting(limits.MOST_DRAFTED, "--draft-max", metavar="N", help="most tokens of a draft, 0 to 15")
    kept_sequences: int = setting(
        4,
        help="finished sequences that the store has full-precision blocks for, at least; 0 turns the prefix cache off",
    )
    cache_disk: str | None = setting(
        None,
        "--cache-disk",
        metavar="SIZE",
        help="keep conversations on the disk, in files of this total size, such as 20G, so that none is computed "
        "again after a restart; the files reveal what was said to anyone who can read them",
    )
    cache_disk_folder: str | None = setting(
        None,
        "--cache-disk-folder",
        metavar="FOLDER",
        help="where --cache-disk keeps them; without it, in the user's cache folder",
    )
    kv_store: str | None = setting(
        None,
        "--kv-store",
        metavar="URL|FOLDER",
        help="share conversations with other processes and machines, in a folder or an object store: s3://, gs://, "
        "az://, webdav://, webdavs:// or redis://, with the extra store; what is kept there reveals what was said",
    )
    cache_ram: str | None = setting(
        None,
        "--cache-ram",
        metavar="SIZE",
        help="with a GPU, keep conversations in this much of the computer's memory, such as 16G",
    )

    @property
    def mtp(self) -> bool:
        """Whether the layer that predicts several tokens is loaded."""
        return self.spec_type == limits.MTP

    @property
    def head(self) -> tuple[str, str] | None:
        """The kind and the path of the draft head to load; no path for the one beside the model, None for none."""
        return (self.spec_type, self.model_draft or "") if self.spec_type in limits.HEADS else None

    @property
    def small_model(self) -> str | None:
        """The draft model to load: a model, not a head."""
        return None if self.head else self.model_draft

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted for requests that do not say otherwise."""
        return self.spec_type != limits.DRAFTS[0] or self.model_draft is not None


def parse_size(text: str, setting: str = "kv_memory") -> int:
    """Return the bytes of "512M", "2G", "1.5GiB" or "800000". Raises an EngineError that names the setting."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    scale = units.get(number[-1:], 1)
    try:
        size = float(number[:-1] if scale > 1 else number) * scale
        if not 0 < size < 1 << 60:
            raise ValueError
    except ValueError:
        sentence = f"{setting}={text}: this is not a size; write 512M, 2G or a number of bytes"
        raise EngineError(sentence, settings=(setting,)) from None
    return int(size)


def format_bytes(size: float) -> str:
    """Return a size as text, in binary units.

    >>> format_bytes(1536), format_bytes(3 << 30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1023.95:  # what would be shown as 1024.0 belongs to the next unit
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
