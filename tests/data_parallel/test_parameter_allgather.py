"""New parameters are there when a module is called, and nobody waits for them sooner."""

from __future__ import annotations

import copy
import gc
import io
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.errors import OperationError
from hpcpar.models import Llama, LlamaConfig, parallel_layers
from tests.data_parallel.staged import fill, ranks, staged, whole
from tests.grid import checkered


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.double()
        fill(self, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def built(comm: Communicator, stage: int, **options: Any) -> tuple[Network, DistributedOptimizer]:
    model = Network()
    if options.pop("overlap", False):
        options |= {"model": model, "overlap_allgather": stage > 0}
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    return model, staged(model, inner, comm, stage, bucket_bytes=100, first_bucket_bytes=100, **options)


def backward(comm: Communicator, model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64).chunk(comm.size)[comm.rank]
    functional.mse_loss(model(inputs), torch.ones_like(inputs)).backward()


def trained(comm: Communicator, stage: int, steps: int = 4, **options: Any) -> list[Tensor]:
    model, optimizer = built(comm, stage, **options)
    for number in range(steps):
        backward(comm, model, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()
    return whole(model)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_module_has_its_new_parameters_when_it_is_called(stage: int, size: int) -> None:
    def body(comm: Communicator) -> tuple[list[float], list[int], int]:
        model, optimizer = built(comm, stage, overlap=True)
        backward(comm, model, 0)
        optimizer.step()
        allgather = optimizer._parts.allgather
        begun = len(allgather._under_way)  # type: ignore[union-attr]
        seen: list[float] = []
        waiting: list[int] = []

        def look(module: nn.Module, _: Any) -> None:
            waiting.append(len(allgather._under_way))  # type: ignore[union-attr]
            seen.extend(float(p.detach().sum()) for p in module.parameters(recurse=False))

        for module in model.modules():
            module.register_forward_pre_hook(look)
        model(torch.ones(1, 3, dtype=torch.float64))
        return seen, waiting, begun

    expected = [float(parameter.sum()) for parameter in run_loopback(size, lambda c: trained(c, stage, 1))[0]]
    for seen, waiting, begun in run_loopback(size, body):
        assert seen == pytest.approx(expected, rel=1e-12)
        assert begun == 10, "every bucket is on its way when step returns"
        # The model itself waits for nothing, the first module for its own two blocks, …
        assert waiting == [10, 8, 6, 4, 2, 0]


class Late:
    """New parameters that are not there, not even by chance, before they are waited for."""

    def __init__(self, flat: Tensor) -> None:
        self._flat, self._new = flat, flat.clone()
        flat.fill_(math.nan)

    def wait(self) -> None:
        self._flat.copy_(self._new)


def make_late(optimizer: DistributedOptimizer) -> dict[int, Any]:
    """Let all blocks be on their way until they are waited for; return what is still under way."""
    allgather: Any = optimizer._parts.allgather
    for number, handle in list(allgather._under_way.items()):
        handle.wait()
        allgather._under_way[number] = Late(allgather._blocks[number].flat)
    return allgather._under_way  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 2])
def test_layers_that_are_computed_together_have_their_new_parameters(stage: int, mode: str) -> None:
    """A Llama's queries, keys and values, and gate and up, of which none is called by itself."""
    sizes = LlamaConfig(vocab_size=12, hidden_size=8, layers=2, heads=2, kv_heads=1, ffn_size=12)
    tokens = torch.arange(6).view(1, 6)

    def body(comm: Communicator) -> tuple[int, float, float]:
        layers = parallel_layers(sizes, Communicator.alone())
        model = Llama(sizes, layers, recompute=Recompute(mode)).double()
        optimizer = staged(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            comm,
            stage,
            bucket_bytes=100,
            first_bucket_bytes=100,
            model=model,
            overlap_allgather=True,
        )
        model(tokens).square().mean().backward()
        optimizer.step()
        under_way = make_late(optimizer)
        begun = len(under_way)
        early = model(tokens).square().mean().item()
        assert not under_way
        return begun, early, model(tokens).square().mean().item()

    for begun, early, later in run_loopback(2, body):
        assert begun > 10, "every layer has buckets of its own"
        assert early == later


class Holding(nn.Module):
    """Reads parameters that others hold for it, in containers within containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(3)])
        self.more = nn.ModuleList([nn.ParameterDict({"shift": torch.ones(3)})])
        self.rest = nn.Module()
        self.rest.register_parameter("factor", nn.Parameter(torch.ones(3)))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.scales[0] + self.more[0]["shift"]) * self.rest.factor


class Summoned(nn.Linear):
    """Its parameters are read from outside, as by whoever saves or averages them; no hook of a call waits."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def __call__(self, inputs: Tensor) -> Tensor:
        with summon_full_parameters(self):
            return nn.functional.linear(inputs, self.weight, self.bias)


READING: dict[str, Callable[[], nn.Module]] = {
    "containers": Holding,
    "pruned": lambda: prune.random_unstructured(nn.Linear(3, 3), "weight", 1),  # type: ignore[no-untyped-call]
    "weight norm by a hook": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "summoned": lambda: Summoned(),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", READING)
@ranks(2)
def test_parameters_that_a_module_reads_in_other_ways_are_waited_for(comm: Communicator, name: str) -> None:
    model = READING[name]()
    optimizer = staged(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        comm,
        1,
        model=model,
        overlap_allgather=True,
        bucket_bytes=1,
    )
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    under_way = make_late(optimizer)
    early = model(torch.ones(2, 3))
    assert (bool(early.isfinite().all()), len(under_way)) == (True, 0)


@pytest.mark.parametrize("stage", [1, 2])
def test_without_the_model_a_step_waits_for_all(stage: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model, optimizer = built(comm, stage)
        backward(comm, model, 0)
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, *others = run_loopback(3, body)
    start = Network()
    assert all((a - b).abs().min() > 0.01 for a, b in zip(first, start.parameters(), strict=True))
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def slow_down(comm: Communicator) -> None:
    """What this rank publishes comes late: who does not wait reads what is old."""
    start = comm.start_allgather

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return start(*arguments, **options)

    comm.start_allgather = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_dict_waits_for_all(stage: int) -> None:
    def body(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = built(comm, stage, overlap=True)
        backward(comm, model, 0)
        if comm.rank == 1:
            slow_down(comm)
        optimizer.step()
        part = {name: value.clone() for name, value in model.layers[1].state_dict().items()}
        return {name: value.clone() for name, value in model.state_dict().items()}, part

    expected = run_loopback(2, lambda comm: trained(comm, stage, 1))[0]
    for found, part in run_loopback(2, body):
        assert all(torch.equal(a, b) for a, b in zip(found.values(), expected, strict=True))
        assert all(torch.equal(part[name], found[f"layers.1.{name}"]) for name in ("weight", "bias"))


def test_nobody_waits_for_the_last_step_of_a_model_that_is_gone() -> None:
    """Least of all those that get the ids of its parameters."""
    comm = Communicator.alone()
    model, optimizer = built(comm, 1, overlap=True)
    backward(comm, model, 0)
    optimizer.step()
    allgather: Any = optimizer._parts.allgather
    assert len(allgather._parameters) == 10
    del model, optimizer
    gc.collect()
    assert not len(allgather._parameters)
    assert allgather._under_way


def test_modules_of_torch_that_read_their_childrens_parameters_wait_for_those() -> None:
    # The attention reads out_proj's without calling it, and the encoder in evaluation those of all of it.
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)
            self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.encoder(self.attention(inputs, inputs, inputs)[0])

    def body(comm: Communicator, overlap: bool) -> Tensor:
        torch.manual_seed(0)
        model = Attending()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(2)
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = staged(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            comm,
            1,
            model=model,
            overlap_allgather=overlap,
            bucket_bytes=1,
            first_bucket_bytes=1,
        )
        inputs = torch.randn(3, 2, 4, generator=generator)
        model(inputs).square().sum().backward()
        if comm.rank == 1:
            slow_down(comm)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found = model(inputs)
        optimizer.wait_for_parameters()
        return found

    waited = run_loopback(2, lambda comm: body(comm, overlap=False))
    overlapped = run_loopback(2, lambda comm: body(comm, overlap=True))
    assert all(torch.equal(found, waited[0]) for found in [*waited, *overlapped])


def test_closing_takes_the_hooks_off() -> None:
    model, optimizer = built(Communicator.alone(), 1, overlap=True)
    assert any(module._forward_pre_hooks for module in model.modules())
    optimizer.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize(("stage", "nodes"), checkered([1, 2, 3], [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3]]))
def test_parameters_that_exist_once_on_a_node_are_trained_as_others(stage: int, nodes: list[int]) -> None:
    expected = run_loopback(4, lambda comm: trained(comm, stage), nodes=nodes)[0]
    options = [{}] if stage == 3 else [{}, {"overlap": True}]
    for option in options:
        results = run_loopback(
            4,
            lambda comm, option=option: trained(comm, stage, shared_parameters=True, **option),
            nodes=nodes,
        )
        for found in results:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stage", [1, 3])
def test_nodes_of_different_sizes_cannot_share(stage: int) -> None:
    def body(comm: Communicator) -> str:
        try:
            built(comm, stage, shared_parameters=True)
        except OperationError as error:
            return str(error)
        return "built"

    told = run_loopback(3, body, nodes=[0, 0, 1])
    assert all("shared_parameters=True needs the same number of ranks on each node" in each for each in told)


@pytest.mark.parametrize(
    ("stage", "words"), [(0, "only stages 1 and 2"), (3, "for 3 give it to fully_shard")]
)
def test_stages_that_cannot_share_say_so(stage: int, words: str) -> None:
    model = Network()
    if stage == 3:
        fully_shard(model, Communicator.alone())
    with pytest.raises(OperationError, match=words):
        DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            Communicator.alone(),
            zero_stage=stage,
            shared_parameters=True,
        )


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_one_node_parameters_are_the_same_memory(world: Communicator, stage: int) -> None:
    model, optimizer = built(world, stage, shared_parameters=True)
    backward(world, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    found = []
    with summon_full_parameters(model):
        for writer in range(world.size):
            world.barrier()
            if world.rank == writer:
                for number, parameter in enumerate(model.parameters()):
                    parameter.data.fill_(100.0 * writer + number)
            world.barrier()
            found.append([float(parameter.detach().max()) for parameter in model.parameters()])
            found[-1] += [float(parameter.detach().min()) for parameter in model.parameters()]
    everywhere = world.allgather_object(found)
    expected = [[100.0 * writer + number for number in range(10)] * 2 for writer in range(world.size)]
    assert everywhere == [expected] * world.size


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [False, True], ids=["step waits", "modules wait"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_mpi_parameters_in_common_are_trained_as_others(
    world: Communicator, stage: int, overlap: bool
) -> None:
    options = {"overlap": True} if overlap and stage < 3 else {}
    expected = trained(world, stage)
    found = trained(world, stage, shared_parameters=True, **options)
    near = all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(found, expected, strict=True))
    assert world.allgather_object(near) == [True] * world.size


@pytest.mark.parametrize("stage", [0, 1, 2])
@ranks(2)
def test_a_model_that_is_waited_for_can_be_saved_whole(comm: Communicator, stage: int) -> None:
    model, optimizer = built(comm, stage, overlap=True)
    backward(comm, model, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = copy.deepcopy(loaded)
    backward(comm, copied, 1)
    copied.load_state_dict(loaded.state_dict())
    for other in (loaded, copied):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
