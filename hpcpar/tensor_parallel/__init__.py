"""Tensor and sequence parallelism: layers that several ranks compute together.

Two ways to a parallel model:

    layers   ColumnParallelLinear, RowParallelLinear, …    build the model of them
    styles   Column, Row, …                                values of a plan; `parallelize` replaces the layers
                                                           of a plain model by the parallel ones


tp = TensorParallel(mesh.tp, sequence_parallel=True)
up = ColumnParallelLinear(hidden, ffn, tp)           # each rank has a shard of the ffn
down = RowParallelLinear(ffn, hidden, tp)            # summed over ranks
"""

from __future__ import annotations

from hpcpar.tensor_parallel.attention import ParallelSelfAttention, causal_attention
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy, whole_logits
from hpcpar.tensor_parallel.dropout import Dropout
from hpcpar.tensor_parallel.embedding import VocabParallelEmbedding
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, project
from hpcpar.tensor_parallel.mlp import ParallelMLP
from hpcpar.tensor_parallel.norm import LayerNorm, RMSNorm
from hpcpar.tensor_parallel.parallel_plan import Plan, parallelize
from hpcpar.tensor_parallel.random_streams import RandomStreams, Stream
from hpcpar.tensor_parallel.region_styles import Enter, Gather, LocalHeads, Norm, Scatter, Whole
from hpcpar.tensor_parallel.split import (
    Heads,
    Split,
    draw_shard,
    gather_whole,
    own_shard,
    shard_state_dict,
    split_of,
    split_over,
    whole_state_dict,
)
from hpcpar.tensor_parallel.styles import Column, Row, Style, Vocabulary, VocabularyEmbedding

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "Dropout",
    "Enter",
    "Gather",
    "Heads",
    "LayerNorm",
    "LocalHeads",
    "Norm",
    "ParallelMLP",
    "ParallelSelfAttention",
    "Plan",
    "RMSNorm",
    "RandomStreams",
    "Row",
    "RowParallelLinear",
    "Scatter",
    "Split",
    "Stream",
    "Style",
    "TensorParallel",
    "VocabParallelEmbedding",
    "Vocabulary",
    "VocabularyEmbedding",
    "Whole",
    "causal_attention",
    "draw_shard",
    "gather_whole",
    "own_shard",
    "parallelize",
    "project",
    "shard_state_dict",
    "split_of",
    "split_over",
    "vocabulary_parallel_cross_entropy",
    "whole_logits",
    "whole_state_dict",
]
