"""The tensor-parallel peers of benchmarks/training.py: ranks that share every layer of one model.

    class         peers                                     who adds up
    Hpcpar        hpcpar tp, and with sequence parallelism  hpcpar, over MPI
    DTensor       dtensor tp, dtensor tp+sp                 torch.distributed.tensor.parallel, over gloo
    Part          no communication                          nobody: a model as large as one rank's part

All begin with the same values and see the same tokens; the plain attention works on as many heads as it is
handed. Nobody averages gradients: there is one replica of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from training_peers import Peer, Recipe, Solo, Task

from hpcpar.errors import LayoutError
from hpcpar.models import Llama, LlamaConfig, parallel_layers
from hpcpar.tensor_parallel import TensorParallel, gather_whole

CHUNKS = 2
HPCPAR: dict[str, dict[str, Any]] = {
    "hpcpar tp": {},
    "hpcpar tp no overlap": {"overlap": False},
    "hpcpar tp+sp": {"sequence_parallel": True},
    f"hpcpar tp+sp {CHUNKS} chunks": {"sequence_parallel": True, "chunks": CHUNKS},
}
"""What each gives to TensorParallel beside the ranks."""


class Hpcpar(Peer):
    """A Llama of parallel layers over MPI."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        self.module, self.optimizer = self.model, recipe.make(self.model.parameters())

    def make_model(self, task: Task) -> Llama:
        tp = TensorParallel(task.world, **HPCPAR[self.name])
        return task.model(parallel_layers(task.config, tp))

    def parameters(self) -> dict[str, Tensor]:
        return {name: gather_whole(parameter) for name, parameter in self.model.named_parameters()}


class DTensor(Peer):
    """torch's parallelize_module over gloo, with the plans of its documentation, on the serial model.

    Where the documentation leaves a choice, the faster: attention and feed-forward turn their input into a
    DTensor once, so that its gradient is summed once and not for every projection. Logits stay divided,
    under loss_parallel.
    """

    needs_gloo = True

    @classmethod
    def require(cls, task: Task) -> None:
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module  # noqa: F401

        kv_heads = task.config.key_value_heads
        if kv_heads % task.tp:
            raise LayoutError(f"it divides rows, and would cut kv_heads={kv_heads} for tp={task.tp} ranks")

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

        super().__init__(name, task, recipe)
        self.loss_parallel = loss_parallel
        mesh = init_device_mesh("cpu", (task.world.size,))
        outer, of_layer = sequence_parallel_plans() if name.endswith("+sp") else plans()
        parallelize_module(self.model, mesh, outer)
        for layer in self.model.model.layers:
            parallelize_module(layer, mesh, of_layer)
        self.module, self.optimizer = self.model, recipe.make(by_type(list(self.model.parameters())))

    def forward(self) -> Tensor:
        with self.loss_parallel():
            return super().forward()

    def backward(self, loss: Tensor) -> None:
        with self.loss_parallel():
            super().backward(loss)

    def parameters(self) -> dict[str, Tensor]:
        return {name: as_whole(parameter) for name, parameter in super().parameters().items()}


Plan = dict[str, Any]
"""By a module's name, how it is divided."""


def plans() -> tuple[Plan, Plan]:
    """Return the plans of the model and of each layer: everything between the blocks is on all ranks."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
    )

    whole = Replicate()
    outer = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    of_layer = {
        "self_attn": PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None)),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        **{name: ColwiseParallel() for name in COLUMNS},
        **{name: RowwiseParallel() for name in ROWS},
    }
    return outer, of_layer


def sequence_parallel_plans() -> tuple[Plan, Plan]:
    """The same with a part of the sequence on each rank between the blocks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    part, whole = Shard(1), Replicate()
    outer = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=part, use_local_output=False),
    }
    of_layer = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_layouts=(part, None), desired_input_layouts=(whole, None)),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        **{name: ColwiseParallel() for name in COLUMNS},
        **{name: RowwiseParallel(output_layouts=part) for name in ROWS},
    }
    return outer, of_layer


COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def by_type(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups: a fused step takes DTensors or plain tensors, not both at once."""
    from torch.distributed import tensor

    divided = [isinstance(parameter, tensor.DTensor) for parameter in parameters]
    groups = [
        {"params": [parameter for parameter, is_so in zip(parameters, divided, strict=True) if is_so == kind]}
        for kind in (True, False)
    ]
    return [group for group in groups if group["params"]]


def as_whole(parameter: Tensor) -> Tensor:
    from torch.distributed import tensor

    return parameter.full_tensor() if isinstance(parameter, tensor.DTensor) else parameter


class Part(Peer):
    """On each rank a model with its share of heads, ffn and vocabulary, and nobody to talk to.

    The same products, norms and loss as a rank of the others has: what a step would take if communication,
    and what divides and joins tensors for it, were free. It learns something else.
    """

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        assert self.share is not None
        self.share = tuple(tokens % self.model.config.vocab_size for tokens in self.share)
        self.module, self.optimizer = self.model, recipe.make(self.model.parameters())

    def make_model(self, task: Task) -> Llama:
        return replace(task, config=part_of(task.config, task.tp)).model()


def part_of(config: LlamaConfig, tp: int) -> LlamaConfig:
    """Return the sizes of one rank's part; several ranks hold a key-value head where there are few."""
    return replace(
        config,
        vocab_size=-(-config.vocab_size // tp),
        heads=config.heads // tp,
        kv_heads=max(1, config.key_value_heads // tp),
        ffn_size=config.ffn_width // tp,
    )


TENSOR_PARALLEL: dict[str, type[Peer]] = {
    **dict.fromkeys(HPCPAR, Hpcpar),
    "dtensor tp": DTensor,
    "dtensor tp+sp": DTensor,
    "one process": Solo,
    "no communication": Part,
}
"""All of them, in the order in which they are reported."""
