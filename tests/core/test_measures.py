import pytest
import torch

from flowpool.core.measures import make_clouds

NODES = torch.arange(12, dtype=torch.float64).view(6, 2)


def test_unsorted_batch_is_sorted_and_gradients_come_back_in_order():
    nodes = NODES.clone().requires_grad_()
    clouds, order = make_clouds(nodes, torch.tensor([1, 0, 1, 0, 3, 1]))
    assert clouds.ptr.tolist() == [0, 2, 5, 5, 6]
    assert clouds.batch.tolist() == [0, 0, 1, 1, 1, 3]
    assert torch.equal(clouds.nodes, nodes[order])
    assert [sorted(part.tolist()) for part in order.split([2, 3, 0, 1])] == [[1, 3], [0, 2, 5], [], [4]]
    (clouds.nodes * torch.arange(6.0).unsqueeze(-1)).sum().backward()
    assert torch.equal(nodes.grad[order, 0], torch.arange(6.0).double())


def test_the_order_given_inside_a_graph_does_not_matter_to_the_last_bit():
    shuffled = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    batch = torch.tensor([0, 0, 0, 1, 1, 1])
    one, _ = make_clouds(NODES, batch, masses=NODES[:, 1])
    other, _ = make_clouds(NODES[shuffled], batch[shuffled], masses=NODES[shuffled, 1])
    assert torch.equal(one.nodes, other.nodes) and torch.equal(one.masses, other.masses)


def test_batch_and_ptr_give_the_same_clouds():
    by_batch, _ = make_clouds(NODES, torch.tensor([0, 0, 2, 2, 2, 3]), num_graphs=5)
    by_ptr, _ = make_clouds(NODES, ptr=torch.tensor([0, 2, 2, 5, 6, 6]))
    assert torch.equal(by_batch.ptr, by_ptr.ptr)
    assert torch.equal(by_batch.masses, by_ptr.masses)
    assert by_ptr.sizes.tolist() == [2, 0, 3, 1, 0]


def test_masses_are_normalised_per_graph():
    masses = torch.tensor([1.0, 3.0, 2.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    clouds, order = make_clouds(NODES, torch.tensor([0, 0, 1, 1, 1, 2]), masses=masses)
    assert clouds.masses[order.argsort()].tolist() == [0.25, 0.75, 0.25, 0.25, 0.5, 1.0]
    assert torch.allclose(clouds.mean()[0], 0.25 * NODES[0] + 0.75 * NODES[1])


def test_one_graph_without_batch_and_padded_graphs():
    assert make_clouds(NODES)[0].ptr.tolist() == [0, 6]
    clouds, _ = make_clouds(NODES, ptr=torch.tensor([0, 2, 3, 6]))
    nodes, masses = clouds.padded(torch.tensor([2, 0]))
    assert torch.equal(nodes[0], clouds.nodes[3:6]) and torch.equal(nodes[1, :2], clouds.nodes[0:2])
    assert not nodes[1, 2].any() and masses[1].tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": torch.tensor([0, 0, -2, 0, 0, 0])}, r"batch\[2\] is -2"),
        ({"batch": torch.tensor([0, 0, 5, 0, 9, 0]), "num_graphs": 3}, r"batch\[2\] is 5.*dim_size=3"),
        ({"batch": torch.zeros(5, dtype=torch.long)}, r"shape \(5,\); expected \(6,\)"),
        ({"batch": torch.zeros(6)}, "float32; pass an integer"),
        ({"batch": torch.full((6,), 2**40)}, "do not fit"),
        ({"batch": torch.zeros(6, dtype=torch.long), "num_graphs": 2**40}, "dim_size is 1099511627776"),
        ({"batch": torch.zeros(6, dtype=torch.long), "num_graphs": 2.0}, "dim_size is 2.0; pass a whole number"),
        ({"ptr": torch.tensor([1, 6])}, r"ptr\[0\] is 1"),
        ({"ptr": torch.tensor([0, 4, 3, 6])}, "falls from 4 to 3 at position 2"),
        ({"ptr": torch.tensor([0, 4])}, r"ptr\[-1\] is 4, but there are 6 nodes"),
        ({"ptr": torch.tensor([0, 6]), "num_graphs": 2}, "dim_size is 2, but ptr describes 1"),
        ({"ptr": torch.tensor([0, 2, 6]), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}, r"batch\[2\] is 0, ptr puts"),
        ({"num_graphs": 3}, "without batch or ptr"),
    ],
)
def test_bad_structure_says_what_where_and_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_clouds(NODES, **arguments)
