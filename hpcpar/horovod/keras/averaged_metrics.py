"""Losses and metrics over the samples of all ranks, in what `fit` logs and `evaluate` returns.

A Keras metric keeps sums (of values, counts, a confusion matrix) and computes its result from them. The mean
of the ranks' results is not the result of all samples, unless every rank has as many:

    rank 0: 3 of 4 right    rank 1: 1 of 1 right    mean of ranks 0.875, of samples 4 / 5 = 0.8

So one all-reduce adds the sums of all metrics up over ranks, and each computes its result from them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
import numpy as np
import torch

from hpcpar.horovod.torch.functions import require_same
from hpcpar.horovod.torch.mpi_ops import Average, Sum, allreduce

RESULT_HOOK = "_get_metrics_result_or_logs"
"""Method of a Keras model that `fit` and `evaluate` call once, when an epoch's batches are done."""


def average_from_now_on(
    model: keras.Model, of: Literal["fit", "evaluate"], *, validation: bool = True
) -> None:
    """Let this model's results be computed over all ranks, until `average_no_longer`.

    of          "fit": what `fit` itself asks for, but not an `evaluate` that a callback of one rank may call;
                "evaluate": what `evaluate` asks for
    validation  of `fit`, too: all ranks validate
    """

    def result(logs: dict[str, Any]) -> dict[str, Any]:
        asking = sys._getframe(1)
        is_validation = asking.f_locals.get("use_cached_eval_dataset", False)
        if asking.f_code.co_name == of or (validation and is_validation):
            return results_over_ranks(model, logs)
        own: dict[str, Any] = getattr(type(model), RESULT_HOOK)(model, logs)
        return own

    model.__dict__[RESULT_HOOK] = result


def average_no_longer(model: keras.Model) -> None:
    """End what `average_from_now_on` began; nothing if it did not."""
    model.__dict__.pop(RESULT_HOOK, None)


def is_averaged(model: keras.Model) -> bool:
    """Return True between `average_from_now_on` and `average_no_longer`."""
    return RESULT_HOOK in model.__dict__


def results_over_ranks(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the model's metrics over the samples of all ranks. Collective.

    logs    of the last step, whose keys count where a train_step of one's own has others than the metrics
    exact   for Keras's own metrics, and for classes that inherit their sums and results from them;
            results of all others, and numbers that are no metric's, are averaged over ranks
    errors  HorovodInternalError on every rank when ranks have different metrics
    """
    results = _flat(getattr(type(model), RESULT_HOOK)(model, logs))
    own = _flat(model.get_metrics_result())
    with summed_over_ranks([metric for metric in _leaves(model.metrics) if adds_up(metric)]):
        of_all = _flat(model.get_metrics_result())
    # A train_step of one's own may return other numbers by these names, such as the last batch's loss.
    taken = {
        key: of_all[key] if key in own and np.array_equal(_array(value), _array(own[key])) else value
        for key, value in results.items()
    }
    return average_numbers(taken)


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Return True if the metric's variables are sums over samples: all of Keras's own are."""
    methods = (getattr(type(metric), name) for name in ("update_state", "result", "reset_state"))
    return all(method.__module__.startswith("keras.src.metrics.") for method in methods)


@contextmanager
def summed_over_ranks(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Give the metrics the sums of all ranks, and their own again afterwards. Collective."""
    variables = [variable for metric in metrics for variable in metric.variables]
    require_same("averaging metrics", [f"{v.path} {tuple(v.shape)} {v.dtype}" for v in variables])
    own = [variable.value.detach().clone() for variable in variables]
    if variables:
        # float64: exact for counts, and for sums better than the float32 of one process.
        flat = torch.cat([value.to("cpu", torch.float64).reshape(-1) for value in own])
        flat = allreduce(flat, name="keras.metrics.sums", op=Sum)
        for variable, total in zip(variables, flat.split([value.numel() for value in own]), strict=True):
            variable.assign(total.reshape(tuple(variable.shape)))
    try:
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def average_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs with each number and array as its mean over ranks, all else as it is. Collective.

    errors   HorovodInternalError on every rank when the ranks' keys or shapes differ
    """
    values = {key: _array(logs[key]) for key in sorted(logs) if _is_number(logs[key])}
    require_same("averaging metrics", [f"{key} {value.shape}" for key, value in values.items()])
    if not values:
        return logs
    flat = torch.from_numpy(
        np.concatenate([value.astype(np.float64).reshape(-1) for value in values.values()])
    )
    means = allreduce(flat, name="keras.metrics.results", op=Average).split([v.size for v in values.values()])
    averaged = {
        key: mean.item() if value.shape == () else mean.numpy().reshape(value.shape)
        for (key, value), mean in zip(values.items(), means, strict=True)
    }
    return {key: averaged.get(key, value) for key, value in logs.items()}


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logs without dicts in them, as Keras logs them."""
    flat: dict[str, Any] = {}
    for key, value in logs.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {key: value})
    return flat


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value) if _is_number(value) else value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor | keras.Variable):
        return True
    return isinstance(value, int | float | np.ndarray | np.number) and np.asarray(value).dtype.kind in "biuf"


def _leaves(metrics: Sequence[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    """Yield metrics, and in place of a model's container of compiled metrics, those within."""
    for metric in metrics:
        within = getattr(metric, "metrics", None)
        if within is None:
            yield metric
        else:
            yield from _leaves(within)
