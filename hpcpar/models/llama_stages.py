"""Pipeline stages of a Llama, of which a rank builds its own; and measured costs of its layers.

Shape letters: B batch, S sequence on this rank, H hidden, A heads, D head size, V vocabulary, L layers.

    split ((0, 3), (3, 6), (6, 10)) of a model of 8 layers: items 0 … 9, as hpcpar.pipeline_parallel.balance

    stage 0   embed_tokens, layers 0 and 1       tokens [B, S]    -> hidden [B, S, H]
    stage 1   layers 2, 3 and 4                  hidden           -> hidden
    stage 2   layers 5, 6 and 7, norm, lm_head   hidden           -> logits [B, S, V]
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from hpcpar.autograd import Recompute
from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.errors import LayoutError
from hpcpar.models.layers import Layers, Reduction
from hpcpar.models.llama import EMBEDDING, HEAD, Llama
from hpcpar.parameter_info import note
from hpcpar.pipeline_parallel.balance import require_split
from hpcpar.planner.shapes import LlamaConfig, Part


class LlamaStages(nn.Module):
    """The stages of one rank, as one model for training and checkpoints.

    Names of parameters, also in state_dict(), are those of the whole model. To compute, call a stage by
    itself: `stages.stages[3](hidden)`.

    split        (start, stop) of the items of each stage, embedding first and head last, from `balanced` or
                 `by_hand`, the same on every rank
    own_stages   numbers of this rank's stages
    config, layers, seed, recompute   as for Llama; all stages share `layers` and its random streams

    stages       this rank's, by number
    tied_names   with tied embeddings and several stages, on every rank: name that is absent in the whole
                 model -> name of the parameter that it copies

    Tied embeddings are one parameter where one rank has both ends, as in a V. Otherwise two ranks have a copy
    each, and TiedWeights sums the gradients of `tied_parameters`.

    errors   LayoutError for a split that is not one of the model, or stages that it does not have
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: Layers,
        split: Sequence[tuple[int, int]],
        own_stages: Iterable[int],
        *,
        seed: int | None = 0,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        require_split(split, config.layers + 2)
        layers = layers.balanced(config)
        self.config = config
        self.split = tuple(split)
        self.random_streams = layers.streams
        self.sequence_multiple = layers.sequence_multiple
        self.tied_names = {HEAD: EMBEDDING} if config.tie_embeddings and len(split) > 1 else {}
        self.context = layers.context
        self.balancing = layers.balancing
        self._loss = layers.loss
        self._whole_logits = layers.whole_logits
        # A dict is no submodule: _register makes the tree with the whole model's names.
        self.stages: dict[int, Llama] = {}
        embedding: nn.Parameter | None = None
        for stage in _in_order(own_stages, len(split)):
            part = Part.of(*split[stage], config.layers)
            built = Llama(config, layers, seed=seed, recompute=recompute, part=part, embedding=embedding)
            if part.embeds:
                embedding = built.model.embed_tokens.get_parameter("weight")
            self.stages[stage] = built
        self._register()

    def _register(self) -> None:
        """Register the modules of all stages in one tree, in the whole model's order."""
        self.model = nn.Module()
        numbered = nn.ModuleList()
        for stage in self.stages.values():
            if stage.part.embeds:
                self.model.embed_tokens = stage.model.embed_tokens
            for number, layer in stage.model.layers.named_children():
                numbered.add_module(number, layer)
        self.model.layers = numbered
        for stage in self.stages.values():
            if stage.part.heads:
                self.model.norm = stage.model.norm
                self.lm_head = stage.lm_head
        ends = [end for stage in self.stages.values() for end in (stage.part.embeds, stage.part.heads) if end]
        for own in self.tied_parameters().values():
            if own is not None and len(ends) == 1:
                note(own, is_copy=True)

    def train(self, mode: bool = True) -> LlamaStages:
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def tied_parameters(self) -> dict[str, nn.Parameter | None]:
        """Return this rank's copy of the tied parameter, by its name in the whole model.

        None on a rank with neither end; empty on every rank where nothing is tied.
        """
        if not self.tied_names:
            return {}
        own = dict(self.named_parameters())
        return {first: own.get(first, own.get(name)) for name, first in self.tied_names.items()}

    def loss(self, logits: Tensor, targets: Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """Return `Llama.loss` of the last stage's output."""
        own = targets if self.context is None else self.context.own_tokens(targets)
        return self._loss(logits, own, reduction=reduction)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return `Llama.whole_logits` of the last stage's output."""
        return self._whole_logits(logits)


def measured_costs(
    config: LlamaConfig,
    layers: Layers,
    *,
    microbatch: int,
    sequence: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    recompute: Recompute | None = None,
    repeats: int = 5,
) -> list[float]:
    """Measure the seconds of a forward and a backward of embedding, each layer, and head with loss.

    The median of `repeats`, after a warm-up. Embedding, head and one layer of each kind (of
    recomputation, with or without experts) are built and timed in turn, so that noise affects all of them.

    microbatch, sequence   B and the S of the whole sequence
    collective             over the ranks that share a layer. Average the times over all ranks before
                           splitting by them, so that all ranks split alike
    """
    again = recompute or Recompute()
    kept = layers.streams.state_dict()
    if layers.balancing is not None:
        layers = replace(layers, balancing=layers.balancing.fresh())

    generator = torch.Generator("cpu").manual_seed(0)

    def built(part: Part) -> Llama:
        # Values do not matter to time, as long as they are ordinary numbers, but for those that choose
        # experts: a trained router has nearly even loads.
        with torch.device(device):
            stage = Llama(config, layers, seed=None, recompute=again, part=part).to(dtype=dtype)
        for name, parameter in stage.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                nn.init.constant_(parameter, 0.01)
        return stage

    kinds = [
        (again.of_layer(number, config.layers), config.experts_of(number) is None)
        for number in range(config.layers)
    ]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    stages = [
        built(Part(range(0), embeds=True, heads=False)),
        *(built(Part(range(number, number + 1), embeds=False, heads=False)) for number in firsts),
        built(Part(range(0), embeds=False, heads=True)),
    ]
    tokens = torch.arange(microbatch * sequence, device=device).view(microbatch, sequence)
    tokens %= config.vocab_size
    shape = (microbatch, sequence // layers.sequence_multiple, config.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    with adding_in_place(stages):  # as in a pipeline, where most backwards find a gradient to add to
        rounds = [
            [_once(stage, tokens if stage.part.embeds else hidden, tokens) for stage in stages]
            for _ in range(repeats + 1)
        ]
    embedding, *of_firsts, head = [median(seconds) for seconds in zip(*rounds[1:], strict=True)]
    of_kind = {kinds[number]: seconds for number, seconds in zip(firsts, of_firsts, strict=True)}
    layers.streams.load_state_dict(kept)
    return [embedding, *(of_kind[kind] for kind in kinds), head]


def _once(stage: Llama, inputs: Tensor, targets: Tensor) -> float:
    """Return the seconds of a forward and a backward."""
    _finish(inputs.device)
    start = time.perf_counter()
    output = stage(inputs)
    if stage.part.heads:
        output = stage.loss(output, targets, reduction="sum")
    output.backward(torch.ones_like(output))
    _finish(inputs.device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_order(own_stages: Iterable[int], stages: int) -> list[int]:
    numbers = sorted(own_stages)
    for stage in numbers:
        if not 0 <= stage < stages:
            raise LayoutError(f"there is no stage {stage}: the split has stages 0 to {stages - 1}")
    if len(set(numbers)) < len(numbers):
        raise LayoutError(f"stages {numbers} of one rank: name each of them once")
    return numbers
