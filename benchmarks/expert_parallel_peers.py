"""The expert-parallel peers of benchmarks/training.py: ranks that share the experts of every mixture.

    class       peers                 experts of a mixture                how rows travel
    Hpcpar      hpcpar ep             a part on each rank                 hpcpar's exchange, over MPI
                hpcpar ep halves      the same                            the same, in two halves
    Ddp         ddp                   all on each rank                    they stay; gradients are averaged
    Megatron    megatron ep           a part on each rank                 Megatron-Core's all-to-all
                                                                          dispatcher, over gloo
    DeepSpeed   deepspeed ep          a part on each rank                 deepspeed.moe's all-to-all of padded
                                                                          experts, over gloo
    Free        no communication      a part on each rank                 as many own rows stand in for those
                                                                          that come

All have the same Llama, tokens and routing. Megatron-Core is for GPUs; here its MoELayer runs on the CPU,
with stand-ins for the CUDA streams that it asks for. Its grouped products need CUDA, so it computes one
expert after the other (SequentialMLP), as hpcpar does.

source   Megatron-Core, github.com/NVIDIA/Megatron-LM; Rajbhandari et al. 2022, arXiv 2201.05596 (DeepSpeed)
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from training_peers import Ddp, Peer, Recipe, Solo, Task, deepspeed, deepspeed_engine

from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.buckets import BUCKET_BYTES
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.expert_parallel.exchange import Channels
from hpcpar.models import Layers, Llama
from hpcpar.models.layers import Linear
from hpcpar.partition import bounds
from hpcpar.units import MiB


class ExpertParallelPeer(Peer):
    """A Llama of whose experts each rank has a part, under their names in the whole model."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        self.world = task.world
        super().__init__(name, task, recipe)

    def parameters(self) -> dict[str, Tensor]:
        everyone: list[dict[str, Tensor]] = self.world.allgather_object(self.own_parameters())
        return {name: value for part in everyone for name, value in part.items()}

    def own_parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters by their names in the whole model."""
        return super().parameters()


class Hpcpar(ExpertParallelPeer):
    """hpcpar's mixtures, over MPI; DistributedOptimizer averages gradients."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        named = list(self.model.named_parameters())
        inner = recipe.make(self.model.parameters())
        self.module = self.model
        self.distributed = DistributedOptimizer(
            inner, named, task.world, model=self.model, bucket_bytes=task.bucket_bytes
        )
        self.optimizer = self.distributed

    def make_model(self, task: Task) -> Llama:
        parallel = ExpertParallel(task.world, task.experts.count, halves=self.name.endswith("halves"))
        return task.model(Layers(experts=parallel, expert_replicas=Communicator.alone()))

    def synchronize(self) -> None:
        self.distributed.synchronize()


class OverGloo(ExpertParallelPeer):
    """Somebody else's mixtures in our Llama; each rank has an equal part of the experts."""

    needs_gloo = True

    @classmethod
    def require(cls, task: Task) -> None:
        if task.experts.count % task.ep:
            raise LayoutError(f"--experts {task.experts.count} do not divide among --ep {task.ep} ranks")

    def make_model(self, task: Task) -> Llama:
        model = task.model()
        start, stop = bounds(task.experts.count, task.ep)[task.world.rank]
        for layer in model.model.layers:
            layer.mlp = self.make_mixture(task, layer.mlp, range(start, stop))
        return model

    def make_mixture(self, task: Task, ours: nn.Module, own: range) -> Any:
        """Make a mixture with the values of ours; its `whole` returns its parameters by our names."""
        raise AssertionError("a subclass has it")

    def mixtures(self) -> dict[str, Any]:
        layers = self.model.model.layers.named_children()
        return {f"model.layers.{number}.mlp": layer.get_submodule("mlp") for number, layer in layers}

    def own_parameters(self) -> dict[str, Tensor]:
        mine = {name: value for name, value in super().own_parameters().items() if ".mlp." not in name}
        for prefix, mixture in self.mixtures().items():
            mine |= {f"{prefix}.{name}": value.detach() for name, value in mixture.whole().items()}
        return mine


class MegatronMixture(nn.Module):
    """Megatron-Core's MoELayer with the values of one of our mixtures."""

    def __init__(self, task: Task, groups: Any, ours: nn.Module, own: range) -> None:
        super().__init__()
        self.own = own
        specs = importlib.import_module("megatron.core.models.gpt.moe_module_specs")
        spec = specs.get_moe_module_spec(use_te=False, num_experts=task.experts.count)
        self.layer = spec.module(megatron_config(task), spec.submodules, pg_collection=groups)
        with torch.no_grad():
            for name, value in self.whole().items():
                value.copy_(ours.get_parameter(name))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden)[0]
        return output

    def whole(self) -> dict[str, Tensor]:
        """Return views of the parameters by our names."""
        found = {"gate.weight": self.layer.router.weight.data}
        for number, expert in zip(self.own, self.layer.experts.local_experts, strict=True):
            gate, up = expert.linear_fc1.weight.data.chunk(2)
            down = expert.linear_fc2.weight.data
            for matrix, value in (("gate", gate), ("up", up), ("down", down)):
                found[f"experts.{number}.{matrix}_proj.weight"] = value
        return found


class Megatron(OverGloo):
    """Megatron-Core's mixtures; torch averages the gradients of everything else."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        of_experts = [
            (f"{prefix}.{name}", parameter)
            for prefix, mixture in self.mixtures().items()
            for name, parameter in mixture.named_parameters()
            if ".experts." in name
        ]
        self.experts = [parameter for _, parameter in of_experts]
        self.optimizer = recipe.make(self.model.parameters())
        averaging = nn.parallel.DistributedDataParallel
        averaging._set_params_and_buffers_to_ignore_for_model(self.model, [name for name, _ in of_experts])
        self.module = averaging(
            self.model,
            bucket_cap_mb=(task.bucket_bytes or BUCKET_BYTES) / MiB,
            gradient_as_bucket_view=True,
        )

    @classmethod
    def require(cls, task: Task) -> None:
        super().require(task)
        megatron()

    def make_model(self, task: Task) -> Llama:
        self.groups = megatron_groups()
        with on_the_cpu():
            return super().make_model(task)

    def make_mixture(self, task: Task, ours: nn.Module, own: range) -> Any:
        return MegatronMixture(task, self.groups, ours, own)

    def forward(self) -> Tensor:
        with on_the_cpu():
            return super().forward()

    def backward(self, loss: Tensor) -> None:
        with on_the_cpu():
            super().backward(loss)

    def synchronize(self) -> None:
        # An expert has the sum of the gradients of all ranks' losses, and the others have the average.
        gradients = [parameter.grad for parameter in self.experts if parameter.grad is not None]
        torch._foreach_div_(gradients, float(self.world.size))


def megatron() -> Any:
    """Import Megatron-Core's mixtures, as they run without CUDA and Transformer Engine."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they say that Transformer Engine and Apex are not installed
        importlib.import_module("megatron.core.models.gpt.moe_module_specs")
        utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    utils.te_general_gemm = None  # a name that it only has with Transformer Engine
    dispatcher.maybe_move_tensor_to_cpu = split_sizes
    return importlib.import_module("megatron.core")


def split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for Megatron's copy of counts from the GPU: torch wants sizes of splits as a list."""
    return tensor.tolist() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Give Megatron-Core's CPU tensors the device and the streams for which it asks CUDA."""
    stream = mock.MagicMock()
    with mock.patch.multiple(
        torch.cuda,
        Stream=lambda *_: stream,
        current_stream=lambda *_: stream,
        stream=lambda _: nullcontext(),
        current_device=lambda: "cpu",
    ):
        yield


def megatron_config(task: Task) -> Any:
    sizes, experts = task.config, task.experts
    return importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=experts.ffn_size,
        moe_ffn_hidden_size=experts.ffn_size,
        num_moe_experts=experts.count,
        moe_router_topk=experts.per_token,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=task.ep,
        gated_linear_unit=True,
        activation_func=functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        params_dtype=task.wide_dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )


def megatron_groups() -> Any:
    """Return its process groups: experts are divided among all ranks, everything else is one rank's."""
    everyone: Any = distributed.group.WORLD
    alone = distributed.new_subgroups(1)[0]
    groups = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection()
    for name in ("tp", "cp", "tp_cp", "expt_tp", "expt_dp"):
        setattr(groups, name, alone)
    for name in ("ep", "tp_ep", "tp_dp_cp"):
        setattr(groups, name, everyone)
    return groups


class Expert(nn.Module):
    """SwiGLU, with the values of one of our experts."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = ours.get_parameter(f"{name}.weight")
            linear = Linear(weight.shape[1], weight.shape[0])
            linear.weight = nn.Parameter(weight.detach().clone())
            setattr(self, name, linear)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class DeepSpeedMixture(nn.Module):
    """DeepSpeed's MoE, dropless, with the values of one of our mixtures."""

    def __init__(self, task: Task, ours: nn.Module, own: range) -> None:
        super().__init__()
        self.own = own
        experts = [Expert(ours.get_submodule(f"experts.{number}")) for number in own]
        self.layer = importlib.import_module("deepspeed.moe.layer").MoE(
            task.config.hidden_size,
            experts[0],
            num_experts=task.experts.count,
            ep_size=task.ep,
            k=task.experts.per_token,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        with torch.no_grad():
            for name, value in self.whole().items():
                value.copy_(ours.get_parameter(name))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden)[0]
        return output

    def whole(self) -> dict[str, Tensor]:
        """Return the parameters by our names."""
        layer = self.layer.deepspeed_moe
        found = {"gate.weight": layer.gate.wg.weight.data}
        for number, expert in zip(self.own, layer.experts.deepspeed_experts, strict=True):
            found |= {f"experts.{number}.{name}": value.data for name, value in expert.named_parameters()}
        return found


class DeepSpeed(OverGloo):
    """DeepSpeed's mixtures and its engine, which averages gradients."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        inner = recipe.make(self.model.parameters())
        self.engine, self.optimizer = deepspeed_engine(self.model, inner, task, stage=0)
        self.module = self.engine

    @classmethod
    def require(cls, task: Task) -> None:
        super().require(task)
        deepspeed()
        if task.dtype == torch.float64:
            raise RuntimeError("its router computes in float32, so no float64")

    def make_mixture(self, task: Task, ours: nn.Module, own: range) -> Any:
        return DeepSpeedMixture(task, ours, own)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


class Free(Hpcpar):
    """The work of `hpcpar ep` without any message; it learns nothing, so that its counts stay as they are."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        ExpertParallelPeer.__init__(self, name, task, recipe)
        self.module, self.optimizer = self.model, recipe.make(self.model.parameters())
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def make_model(self, task: Task) -> Llama:
        parallel = ExpertParallel(task.world, task.experts.count)
        alone: Any = OwnRowsAlone(task.world)
        parallel._channels = Channels(alone, alone)
        return task.model(Layers(experts=parallel, expert_replicas=Communicator.alone()))

    def synchronize(self) -> None:
        pass


class OwnRowsAlone:
    """A communicator that knows what was exchanged before; of rows each rank gets its own, as many as come.

    So every rank computes as many rows as with messages. Counts are exchanged in the turn that warms up.
    """

    def __init__(self, comm: Communicator) -> None:
        self.size, self.rank, self._comm = comm.size, comm.rank, comm
        self._heard: dict[bytes, Any] = {}

    def alltoall(self, told: Any, *, out: Any) -> Any:
        known = told.tobytes()
        if known not in self._heard:
            self._heard[known] = self._comm.alltoall(told)
        out[:] = self._heard[known].reshape(out.shape)
        return out

    def start_alltoall(self, rows: Tensor, *, out: Tensor, **counts: Any) -> OwnRowsAlone:
        there = min(len(rows), len(out))
        out[:there].copy_(rows[:there])
        out[there:].zero_()
        return self

    def wait(self) -> None:
        pass


EXPERT_PARALLEL: dict[str, type[Peer]] = {
    "hpcpar ep": Hpcpar,
    "hpcpar ep halves": Hpcpar,
    "ddp": Ddp,
    "megatron ep": Megatron,
    "deepspeed ep": DeepSpeed,
    "one process": Solo,
    "no communication": Free,
}
"""All of them, in the order in which they are reported."""
