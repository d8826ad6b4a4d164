"""The torch engine: the same answer in any company, what it asks of a device, and what it takes of memory."""

import pytest
import torch
from helpers import mutag_clouds
from torch.utils._python_dispatch import TorchDispatchMode

from flowpool import flow_pool, references
from flowpool.core import measures
from flowpool.core.measures import make_clouds
from flowpool.engines import torch_engine


def random_batch(sizes, dim, num_points):
    generator = torch.Generator().manual_seed(dim)
    clouds = [torch.randn(size, dim, generator=generator, dtype=torch.float64) for size in sizes]
    reference = torch.randn(num_points, dim, generator=generator, dtype=torch.float64)
    return clouds, reference, torch.randn(len(sizes), num_points, dim, generator=generator, dtype=torch.float64)


def pooled(clouds, reference, upstream):
    nodes = torch.cat(clouds).requires_grad_()
    batch = torch.arange(len(clouds)).repeat_interleave(torch.tensor([len(cloud) for cloud in clouds]))
    found = flow_pool(nodes, batch, reference=reference, epsilon=0.3, engine="torch", on_failure="ignore")
    (gradient,) = torch.autograd.grad(found.points, nodes, upstream)
    return found, gradient.split([len(cloud) for cloud in clouds])


@pytest.mark.parametrize(("num_points", "dim"), [(5, 3), (3, 7), (1, 1), (5, 8), (4, 5)])
def test_the_same_answer_in_any_company(num_points, dim):
    generator = torch.Generator().manual_seed(dim)
    clouds, reference, upstream = random_batch(
        torch.randint(1, 40, (24,), generator=generator).tolist(), dim, num_points
    )
    whole, gradients = pooled(clouds, reference, upstream)
    for count in (1, 2, 7, 16):
        graphs = torch.randperm(24, generator=generator)[:count].tolist()
        part, own = pooled([clouds[g] for g in graphs], reference, upstream[graphs])
        assert torch.allclose(part.points, whole.points[graphs], rtol=0, atol=1e-11)
        assert torch.equal(part.steps, whole.steps[graphs]) and torch.equal(part.status, whole.status[graphs])
        for gradient, g in zip(own, graphs, strict=True):
            assert torch.allclose(gradient, gradients[g], rtol=1e-8, atol=1e-9)


def test_groups_bound_the_memory_and_hold_every_graph_once(monkeypatch):
    sizes = [3, 900, 4, 17, 8, 30, 5, 16, 0, 2000]
    nodes = torch.randn(sum(sizes), 2, dtype=torch.float64)
    clouds, _ = make_clouds(nodes, torch.arange(10).repeat_interleave(torch.tensor(sizes)))
    monkeypatch.setattr(measures, "GROUP", 10_000)
    groups = [group.tolist() for group in clouds.groups(torch.arange(10), 6)]
    assert sorted(sum(groups, [])) == list(range(10))
    assert [1] in groups and [9] in groups and len(groups) == 3
    for group in groups[:-2]:
        assert len(group) * (max(sizes[g] for g in group) * max(6, max(sizes[g] for g in group)) + 36) <= 10_000
    few, reference, upstream = random_batch([3, 30, 4, 17, 8], 2, 3)
    monkeypatch.setattr(measures, "GROUP", 1)  # every graph alone
    alone, _ = pooled(few, reference, upstream)
    monkeypatch.undo()
    together, _ = pooled(few, reference, upstream)
    assert torch.allclose(alone.points, together.points, rtol=0, atol=1e-11)


def test_the_number_of_threads_is_left_to_the_caller(monkeypatch):
    """It belongs to the process: a thread that is born meanwhile would keep what an engine set for itself."""
    clouds, reference, upstream = random_batch([5, 9], 2, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail(f"set to {count}"))
    pooled(clouds, reference, upstream)
    monkeypatch.undo()
    torch.set_num_threads(before)


class Counted(TorchDispatchMode):
    """Operations that are no views, and questions for values, for which a device would be waited for."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.operations = self.waits = 0
        for name in ("tolist", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self.counting(getattr(torch.Tensor, name)))

    def counting(self, function):
        def call(tensor, *given, **options):
            self.waits += 1
            return function(tensor, *given, **options)

        return call

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.waits += function.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        made = function(*arguments, **(options or {}))
        given = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        viewed = isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() in given
        self.operations += not (function.is_view or viewed and not function._schema.is_mutable)
        return made


def test_a_batch_of_molecules_is_few_operations_and_waits(monkeypatch):
    nodes, batch = mutag_clouds(width=8, count=32)
    nodes.requires_grad_()
    with Counted(monkeypatch) as seen:
        found = flow_pool(nodes, batch, reference=references.normal(8, 5, 0).double(), engine="torch")
        torch.autograd.grad(found.points.square().sum(), nodes)
    assert seen.operations <= MOST_OPERATIONS and seen.waits <= 100


MOST_OPERATIONS = 10_500


def test_judging_moves_nothing():
    clouds, reference, _ = random_batch([9, 12, 20], 2, 3)
    batch = torch.arange(3).repeat_interleave(torch.tensor([9, 12, 20]))
    found = flow_pool(torch.cat(clouds), batch, reference=reference, epsilon=0.3, tolerance=1e-10, engine="torch")
    ends = [found._engine.at_end(found._problem, found._solution, graph) for graph in range(3)]
    for energy, here in ends:
        judged = torch_engine.judge(energy, here.points, 1e-9)
        assert torch.equal(judged.points, here.points) and float(judged.residual) < 1e-9
        away = torch_engine.judge(energy, here.points + 0.1, 1e-9)
        assert float(away.residual) > 1e-3
