"""Peak memory of a prompt and of a step on a GPU, besides weights and KV store.

Bytes of the arrays that `engine.model.forward` and the ops hold at the same time, computed from their shapes; letters
as in `engine.backends.ops`. Of alternative branches the larger one counts. The plan of the KV store asks for up to
twenty lengths of a prompt, and a trace of two layers takes 0.4 s for 32,768 tokens, a formula 2 ms;
`tests/cuda/test_memory.py` compares the formulas with traces.
"""

from __future__ import annotations

from dataclasses import replace

from polarlm.engine.backends.cuda import launch_configs, wide
from polarlm.engine.backends.cuda.batches import bucket
from polarlm.engine.backends.cuda.device import MOST_RECORDINGS, Device
from polarlm.engine.backends.cuda.kv.cache import HEADER
from polarlm.engine.backends.cuda.launch_configs import EXPERT_ROWS
from polarlm.engine.backends.cuda.recurrent import delta_prompt_bytes, heads_width, projected_columns
from polarlm.engine.backends.cuda.sampling import ROW_WORDS, mask_room, scratch_words
from polarlm.engine.backends.kv import layers_together, table_width
from polarlm.engine.backends.ops import Load
from polarlm.model_loaders.config import Experts, Ffn, LatentAttention, ModelConfig, Recurrent, ShortConv, is_gated

_FLOAT, _NARROW = 4, 2  # bytes of an activation, and of one converted to the weights' type
_CONV_WORDS, _DELTA_WORDS = 4, 4  # inputs of a row of a step; see `Ops.short_conv`, and DeltaSpan
_GROUP = 12  # bytes of a group of pairs of a row and an expert


def prompt_bytes(load: Load, full_bytes: int, chunk: int, encoded_at_once: int) -> int:
    """Peak bytes of the longest prompt, computed in chunks of `chunk` rows.

    full_bytes: bytes of a full-precision block, all KV heads, of the widest layer. encoded_at_once: see `KVOps`.
    """
    model, tokens, size = load.model, load.tokens, load.format.block_size
    e, chunk = model.hidden_size, min(tokens, chunk)
    inputs = len(model.layers) * model.layer_embedding
    whole = _FLOAT * tokens * (e + _ropes(model) + 1 + inputs)  # hidden states, cosines and sines, ids, layers' inputs
    mixers = model.attentions.values()
    shared = {mixer.window for mixer in mixers if mixer.shares_kv}  # other windows have other buffers
    shapes = {(mixer.kv_heads, mixer.head_dim, mixer.window if mixer.window in shared else 0) for mixer in mixers}
    kv_heads = [mixer.kv_heads for mixer in mixers]
    counts = range(1, -(-tokens // size) + 1)  # of a shorter prompt, or of a batch, more layers together
    blocks = len(shapes) * max(layers_together(encoded_at_once, kv_heads, count) * count for count in counts)
    spans = -(-tokens // chunk) * (_groups(model) + 1) * _FLOAT * (HEADER + table_width(tokens // size))
    scratch, states = delta_prompt_bytes(_deltas(model), chunk, tokens, size)
    logits = min(tokens, size) * (_FLOAT * model.vocab_size + _NARROW * e)  # scoring asks for all rows of a block
    most = max(_layer_bytes(model, chunk), chunk * _delta_bytes(model) + scratch, logits)
    return whole + full_bytes * blocks + states + spans + most


def step_bytes(load: Load, device: Device) -> int:
    """Peak bytes of recorded steps of at most `load.rows` sequences, inputs of all recordings included.

    A step has the rows of its bucket. Lists of sampler inputs are counted for one recording, in which every
    row has a mask. Further recordings with as many masks take memory that is not counted.
    """
    load = replace(load, rows=bucket(load.rows))
    model, rows = load.model, load.rows
    e = model.hidden_size
    table = HEADER + table_width(load.tokens // load.format.block_size)
    words = 1 + _ropes(model) + ROW_WORDS + _groups(model) * table + (_CONV_WORDS if _conv_bytes(model) else 0)
    words += _DELTA_WORDS * len(_deltas(model))
    inputs = MOST_RECORDINGS * rows * _FLOAT * words
    parts = _part_bytes(load, device)
    layer = _layer_bytes(model, rows) + max(_sum_bytes(load, device), parts)
    logits = model.vocab_size + (model.vocab_size + 3 if model.vocab_size % 4 else 0)  # and a copy in aligned rows
    head = rows * (_FLOAT * logits + _NARROW * e) + parts
    lists = 2 * _FLOAT * (rows * ROW_WORDS + mask_room(rows, model.vocab_size))  # and the logits that they change
    sampling = 8 * rows * scratch_words(model.vocab_size)
    layer_inputs = 2 * len(model.layers) * model.layer_embedding  # and the projections that are added to them
    return inputs + lists + sampling + rows * _FLOAT * (e + 1 + layer_inputs) + max(layer, head)


def _layer_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes of the arrays that a layer has at the same time for `rows` rows."""
    e, f, queries, heads = _widths(model)
    project = 3 * _FLOAT * heads + _NARROW * e  # transformed, then rotated by a matrix
    project = max(project, _conv_bytes(model), _delta_bytes(model), _latent_bytes(model))
    attend = _FLOAT * (heads + 2 * queries) + _gate_bytes(model)  # queries, and results before and after their rotation
    results = _FLOAT * (heads + queries) + _post_norm_bytes(model)
    inner = 3 * _FLOAT if _products(model) == 2 else _FLOAT + _NARROW  # without a gate it is activated in place
    forward = inner * f + _NARROW * e
    experts = rows * results + _experts_bytes(model, rows)
    return max(rows * max(project, attend, results + forward), experts)


def _widths(model: ModelConfig) -> tuple[int, int, int, int]:
    """E, and of the widest layers F (of a network for every token), H·D and (H + 2K)·D."""
    mixers = model.attentions.values()
    return (
        model.hidden_size,
        max(_ffn_size(layer.ffn) for layer in model.layers),
        max(mixer.heads * mixer.head_dim for mixer in mixers),
        max((mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim for mixer in mixers),
    )


def _products(model: ModelConfig) -> int:
    """How many products with x a network has: gate and up, or up alone."""
    return 2 if any(layer.ffn is not None and is_gated(layer.ffn.activation) for layer in model.layers) else 1


def _ffn_size(ffn: Ffn | None) -> int:
    """F of the network of a layer that is computed for every token; 0 if there is none."""
    dense = ffn.shared if isinstance(ffn, Experts) else ffn
    return 0 if dense is None else dense.size


def _experts_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes of what chooses the experts of `rows` rows, and of the results of the rows that are computed at a time."""
    most = 0
    for ffn in {layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)}:
        chosen = ffn.count + 2 * ffn.top_k + _ffn_size(ffn)  # logits, experts and weights, the shared network's result
        size = ffn.latent or model.hidden_size
        most = max(most, rows * _FLOAT * (chosen + 2 * ffn.latent) + _pairs_bytes(ffn, size, rows))
    return most


def _pairs_bytes(ffn: Experts, e: int, rows: int) -> int:
    """Bytes of x in half precision, of each pair's input of down and its result, and of groups of pairs."""
    rows = min(rows, EXPERT_ROWS)
    pairs = rows * ffn.top_k
    if not wide.groups_pairs(pairs, ffn.count):
        return _FLOAT * pairs * (ffn.size + e)
    groups = _GROUP * wide.expert_groups(pairs, ffn.count)[1] + 2 * _FLOAT * pairs
    inner = _NARROW if is_gated(ffn.activation) else _FLOAT + _NARROW  # without a gate, also before rounding
    return _NARROW * rows * e + pairs * (inner * ffn.size + _FLOAT * e) + groups


def _conv_bytes(model: ModelConfig) -> int:
    """Bytes of a row of a short convolution: its three inputs and x in half precision, what is kept, and the result."""
    has_conv = any(isinstance(layer.mixer, ShortConv) for layer in model.layers)
    return (5 * _FLOAT + _NARROW) * model.hidden_size if has_conv else 0


def _deltas(model: ModelConfig) -> set[Recurrent]:
    """The kinds of layers whose states are matrices."""
    return {layer.mixer for layer in model.layers if isinstance(layer.mixer, Recurrent)}


def _delta_bytes(model: ModelConfig) -> int:
    """Bytes of a row of a layer whose state is a matrix: the projected row, x in half precision, and the result."""
    widest = max((projected_columns(mixer) + heads_width(mixer) for mixer in _deltas(model)), default=0)
    return _FLOAT * widest + _NARROW * model.hidden_size if widest else 0


def _latent_bytes(model: ModelConfig) -> int:
    """Bytes of a row of latent attention: queries, their own part multiplied, both parts joined, transformed, and
    rotated by a matrix; or transformed queries, and results as latent vectors, copied and in half precision, and as
    values, twice, and groups of pairs of a row and a head."""
    most = 0
    for mixer in model.attentions.values():
        if isinstance(mixer, LatentAttention):
            queries = mixer.query_latent + mixer.heads * (mixer.own_dim + mixer.rotated + _GROUP)
            before = queries + mixer.heads * mixer.latent + mixer.head_dim
            joined, values = (mixer.heads + 1) * mixer.head_dim, mixer.heads * mixer.value_dim
            after = mixer.heads * (mixer.head_dim + 2 * mixer.latent + _GROUP) + 2 * values
            most = max(most, _FLOAT * (before + 3 * joined), _FLOAT * after + _NARROW * mixer.heads * mixer.latent)
    return most


def _gate_bytes(model: ModelConfig) -> int:
    """Bytes of a row of the gate of attention's result, and of its input in half precision."""
    gated = [
        mixer.heads * (1 if mixer.gate_by_head else mixer.head_dim)
        for mixer in model.attentions.values()
        if mixer.output_gate
    ]
    return _FLOAT * max(gated) + _NARROW * model.hidden_size if gated else 0


def _post_norm_bytes(model: ModelConfig) -> int:
    """Bytes of a row of a projection's output that a post-norm reads."""
    return _FLOAT * model.hidden_size if any(layer.norms != "before" for layer in model.layers) else 0


def _ropes(model: ModelConfig) -> int:
    """Numbers of cos and sin of a row, of all kinds of RoPE, and the factor of its queries."""
    kinds = {attention.rope_kind for attention in model.attentions.values()}
    return sum(dim for _, _, dim in kinds) + (len(kinds) if model.attention.query_growth else 0)


def _groups(model: ModelConfig) -> int:
    mixers = model.attentions.values()
    return len({(mixer.window, mixer.kv_heads, mixer.head_dim) for mixer in mixers})


def _sum_bytes(load: Load, device: Device) -> int:
    """Bytes of the sums that blocks of decode_attention write."""
    most = 0
    for mixer in set(load.model.attentions.values()):
        padded = -(-mixer.head_dim // 16) * 16
        if isinstance(mixer, LatentAttention):
            splits = launch_configs.latent_splits(load.rows, mixer.heads, device.processors)
            most = max(most, load.rows * mixer.heads * splits * (padded + 2) if splits > 1 else 0)
            continue
        chunks, columns = launch_configs.decode_cells(mixer.heads // mixer.kv_heads)
        sums = 2 * load.rows * mixer.kv_heads * chunks + device.processors
        most = max(most, sums * columns * (padded + 2))
    return _FLOAT * most


def _part_bytes(load: Load, device: Device) -> int:
    """Bytes of the sums that parts of a product write for `add_parts`."""
    model = load.model
    e, f, queries, heads = _widths(model)
    shapes = [(heads, e), (e, queries), (model.vocab_size, e), *([(_products(model) * f, e), (e, f)] if f else [])]
    shapes += [(projected_columns(mixer), e) for mixer in _deltas(model)]
    shapes += [(e, heads_width(mixer)) for mixer in _deltas(model)]
    split = [(out, wide.parts((out,), width, device.processors)) for out, width in shapes]
    return _FLOAT * load.rows * max(out * count if count > 1 else 0 for out, count in split)
