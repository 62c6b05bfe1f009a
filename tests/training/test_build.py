from __future__ import annotations

import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import PeerFailedError
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaStages
from hpcpar.training import parallelize_llama
from hpcpar.training.build import place_on_hardware, plain_optimizer
from hpcpar.training.config import Config, OptimizerSection, parse

SMALL = (
    "[model]\nhidden_size = 8\nlayers = 1\nheads = 2\nkv_heads = 1\nffn_size = 16\n[train]\nsequence = 8\n"
)


def built(config: Config, comm: Communicator) -> Llama | LlamaStages:
    return parallelize_llama(config.model_config_for(256), Mesh(comm), config).model


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = built(parse(SMALL, source="x"), Communicator.alone())
    optimizer = plain_optimizer(OptimizerSection(weight_decay=0.3), model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.0 if "norm" in name else 0.3 for name, _ in model.named_parameters()
    }


def test_sgd_has_its_momentum() -> None:
    optimizer = plain_optimizer(OptimizerSection(name="sgd", momentum=0.7), torch.nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_the_model_is_the_same_on_every_rank_and_of_the_dtype_asked_for() -> None:
    config = parse(SMALL + 'precision = "float64"\n', source="x")
    models = run_loopback(2, lambda comm: built(config, comm))
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert first.dtype == torch.float64
        assert torch.equal(first, second)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_asking_for_a_gpu_where_there_is_none_fails_on_every_rank() -> None:
    config = parse("[train]\ndevice = 'cuda'\nthreads = 1\n", source="x")
    with pytest.raises(PeerFailedError, match="torch sees no GPU"):
        run_loopback(2, lambda comm: place_on_hardware(config, comm))
