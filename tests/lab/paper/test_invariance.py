"""Every change that must not be felt is not felt, and every control is."""

from flowpool.lab.paper import invariance


def test_table_of_changes() -> None:
    changes = invariance.compute(seed=4)
    kept = [change for change in changes if not change.control]
    felt = [change for change in changes if change.control]
    assert len(kept) == 7
    assert len(felt) == 2
    assert {change.name: change.points for change in kept if change.points > 1e-8} == {}
    assert {change.name: change.gradient for change in kept if change.gradient > 1e-6} == {}
    assert {change.name: change.points for change in felt if change.points < 1e-4} == {}
