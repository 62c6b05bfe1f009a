"""Compare a parallel model with the serial one: outputs and gradients of a small batch, on a copy.

    copy ── forward, backward ── outputs of every module, and every gradient      the serial model's
      └─ by the plan ── forward, backward ── compared over all ranks              the parallel model's

A plan names modules; it does not know their forward. Layers between a column and a row layer that need all
features (a norm, a softmax, a gate beside what it gates) compute something else from a shard. Only a run
shows that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpcpar.errors import LayoutError
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import gather_whole, split_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative to a tensor's norm, by dtype: the effect of another order of sums."""

HALVES = (torch.bfloat16, torch.float16)

FLOOR = {torch.bfloat16: 0.1, torch.float16: 0.05}
"""Share of the largest gradient, below which a gradient may be rounding alone. Others: 0.01."""

NOISE = 0.1
"""Noise on constant parameters: new adapters of zeros and norms of ones would hide errors."""


@dataclass
class Pass:
    """Results of a forward and backward.

    made        outputs of each module, in the order in which modules ended
    outputs     outputs of the model
    gradients   gradients of parameters and inputs, by name
    """

    made: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def require_equal(
    model: nn.Module, parallel_form: Callable[[nn.Module], object], given: Any, comm: Communicator
) -> None:
    """Raise on every rank unless the parallel form of a model computes the same as the model. Collective.

    parallel_form   makes a copy of the model parallel, in place
    given           input of the model, a tuple of them, or a mapping by name; the same on all ranks

    Model, gradients, buffers and random states stay unchanged. The copy runs in eval mode without dropout; a
    model of 16 bits is compared in float32, if its forward allows that. Memory: a copy of the model, its
    gradients, and twice the outputs of all modules.
    errors   LayoutError that names the first module, or gradient, that differs; MismatchError where ranks
             pass different inputs
    """
    arguments, keywords = _arguments(given)
    for tensor in _tensors((arguments, keywords)):
        Sameness(comm, "an input of check=").require(tensor)
    failure: Exception | None = None
    serial, parallel = Pass(), Pass()
    with _random_numbers_kept(model, comm):
        with comm.together("copying the model and running it on the inputs of check="):
            try:
                twin, arguments, keywords = _widened(model, arguments, keywords)
                serial = _run(twin, arguments, keywords, comm, None)
            except (
                Exception
            ):  # a forward with a fixed dtype, or inputs that do not fit: run the original dtype
                twin, arguments, keywords = _varied(model), *_arguments(given)
                serial = _run(twin, arguments, keywords, comm, None)
            _require_finite(serial)
        parallel_form(twin)
        try:
            parallel = _run(twin.eval(), arguments, keywords, comm, serial)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
    _agree(_failure(failure), comm)
    _agree(_first_difference(serial, parallel, comm), comm)
    _require_same_gradients(twin, serial, parallel, comm)


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


@contextmanager
def _random_numbers_kept(model: nn.Module, comm: Communicator) -> Iterator[None]:
    devices = sorted({each.device.index for each in model.parameters() if each.is_cuda})
    with torch.random.fork_rng(devices):
        comm.barrier()  # ranks may be threads: nobody draws before all have noted where the numbers stand
        try:
            yield
        finally:
            comm.barrier()


def _widened(model: nn.Module, *given: Any) -> tuple[nn.Module, Any, Any]:
    """Copy a model of 16 bits, and the inputs, to float32: rounding would hide errors."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in HALVES else tensor

    twin = _varied(model)
    if any(each.dtype in HALVES for each in twin.parameters()):
        twin.float()
    arguments, keywords = (_mapped(each, wide) for each in given)
    return twin, arguments, keywords


@torch.no_grad()
def _varied(model: nn.Module) -> nn.Module:
    """Copy a model in eval mode, with noise on constant parameters."""
    model = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = None
        if (
            parameter.is_floating_point()
            and parameter.numel()
            and (parameter == parameter.flatten()[0]).all()
        ):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device, parameter.dtype), alpha=NOISE)
    return model


class _WithoutDropout(TorchFunctionMode):
    """Skip dropout, also where a forward asks for it whatever its module's mode."""

    DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in self.DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (
                args[:4] + ((0.0, *args[5:]) if len(args) > 4 else ()),
                kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}),
            )
        return func(*args, **kwargs)


def _run(model: nn.Module, arguments: Any, keywords: Any, comm: Communicator, serial: Pass | None) -> Pass:
    """Run forward, and backward from a weighted sum of outputs with the same weights on all ranks.

    serial   results of the serial model, which tell sharded outputs; None: this is the serial model
    """
    done = Pass()
    names = {module: name for name, module in reversed(list(model.named_modules()))}

    def note(module: nn.Module, arguments: object, output: object) -> None:
        done.made.append((names[module], [each.detach().clone() for each in _floating(output)]))

    inputs: list[Tensor] = []

    def own(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone()
        if not leaf.is_floating_point():
            return leaf
        inputs.append(leaf.requires_grad_())
        return leaf.clone()

    handles = [module.register_forward_hook(note) for module in names]
    try:
        for device in [None, *{each.device for each in model.parameters() if each.is_cuda}]:
            generator = (
                torch.default_generator if device is None else torch.cuda.default_generators[device.index]
            )
            generator.manual_seed(0)
        with torch.enable_grad(), _WithoutDropout():
            outputs = _floating(model(*_mapped(arguments, own), **_mapped(keywords, own)))
            done.outputs = [each.detach().clone() for each in outputs]
            wholes = done.outputs if serial is None else serial.outputs
            total: Any = 0.0
            for number, (output, whole) in enumerate(zip(outputs, wholes, strict=False)):
                weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(number)).to(whole)
                own_weights = part(weights, output.shape, comm)
                if output.requires_grad and own_weights is not None:
                    total = total + (output * own_weights).sum()
            if isinstance(total, Tensor):
                total.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    done.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    done.gradients |= {f"input {number} of check=": leaf.grad for number, leaf in enumerate(inputs)}
    for parameter in model.parameters():
        parameter.grad = None
    return done


def part(whole: Tensor, shape: torch.Size, comm: Communicator) -> Tensor | None:
    """Cut a tensor of this shape from a whole one: all, or this rank's slice along one dim; else None.

    A slice that goes beyond the whole, as in a padded vocabulary, ends in zeros.
    """
    if whole.shape == shape:
        return whole
    if whole.dim() != len(shape):
        return None
    other = [dim for dim, (old, new) in enumerate(zip(whole.shape, shape, strict=True)) if old != new]
    if len(other) != 1 or shape[other[0]] != -(-whole.shape[other[0]] // comm.size):
        return None
    (dim,), found = other, whole.new_zeros(shape)
    start = comm.rank * shape[dim]
    held = max(0, min(shape[dim], whole.shape[dim] - start))
    if held:
        found.narrow(dim, 0, held).copy_(whole.narrow(dim, start, held))
    return found


def _mapped(given: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a nested structure with other tensors."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, Mapping):
        return {name: _mapped(each, change) for name, each in given.items()}
    if type(given) in (tuple, list):
        return type(given)(_mapped(each, change) for each in given)
    return copy.deepcopy(given)


def _tensors(given: object) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(given, Tensor):
        yield given
        return
    if isinstance(given, Mapping):
        given = tuple(given.values())
    elif is_dataclass(given) and not isinstance(given, type):
        given = tuple(getattr(given, each.name) for each in fields(given))
    if isinstance(given, (tuple, list)):
        for each in given:
            yield from _tensors(each)


def _floating(given: object) -> list[Tensor]:
    return [each for each in _tensors(given) if each.is_floating_point()]


# --- comparison -----------------------------------------------------------------------------------


def _require_finite(serial: Pass) -> None:
    if not serial.outputs:
        raise LayoutError(
            "check= found no tensor of floating point in what the serial model returns; give inputs for "
            "which it returns a loss or logits, in a tensor, tuple, dict or dataclass"
        )
    if not all(each.isfinite().all() for each in serial.outputs):
        raise LayoutError(
            "check= found infinities or NaN in what the serial model makes of the inputs; give others"
        )


def _agree(found: tuple[int, str] | None, comm: Communicator) -> None:
    """Raise the finding of the earliest module on every rank."""
    everyone = comm.unchecked("agreement").allgather_object(found)
    findings = [(*each, rank) for rank, each in enumerate(everyone) if each is not None]
    if findings:
        _, text, rank = min(findings)
        raise LayoutError(f"check= found that on rank {rank} of {comm.name!r} {text}")


def _failure(failure: Exception | None) -> tuple[int, str] | None:
    if failure is None:
        return None
    return 0, (
        f"the parallel model fails where the serial one does not, with {type(failure).__name__}: {failure}. "
        f"Each rank has its part of heads or features: LocalHeads changes numbers of heads in attributes; "
        f"what else is of whole features (a parameter, a reshape) is to come before a column or after a row "
        f"layer"
    )


def _first_difference(serial: Pass, parallel: Pass, comm: Communicator) -> tuple[int, str] | None:
    """Find the first module with whole outputs that differ, if the model's outputs do."""
    if len(serial.outputs) != len(parallel.outputs):
        return 0, f"the model returns {len(parallel.outputs)} tensors, the serial one {len(serial.outputs)}"
    compared = [_error(*pair, comm) for pair in zip(serial.outputs, parallel.outputs, strict=True)]
    if all(error is None for error in compared):
        shapes = [list(each.shape) for each in parallel.outputs]
        return 0, (
            f"nothing can be compared: the model returns {shapes}, the serial one "
            f"{[list(each.shape) for each in serial.outputs]}; have one output gathered (gather_output=True)"
        )
    if not any(error is not None and error > 1 for error in compared):
        return None
    calls: dict[str, list[list[Tensor]]] = {}
    for name, made in parallel.made:
        calls.setdefault(name, []).append(made)
    agreed = "its input"
    for number, (name, wholes) in enumerate(serial.made):
        if not calls.get(name):
            continue
        made = calls[name].pop(0)
        errors = [_error(*pair, comm) for pair in zip(wholes, made, strict=False)]
        is_whole = [whole.shape == own.shape for whole, own in zip(wholes, made, strict=False)]
        if any(
            whole and error is not None and error > 1 for whole, error in zip(is_whole, errors, strict=True)
        ):
            worst = max(_distance(whole, own) for whole, own in zip(wholes, made, strict=False))
            return number, (
                f"what {name or 'the model itself'} makes differs from the serial model's by {worst:.2g} of "
                f"its size; {agreed} is right. What comes between works on a rank's part of the features, "
                f"but needs all: divide a fused projection by Column(sections=…), which keeps a gate beside "
                f"what it gates; leave layers around a norm, a softmax or a sum over features whole, or give "
                f"them Column(gather_output=True) and Row(input_is_parallel=False)"
            )
        if errors and all(error is not None and error <= 1 for error in errors):
            agreed = f"what {name} makes"
    return len(serial.made), f"the outputs differ from the serial model's; {agreed} is right, as the last"


def _require_same_gradients(twin: nn.Module, serial: Pass, parallel: Pass, comm: Communicator) -> None:
    parameters = dict(twin.named_parameters())
    done = {name: number for number, (name, _) in enumerate(serial.made)}
    found: list[tuple[int, str]] = []
    largest = max((_size(each) for each in serial.gradients.values() if each is not None), default=0.0)
    for name, expected in serial.gradients.items():
        own = parallel.gradients.get(name)
        if expected is None:
            continue
        parameter = parameters.get(name)
        if parameter is None:
            whole = torch.zeros_like(expected) if own is None else own
        else:
            own = torch.zeros_like(parameter) if own is None else own
            whole = gather_whole(parameter, own)
        dtype = expected.dtype
        least = largest * FLOOR.get(dtype, 0.01) * math.sqrt(expected.numel())
        wrong = _norm(whole.double() - expected.double())
        if not wrong <= TOLERANCE.get(dtype, 0.1) * (_norm(expected) + least):
            # The last in forward is the first in backward; earlier ones inherit its error.
            found.append((-done.get(name.rpartition(".")[0], -1), name))
    everyone = comm.unchecked("agreement").allgather_object(min(found, default=None))
    names = [each for each in everyone if each is not None]
    if not names:
        return
    _, name = min(names)
    expected, own = serial.gradients[name], parallel.gradients.get(name)
    assert expected is not None, "only those are compared"
    norms = comm.unchecked("agreement").allgather_object(0.0 if own is None else _norm(own))
    parameter = parameters.get(name)
    is_part = False
    if parameter is None or split_of(parameter) is None:
        summed = torch.zeros_like(expected) if own is None else own.clone()
        comm.unchecked("agreement").allreduce(summed)
        is_part = _distance(expected, summed) <= TOLERANCE.get(expected.dtype, 0.1)
    raise LayoutError(
        f"check= found that outputs are right on {comm.name!r}, but the gradient of {name} is not: its norm "
        f"is {', '.join(f'{norm:.6g}' for norm in norms)} on the ranks, the serial model's "
        f"{_norm(expected):.6g}. "
        + (
            "Each rank has a part of it, as it lies between a column and a row layer: give its module the "
            "style Norm(of_heads=True), in a module of its own, which adds the parts up"
            if is_part
            else "What is in front of column layers has its gradient summed once, by a column layer or its "
            "Enter: leave out Norm(of_heads=True) there, and regions of your own that sum it again"
        )
    )


def _size(tensor: Tensor) -> float:
    """Root mean square."""
    return _norm(tensor) / math.sqrt(max(1, tensor.numel()))


def _distance(whole: Tensor, own: Tensor) -> float:
    """Relative distance; 0 if the shapes differ."""
    if whole.shape != own.shape:
        return 0.0
    return _norm(own.double() - whole.double()) / max(_norm(whole), 1e-30)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _error(whole: Tensor, own: Tensor, comm: Communicator) -> float | None:
    """Error as a multiple of the tolerance; None if the two cannot be compared."""
    expected = part(whole, own.shape, comm)
    if expected is None:
        return None
    wrong = _norm(own.double() - expected.double())
    if math.isnan(wrong):
        return math.inf
    return wrong / (TOLERANCE.get(whole.dtype, 0.1) * max(_norm(whole), 1e-30))
