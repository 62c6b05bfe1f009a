"""Models whose layers are constructor arguments: serial, tensor-parallel or in pipeline stages."""

from __future__ import annotations

from hpcpar.models.balancing import Balancing
from hpcpar.models.generation import generate
from hpcpar.models.layers import Layers, next_token_loss
from hpcpar.models.llama import Llama
from hpcpar.models.llama_stages import LlamaStages
from hpcpar.models.parallel import ExpertRanks, parallel_layers
from hpcpar.planner.experts import Experts
from hpcpar.planner.shapes import PRESETS, LlamaConfig, Part

__all__ = [
    "PRESETS",
    "Balancing",
    "ExpertRanks",
    "Experts",
    "Layers",
    "Llama",
    "LlamaConfig",
    "LlamaStages",
    "Part",
    "generate",
    "next_token_loss",
    "parallel_layers",
]
