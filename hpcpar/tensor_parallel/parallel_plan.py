"""`parallelize`: replace modules of a plain model by parallel ones, by a plan of names and styles.

plan = {
    "layers.*.mlp": Enter(),                                  * stands for one part of a name
    "layers.*.mlp.gate_proj": Column(enter=False),
    "layers.*.mlp.up_proj": Column(enter=False),
    "layers.*.mlp.down_proj": Row(),
}
parallelize(model, plan, mesh)

steps    match the names, check everything, agree that all ranks hold the same model and plan; then change it
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import nn

from hpcpar.autograd.checksum import checksum
from hpcpar.errors import LayoutError, MismatchError, PeerFailedError
from hpcpar.mesh import Mesh
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.check import require_equal
from hpcpar.tensor_parallel.region_styles import Enter, Norm
from hpcpar.tensor_parallel.split import Split, comm_of
from hpcpar.tensor_parallel.styles import Column, Row, Style

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Module = TypeVar("Module", bound=nn.Module)

Plan = Mapping[str, Style | Sequence[Style]]
"""Pattern of module names -> a style, or several, applied one after the other."""


def parallelize(
    model: Module, plan: Plan, tp: Mesh | TensorParallel | Communicator, *, check: Any = None
) -> Module:
    """Make the modules that a plan names parallel, in place, and return the model. Collective.

    plan     see the top of this file; every pattern must match a module, unless its style is optional, and no
             module may match two patterns
    tp       a mesh, of which the tp axis is taken, a communicator, or a TensorParallel with options
    check    small batch, the same on all ranks: a tensor, a tuple of the model's arguments, or a mapping by
             name. On it a parallel copy of the model must give the outputs and gradients of the serial model,
             but for rounding. None: no comparison

    Every rank passes the whole model with the same values, before an optimizer is made of its parameters.
    It keeps its shards of divided parameters, in memory of their own. Names, dtypes, devices, module hooks,
    frozen and tied parameters stay as they are; `whole_state_dict` returns the serial model's state.

    A replicated parameter between a column and a row layer would get a partial gradient on each rank. Without
    a style it is refused in a module with `Enter` or `LocalHeads`, and in a module registered between a
    column and a row layer of one container (an nn.PReLU in an nn.Sequential). Elsewhere names do not show
    it, nor that a layer there needs all features: a softmax, a norm, a gate beside what it gates. `check`
    finds all of these; pass it whenever a plan is new.

    errors   LayoutError for a plan that does not fit the model, a model that does not fit the ranks, and a
             parallel form that does not compute what the model does, with the first module that differs;
             MismatchError for ranks with different models, values or plans, and for parameters that are
             divided over another communicator. The model is then as it was.
    """
    tp = TensorParallel.of(tp.tp if isinstance(tp, Mesh) else tp)
    error: Exception | None = None
    told: dict[str, str] = {}
    try:
        _require_one_communicator(model, tp)
        places = matched(model, plan)
        splits = _splits(places, tp.size)
        _require_same_splits(_tied(model), splits)
        _require_entered(places)
        _require_norms_whole(places, splits)
        _require_summed(model, places, splits)
        if tp.sequence_parallel:
            _require_covered(model, places)
        told = _description(model, places, tp)
    except Exception as failure:  # whatever it is, the other ranks must hear of it
        error = failure
    _agree(told, error, tp.comm)
    if check is not None and tp.size > 1:
        require_equal(model, lambda twin: _make_parallel(twin, plan, tp), check, tp.comm)
    _make_parallel(model, plan, tp)
    return model


def _make_parallel(model: nn.Module, plan: Plan, tp: TensorParallel) -> None:
    places, tied = matched(model, plan), _tied(model)
    for place in places:
        module = place.module
        for style in place.styles:
            module = style.applied(module, tp)
        for name in place.names:
            _put(model, name, module)
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            _put(model, name, parameter)
    for module in model.modules():
        # In evaluation torch computes these by one kernel, which reads the weights of their layers.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


# --- matching -------------------------------------------------------------------------------------


class MatchedModule(NamedTuple):
    """Module matched by a plan; it has several names if the model uses it several times."""

    names: tuple[str, ...]
    module: nn.Module
    styles: tuple[Style, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def matched(model: nn.Module, plan: Plan) -> list[MatchedModule]:
    """Match the patterns of a plan to modules.

    errors   LayoutError for a pattern that matches nothing, and for a module that two match
    """
    if not plan:
        raise LayoutError("the plan is empty; give patterns of module names and their styles")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in modules.items():
        names_of.setdefault(module, []).append(name)
    pattern_of: dict[nn.Module, str] = {}
    for pattern in plan:
        names = [name for name in modules if matches(pattern, name)]
        if not names and not all(style.optional for style in _styles(pattern, plan[pattern])):
            raise LayoutError(f"the plan's {pattern!r} matches no module; {_nearest(pattern, modules)}")
        for name in names:
            other = pattern_of.setdefault(modules[name], pattern)
            if other != pattern:
                raise LayoutError(
                    f"{name} is matched by the plan's {other!r} and by {pattern!r}; leave one out, or give "
                    f"one of them both styles, as a tuple"
                )
    return [
        MatchedModule(tuple(names_of[module]), module, _styles(pattern, plan[pattern]))
        for module, pattern in pattern_of.items()
    ]


def _styles(pattern: str, given: object) -> tuple[Style, ...]:
    styles = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for style in styles:
        if not isinstance(style, Style):
            raise LayoutError(
                f"the plan has {style!r} for {pattern!r}; give a style, such as Column() or Row(), or a "
                f"tuple of them"
            )
    return styles


def matches(pattern: str, name: str) -> bool:
    """Match part by part: matches("layers.*.mlp", "layers.3.mlp"), but not "layers.3.more.mlp"."""
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _nearest(pattern: str, names: Sequence[str] | Mapping[str, object]) -> str:
    """Name the most similar modules, numbered layers as one."""
    known = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5) or known[:3]
    if not near:
        return "the model has no modules within it"
    return f"the model has {', '.join(near)}; * stands for one part of a name"


# --- checks of plan and model ---------------------------------------------------------------------


def _require_one_communicator(model: nn.Module, tp: TensorParallel) -> None:
    for name, parameter in model.named_parameters():
        comm = comm_of(parameter)
        if comm is not None and comm is not tp.comm:
            raise MismatchError(
                f"{name} is divided over the communicator {comm.name!r}, and the plan is for "
                f"{tp.comm.name!r}; use one communicator for all layers of a model"
            )


def _splits(places: Sequence[MatchedModule], size: int) -> dict[str, Split]:
    """Splits of the parameters, by name."""
    return {
        f"{name}.{parameter}": split
        for place in places
        for style in place.styles
        for parameter, split in style.splits(place.name, place.module, size).items()
        for name in place.names
    }


def _tied(model: nn.Module) -> list[list[str]]:
    """Groups of names of one tied parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _require_same_splits(tied: Sequence[Sequence[str]], splits: Mapping[str, Split]) -> None:
    for first, *others in tied:
        for other in others:
            if splits.get(first) != splits.get(other):
                raise LayoutError(
                    f"{first} and {other} are the same parameter, but the plan divides them differently; "
                    f"name both modules, with styles that divide alike (VocabularyEmbedding and Vocabulary)"
                )


def _require_entered(places: Sequence[MatchedModule]) -> None:
    """Check that Enter regions and enter=False match: gradients are summed exactly once."""
    entered = {place.name for place in places if any(isinstance(style, Enter) for style in place.styles)}
    serving = set()
    for place in places:
        if any(style.needs_entered for style in place.styles):
            around = {name for name in entered if place.name.startswith(f"{name}.")}
            if not around:
                raise LayoutError(
                    f"{place.name} has enter=False, but the plan has no Enter for a module around it; "
                    f"add one, or leave enter=False out"
                )
            serving |= around
    for name in sorted(entered - serving):
        raise LayoutError(
            f"{name} has the style Enter, but no layer in it has enter=False; the gradient of its input "
            f"would be summed twice. Set enter=False for the column layers that read its input"
        )


def _require_norms_whole(places: Sequence[MatchedModule], splits: Mapping[str, Split]) -> None:
    """Refuse Norm on divided parameters: it would add up gradients of different shards."""
    for place in places:
        if any(isinstance(style, Norm) for style in place.styles):
            for name in splits:
                if name.startswith(f"{place.name}."):
                    raise LayoutError(
                        f"{place.name} has the style Norm, but the plan divides {name} in it; Norm is for "
                        f"modules whose parameters are all the same on all ranks: give it to those within"
                    )


def _require_summed(model: nn.Module, places: Sequence[MatchedModule], splits: Mapping[str, Split]) -> None:
    """Refuse replicated parameters between column and row layers, whose gradients are partial."""
    covered = _covered(places)
    regions = [
        name for place in places if any(style.is_region for style in place.styles) for name in place.names
    ]
    for module in [*regions, *_between(model, places)]:
        depth = module.count(".")
        for own, parameter in model.get_submodule(module).named_parameters(remove_duplicate=False):
            name = f"{module}.{own}"
            divided = comm_of(parameter) is not None or name in splits
            if divided or covered.intersection(_around(name)[depth:]):
                continue
            give = "give its module"
            if module in regions:
                where = f"is in {module}, where ranks work on different parts"
                give = give if "." in own else "move it to a module of its own with"
            else:
                where = "is between a column and a row layer"
            raise LayoutError(
                f"the plan says nothing of {name}, which {where}: each rank would have a part of its "
                f"gradient only; {give} a style: Norm(of_heads=True) adds the parts up where it comes "
                f"between a column and a row layer, Column() and Row() divide it, and Norm() is for what "
                f"comes before the column layer or after the row layer"
            )


def _between(model: nn.Module, places: Sequence[MatchedModule]) -> Iterator[str]:
    """Yield names of modules registered between a column and a row layer of one container."""
    styles_of = {name: place.styles for place in places for name in place.names}
    for name, container in model.named_modules():
        after_column: list[str] | None = None
        for child, _ in container.named_children():
            child = f"{name}.{child}" if name else child
            styles = styles_of.get(child, ())
            if any(isinstance(style, Column) and not style.gather_output for style in styles):
                after_column = after_column or []
            elif any(isinstance(style, Row) and style.input_is_parallel for style in styles):
                yield from after_column or ()
                after_column = None
            elif after_column is not None:
                after_column.append(child)


def _covered(places: Sequence[MatchedModule]) -> set[str]:
    return {name for place in places if any(style.covers for style in place.styles) for name in place.names}


def _around(name: str) -> list[str]:
    """Names of the modules around a parameter: layers, layers.0, layers.0.norm of layers.0.norm.weight."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _require_covered(model: nn.Module, places: Sequence[MatchedModule]) -> None:
    """Require a style for every parameter: a forgotten norm would see gradients of its own tokens only."""
    covered = _covered(places)
    for name, parameter in model.named_parameters():
        if comm_of(parameter) is None and not covered.intersection(_around(name)):
            raise LayoutError(
                f"the plan says nothing of {name}, which under sequence parallelism may see this rank's "
                f"tokens only; give its module the style Norm(), or Whole() where it sees whole sequences"
            )


# --- agreement of ranks ---------------------------------------------------------------------------


def _description(model: nn.Module, places: Sequence[MatchedModule], tp: TensorParallel) -> dict[str, str]:
    """Describe everything that must be equal on all ranks; values as checksums."""
    options = ("sequence_parallel", "overlap", "gather_again", "chunks", "twice")
    told = {"TensorParallel": ", ".join(f"{name}={getattr(tp, name)}" for name in options)}
    for place in places:
        told[f"the style of {place.name}"] = ", ".join(
            repr(style) if is_dataclass(style) else type(style).__qualname__ for style in place.styles
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise LayoutError(
                f"{name} is on the meta device; load the whole weights before the model is parallelized"
            )
        frozen = "" if parameter.requires_grad else " (frozen)"
        told[name] = f"{list(parameter.shape)} {parameter.dtype}{frozen}"
        if tp.size > 1 and comm_of(parameter) is None:
            told[name] += f" with checksum {checksum(parameter):08x}"
    return told


def _agree(told: Mapping[str, str], error: Exception | None, comm: Communicator) -> None:
    """Raise on every rank if any has an error, or another model or plan than rank 0. Collective."""
    failure = None if error is None else f"{type(error).__name__}: {error}"
    everyone: list[tuple[str | None, dict[str, str]]] = comm.allgather_object((failure, dict(told)))
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text is not None]
    if failed:
        raise PeerFailedError(
            f"parallelize failed on {len(failed)} of {comm.size} ranks of {comm.name!r}. {'; '.join(failed)}"
        )
    first = everyone[0][1]
    for rank, (_, other) in enumerate(everyone):
        for what in [*first, *(name for name in other if name not in first)]:
            if first.get(what) != other.get(what):
                raise MismatchError(
                    f"{what}: rank 0 of {comm.name!r} has {first.get(what, 'none such')}, rank {rank} has "
                    f"{other.get(what, 'none such')}; give all of them the same model, weights and plan "
                    f"(hpcpar.broadcast_parameters gives every rank rank 0's weights)"
                )


def _put(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)
