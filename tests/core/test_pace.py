"""How often the host waits for the device: once per block of steps, where that costs."""

import pytest
import torch
from helpers import mutag_clouds
from torch.utils._python_dispatch import TorchDispatchMode

from flowpool import references
from flowpool.core import flow
from flowpool.core.flow import Pace
from flowpool.core.frame import make_frame
from flowpool.core.measures import make_clouds
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines import torch_engine as batching
from flowpool.engines.torch_engine import Problem

LOOKS = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "unique", "_unique2"}
CHECKS = {"_linalg_check_errors", "linalg_eigh", "_linalg_eigh", "linalg_cholesky", "linalg_solve"}


class HostLooks(TorchDispatchMode):
    """Counts the operations whose result the host has to wait for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.count += name in LOOKS | CHECKS or by_mask
        return func(*args, **(kwargs or {}))


def some_energy(num_points=4, width=4, count=6, level=0.3):
    features, batch = mutag_clouds(width=width, count=count, seed=2)
    clouds, _ = make_clouds(features, batch)
    epsilon = torch.full((count,), level, dtype=torch.float64)
    reference = references.normal(width, num_points, seed=1).double()
    frame = make_frame(clouds, Geometry(SquaredEuclidean()), epsilon, reference, True)
    masses = torch.full((num_points,), 1 / num_points, dtype=torch.float64)
    problem = Problem(frame.clouds, frame.start, masses, frame.epsilon, frame.geometry, True)
    (bucket,) = batching.buckets(problem)
    return bucket.energy, frame.start[bucket.graphs]


@pytest.mark.parametrize(
    ("pace", "width"), [(Pace(4, 8), 4), (Pace(16, 4), 4), (Pace(5, 1), 4), (Pace(12, 6), 40)], ids=str
)
def test_the_pace_changes_no_result(pace, width):
    energy, start = some_energy(width=width)
    expected = flow.follow(energy, start, 1e-8, 300)
    found = flow.follow(energy, start, 1e-8, 300, pace=pace)
    assert torch.equal(found.steps, expected.steps)
    assert torch.equal(found.singular, expected.singular)
    assert torch.allclose(found.points, expected.points, rtol=0, atol=1e-10)
    assert torch.allclose(found.residual, expected.residual, rtol=1e-3, atol=1e-12)


def looks_at(function):
    with HostLooks() as mode:
        result = function()
    return mode.count, result


@pytest.mark.parametrize("block", [4, 16])
def test_the_host_looks_once_per_block_and_not_once_per_step(block):
    energy, start = some_energy()
    first, _ = looks_at(lambda: energy.evaluate(start))  # from a cold start, at any pace
    watchful, ended = looks_at(lambda: flow.follow(energy, start, 1e-8, 300))
    rare, _ = looks_at(lambda: flow.follow(energy, start, 1e-8, 300, pace=Pace(block, 8)))
    steps = int(ended.steps.max())
    assert steps > 25
    assert watchful > 10 * steps
    assert rare <= 2 * first + 4 * (steps // block + 2)


def test_only_a_cpu_is_watched():
    assert flow.pace_of(torch.device("cpu")) == flow.WATCHFUL
    rare = flow.pace_of(torch.device("cuda"))
    assert rare.rounds is not None and rare.block >= 8
