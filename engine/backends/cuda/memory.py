"""Peak memory of a prompt and of a step on a GPU, beside weights and KV store.

Bytes of the arrays that `engine.model.forward` and the ops hold at the same time, computed from their shapes; letters
as in `engine.backends.ops`. Of alternative branches the larger one counts. The plan of the KV store asks for up to
twenty lengths of a prompt, so these are formulas; `tests/cuda/test_memory.py` compares them with traces.
"""

from __future__ import annotations

from dataclasses import replace

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.batches import bucket
from polarlm.engine.backends.cuda.device import MOST_RECORDINGS, Device
from polarlm.engine.backends.cuda.kv.cache import HEADER, table_width
from polarlm.engine.backends.cuda.launch_configs import SMALL_ROWS
from polarlm.engine.backends.cuda.sampling.inputs import ROW_WORDS, mask_room
from polarlm.engine.backends.cuda.sampling.sampler import SCRATCH_WORDS
from polarlm.engine.backends.ops import Load
from polarlm.model_loaders.config import Experts, Ffn, ModelConfig

_FLOAT, _NARROW = 4, 2  # bytes of an activation, and of one converted to the weights' type


def prompt_bytes(load: Load, full_bytes: int, chunk: int) -> int:
    """Peak bytes of the longest prompt, computed in chunks of `chunk` rows.

    full_bytes: bytes of a full-precision block, all KV heads, of the widest layer.
    """
    model, tokens, size = load.model, load.tokens, load.format.block_size
    e, f, queries, heads = _widths(model)
    chunk = min(tokens, chunk)
    whole = _FLOAT * tokens * (e + _ropes(model) + 1)  # hidden states, cosines and sines, ids
    shapes = {(mixer.kv_heads, mixer.head_dim) for mixer in model.attentions.values()}
    buffer = len(shapes) * full_bytes * (tokens // size + 2)
    spans = -(-tokens // chunk) * (_groups(model) + 1) * _FLOAT * (HEADER + table_width(tokens // size))
    project = max(_FLOAT * heads + _NARROW * e, 3 * _FLOAT * heads)  # transformed, then rotated by a matrix
    attend = _FLOAT * (heads + 2 * queries)  # queries, and the result before and after its rotation
    post_norm = _post_norm_bytes(model)
    forward = max(_NARROW * e + 3 * _FLOAT * f, (_FLOAT + _NARROW) * f + post_norm, _NARROW * queries + post_norm)
    forward += _FLOAT * (heads + queries) + _grouped_bytes(model)
    few = min(tokens, SMALL_ROWS) * (_pairs_bytes(model) + _FLOAT * e)  # and their sum
    logits = _FLOAT * min(tokens, size) * model.vocab_size  # of all rows of a block that is scored
    return whole + buffer + spans + max(chunk * max(project, attend, forward), logits, few)


def step_bytes(load: Load, device: Device) -> int:
    """Peak bytes of recorded steps of at most `load.rows` sequences, inputs of all recordings included.

    A step has the rows of its bucket. Lists of sampler inputs are counted for one recording, in which every
    row has a mask. Further recordings with as many masks take memory that is not counted.
    """
    load = replace(load, rows=bucket(load.rows))
    model, rows = load.model, load.rows
    e, f, queries, heads = _widths(model)
    table = HEADER + table_width(load.tokens // load.format.block_size)
    words = 1 + _ropes(model) + ROW_WORDS + _groups(model) * table
    inputs = MOST_RECORDINGS * rows * _FLOAT * words
    project = 3 * _FLOAT * heads + _NARROW * e
    forward = _FLOAT * (2 * queries + f) + _NARROW * max(e, f, queries) + _post_norm_bytes(model)
    parts = _part_bytes(load, device)
    forward = max(forward, _pairs_bytes(model) + _post_norm_bytes(model))
    layer = rows * max(project, 3 * _FLOAT * queries, forward) + max(_sum_bytes(load, device), parts)
    head = _logits_bytes(model, rows) + rows * _NARROW * e + parts
    lists = 2 * _FLOAT * (rows * ROW_WORDS + mask_room(rows, model.vocab_size))  # and the logits that they change
    sampling = 8 * rows * SCRATCH_WORDS
    return inputs + lists + sampling + rows * _FLOAT * (e + 1) + max(layer, head)


def _widths(model: ModelConfig) -> tuple[int, int, int, int]:
    """E, and of the widest layers F (of one expert, or of a shared network), H·D and (H + 2K)·D."""
    mixers = model.attentions.values()
    return (
        model.hidden_size,
        max(max(_ffn_sizes(layer.ffn)) for layer in model.layers),
        max(mixer.heads * mixer.head_dim for mixer in mixers),
        max((mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim for mixer in mixers),
    )


def _ffn_sizes(ffn: Ffn) -> list[int]:
    """F of each network of a layer."""
    return [ffn.size, ffn.shared.size] if isinstance(ffn, Experts) and ffn.shared is not None else [ffn.size]


def _experts(model: ModelConfig) -> set[Experts]:
    return {layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)}


def _chosen_bytes(ffn: Experts) -> int:
    """Bytes of a row's logits, experts and weights, and of its shared network's result."""
    shared = 0 if ffn.shared is None else ffn.shared.size
    return _FLOAT * (ffn.count + 2 * ffn.top_k + shared)


def _grouped_bytes(model: ModelConfig) -> int:
    """Bytes of a row of a prompt, beside those of the products of one network: x and result of each of its experts, and
    where they are."""
    pair = 2 * _FLOAT * (model.hidden_size + 1)
    return max((_chosen_bytes(ffn) + ffn.top_k * pair for ffn in _experts(model)), default=0)


def _pairs_bytes(model: ModelConfig) -> int:
    """Bytes of a row of a step: of each of its experts, what is multiplied with down, and the result."""
    e = model.hidden_size
    return max((_chosen_bytes(ffn) + _FLOAT * ffn.top_k * (ffn.size + e) for ffn in _experts(model)), default=0)


def _post_norm_bytes(model: ModelConfig) -> int:
    """Bytes of a row of a projection's output that a post-norm reads."""
    return _FLOAT * model.hidden_size if any(layer.norms != "before" for layer in model.layers) else 0


def _ropes(model: ModelConfig) -> int:
    """Numbers of cos and sin of a row, of all kinds of RoPE."""
    return sum(dim for _, _, dim in {attention.rope_kind for attention in model.attentions.values()})


def _groups(model: ModelConfig) -> int:
    mixers = model.attentions.values()
    return len({(mixer.window, mixer.kv_heads, mixer.head_dim) for mixer in mixers})


def _logits_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes of logits, and of their copy in rows aligned to 16 bytes where V is no multiple of 4."""
    return _FLOAT * rows * (model.vocab_size + (model.vocab_size + 3 if model.vocab_size % 4 else 0))


def _sum_bytes(load: Load, device: Device) -> int:
    """Bytes of the sums that blocks of decode_attention write."""
    most = 0
    for mixer in set(load.model.attentions.values()):
        chunks, columns = launch_configs.decode_cells(mixer.heads // mixer.kv_heads)
        sums = 2 * load.rows * mixer.kv_heads * chunks + device.processors
        most = max(most, sums * columns * (-(-mixer.head_dim // 16) * 16 + 2))
    return _FLOAT * most


def _part_bytes(load: Load, device: Device) -> int:
    """Bytes of the partial sums that parts of a product write for `gemm_small_sum`."""
    model, machine = load.model, (device.processors, device.shared_memory)
    e, f, queries, heads = _widths(model)
    most = 0
    for rows in range(1, min(load.rows, SMALL_ROWS) + 1):
        for out, width in ((heads, e), (e, queries), (2 * f, e), (e, f), (model.vocab_size, e)):
            _, _, parts = launch_configs.gemm_small(rows, out, width, *machine)
            most = max(most, parts * rows * out if parts > 1 else 0)
    return _FLOAT * most
