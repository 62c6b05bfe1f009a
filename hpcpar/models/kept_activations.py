"""What a layer of the Llama keeps from forward for backward, to the byte. Pure integers.

Shape letters: B batch, S sequence, T = B·S tokens, H hidden, F ffn, A heads, K key-value heads, D head size;
t ranks, T' = T/t under sequence parallelism, else T. Values of 4 or 8 bytes; a fused attention kernel.

    two norms        the input, what is left of it before the weight, 1/σ       2·(2·T'H + T')
    two inputs       of queries, keys, values; of gate and up                    2·TH, or 2·T'H gathered again
    attention        queries and output; keys and values                         2·T·AD/t + 2·T·KD/t
                     the logarithms of softmax's denominators                    T·A/t
    feed-forward     gate, silu(gate), up, their product                         4·T·F/t

selective   not the logarithms (a kernel that is not fused would keep S values for each of them)
full        the layer's input: T'H

The rotary tables, 2·S·D/2 values, are kept once for all layers.
"""

from __future__ import annotations

from hpcpar.autograd.recompute import Mode
from hpcpar.models.llama_config import LlamaConfig


def kept_per_layer_nbytes(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    *,
    itemsize: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    gather_again: bool = False,
    mode: Mode = "none",
) -> int:
    """Bytes that each of `tp` ranks keeps for a layer without dropout; arguments as of TensorParallel.

    itemsize   bytes of a value: 4 or 8
    """
    tokens = batch * sequence
    own_tokens = tokens // tp if sequence_parallel else tokens
    hidden = config.hidden_size
    if mode == "full":
        return own_tokens * hidden * itemsize
    norms = 2 * (2 * own_tokens * hidden + own_tokens)
    inputs = 2 * (own_tokens if gather_again else tokens) * hidden
    queries = tokens * config.heads // tp * config.head_width
    projected = tokens * max(1, config.key_value_heads // tp) * config.head_width
    logarithms = 0 if mode == "selective" else tokens * config.heads // tp
    attention = 2 * queries + 2 * projected + logarithms
    feed_forward = 4 * tokens * config.ffn_width // tp
    return (norms + inputs + attention + feed_forward) * itemsize
