"""The measure of a graph has mass one, forgets the numbering of the nodes, and remembers the edges."""

import torch

from flowpool.lab.paper import measure


def test_two_joined_nodes_are_averaged() -> None:
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    smoothed = measure.smooth(features, torch.tensor([[0, 1], [1, 0]]), hops=1)
    torch.testing.assert_close(smoothed, torch.tensor([[2.0, 2.0], [2.0, 2.0]]))


def test_lonely_node_keeps_its_features() -> None:
    features = torch.tensor([[1.0, 5.0]])
    torch.testing.assert_close(measure.smooth(features, torch.zeros(2, 0, dtype=torch.long)), features)


def test_measure_forgets_numbers_and_remembers_edges() -> None:
    record = measure.compute()
    torch.testing.assert_close(record.masses, torch.full((7,), 1 / 7, dtype=torch.float64))
    assert record.renumbered < 1e-12
    assert record.cut > 0.01
