"""Folds that are drawn: shares, strata, scaffolds, seeds; and what keeps their parts apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowpool.lab.datasets import Fold, GraphDataset, draw_folds, kept_apart
from flowpool.lab.datasets.drawn import Drawing
from flowpool.lab.datasets.record import cloud_dataset

RINGS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "c1ccoc1", "c1ccsc1", "C1CCNCC1", "C1CCOCC1", "c1ccc2ccccc2c1", "C1CCCC1"]


def numbers(count: int = 100) -> GraphDataset:
    """Sets of one point, with a number to be predicted."""
    targets = torch.from_numpy(np.random.default_rng(0).normal(size=(count, 1)))
    return cloud_dataset("NUMBERS", np.zeros((count, 1)), np.ones(count, int), targets, ())


def classes(counts: list[int]) -> GraphDataset:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    names = tuple(map(str, range(len(counts))))
    return cloud_dataset("CLASSES", np.zeros((len(labels), 1)), np.ones(len(labels), int), labels, names)


def molecules() -> GraphDataset:
    """Nine scaffolds of several molecules each, and chains, which have none."""
    keys = [ring + "C" * tail for ring in RINGS for tail in range(1, 10)] + ["C" * size for size in range(1, 20)]
    return replace(numbers(len(keys)), keys=tuple(keys), edge_features=torch.empty(0, 1))


def scaffold_of(smiles: str) -> str:
    return next((ring for ring in RINGS if smiles.startswith(ring)), "")


def equal(one: tuple[Fold, ...], other: tuple[Fold, ...]) -> bool:
    return all(
        np.array_equal(a, b)
        for first, second in zip(one, other, strict=True)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("how", ["folds", "random", "stratified", "scaffold"])
def test_every_graph_is_in_one_part_and_other_repeats_differ(how: Drawing) -> None:
    dataset = molecules()
    folds = draw_folds(dataset, how, 0)
    assert len(folds) == (10 if how == "folds" else 5)
    for fold in folds:
        assert sorted(np.concatenate(fold).tolist()) == list(range(len(dataset)))
    assert equal(folds, draw_folds(dataset, how, 0))
    assert not equal(folds, draw_folds(dataset, how, 1))


@pytest.mark.parametrize("how", ["random", "stratified"])
def test_draws_have_eight_one_and_one_tenth(how: Drawing) -> None:
    for fold in draw_folds(numbers(200), how, 3):
        assert [len(part) for part in fold] == [160, 20, 20]


def test_strata_give_their_share_to_every_part() -> None:
    dataset = classes([100, 50, 20])
    for fold in draw_folds(dataset, "stratified", 0):
        for part, share in zip(fold, (0.8, 0.1, 0.1), strict=True):
            assert torch.bincount(dataset.labels[part]).tolist() == [round(share * count) for count in (100, 50, 20)]
    spread = numbers(200)
    order = spread.labels[:, 0].argsort().argsort().numpy()  # rank of each target
    for fold in draw_folds(spread, "stratified", 0):
        assert np.bincount(order[fold.test] // 20).tolist() == [2] * 10  # of each tenth of the targets


def test_numbers_are_cross_validated_without_strata() -> None:
    folds = draw_folds(numbers(50), "folds", 0)
    assert sorted(np.concatenate([fold.test for fold in folds]).tolist()) == list(range(50))


def test_no_scaffold_stands_in_two_parts() -> None:
    dataset = molecules()
    assert dataset.keys is not None
    for fold in draw_folds(dataset, "scaffold", 0):
        parts = [{scaffold_of(dataset.keys[number]) for number in part} for part in fold]
        assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
        assert len(fold.train) > len(fold.test) > 0 and len(fold.validation) > 0


@pytest.mark.parametrize(
    ("dataset", "how", "message"),
    [
        (numbers(9), "random", "NUMBERS has 9 graphs; 10 are needed"),
        (classes([30, 5]), "folds", "10 folds need 10 graphs of each class; found class 0: 30, class 1: 5"),
        (numbers(), "scaffold", "--split scaffold needs molecules, and NUMBERS holds none; pass random or stratified"),
        (numbers(), "time", "--split time: pass folds, random, scaffold, stratified, or columns"),
    ],
)
def test_what_cannot_be_drawn_is_said(dataset: GraphDataset, how: Drawing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_folds(dataset, how, 0)


def test_one_scaffold_cannot_be_divided() -> None:
    same = replace(numbers(20), keys=tuple("c1ccccc1" + "C" * k for k in range(20)), edge_features=torch.empty(0, 1))
    with pytest.raises(ValueError, match="cannot be divided by --split scaffold: its train part would be empty"):
        draw_folds(same, "scaffold", 0)


def parts(*members: list[int]) -> Fold:
    return Fold(*(np.array(part) for part in members))


def test_what_is_tested_is_not_learned_from() -> None:
    """Graph 2 is in two parts, 5 is the same as 0, and 6 stands twice."""
    dataset = replace(numbers(8), keys=("a", "b", "c", "d", "e", "a", "f", "g"))
    given = parts([2, 3, 4, 5, 6, 6], [1, 2], [0, 7])
    (fold,), notes = kept_apart(dataset, [given])
    assert [part.tolist() for part in fold] == [[3, 4, 6], [1, 2], [0, 7]]
    assert notes == (
        "Taken out of training or validation, since they or their equals are tested: 2 in fold 0: graph 2, graph 5.",
        "Rows that a part of a split names twice, counted once: 1 in fold 0.",
    )


def test_a_validation_graph_that_is_tested_goes_and_its_twin_in_training_too() -> None:
    dataset = replace(numbers(6), keys=("a", "a", "a", "b", "c", "d"), places=("line 2", *"xxxxx"))
    (fold,), notes = kept_apart(dataset, [parts([0, 3], [1, 4], [2, 5])])
    assert [part.tolist() for part in fold] == [[3], [4], [2, 5]]
    assert "2 in fold 0: line 2, x" in notes[0]


def test_clean_folds_stay_as_they_are() -> None:
    folds = draw_folds(numbers(), "random", 0)
    clean, notes = kept_apart(numbers(), folds)
    assert equal(clean, folds) and notes == ()


def test_nothing_left_to_learn_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="Fold 0 of NUMBERS has nothing left to learn from"):
        kept_apart(numbers(4), [parts([0, 1], [2], [0, 1, 3])])
