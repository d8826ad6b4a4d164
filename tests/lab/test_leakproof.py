"""Training cannot see what it is tested on."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import Fold, GraphDataset, load_dataset, load_splits
from flowpool.lab.leakproof import Exam, batches, divide, subset
from flowpool.lab.model import build_model
from flowpool.lab.options import Shape
from flowpool.lab.presets import PRESETS
from flowpool.lab.training import predict, train


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    return prepare(load_dataset("MUTAG"), "sgc", "normalised")


@pytest.fixture(scope="module")
def fold(dataset: GraphDataset) -> Fold:
    return load_splits("MUTAG", dataset)[0]


def reachable_tensors(start: Any) -> Iterator[torch.Tensor]:
    """Every tensor that code holding ``start`` can get at through attributes and containers."""
    seen, queue = set(), [start]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            queue += gc.get_referents(item)


def test_nothing_reachable_from_the_practice_holds_test_graphs(dataset: GraphDataset, fold: Fold) -> None:
    practice, _ = divide(dataset, fold)
    count = len(fold.train) + len(fold.validation)
    found = list(reachable_tensors(practice))
    assert any(tensor is practice.graphs.labels for tensor in found)  # the search does find things
    assert practice.graphs.labels.shape == (count,)
    for tensor in found:
        # A view could be widened to the memory that it is a part of.
        assert tensor._base is None
        assert tensor.untyped_storage().data_ptr() != dataset.labels.untyped_storage().data_ptr()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    with pytest.raises(IndexError):
        practice.graphs[count]


def test_the_practice_holds_its_own_graphs_in_order(dataset: GraphDataset, fold: Fold) -> None:
    practice, _ = divide(dataset, fold)
    for place, number in enumerate([*fold.train, *fold.validation]):
        for ours, theirs in zip(practice.graphs[place][:3], dataset[int(number)][:3], strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert practice.train.tolist() == list(range(len(fold.train)))
    assert practice.validation.tolist() == list(range(len(fold.train), len(practice.graphs)))


@pytest.mark.parametrize("preset", ["plain", "strong"])
def test_other_test_labels_and_features_change_nothing_in_training(
    dataset: GraphDataset, fold: Fold, preset: str
) -> None:
    tested = torch.from_numpy(fold.test)
    labels, features = dataset.labels.clone(), dataset.features.clone()
    labels[tested] = 1 - labels[tested]
    for number in fold.test:
        features[dataset.node_ptr[number] : dataset.node_ptr[number + 1]] += 1
    curves, weights = [], []
    for graphs in (dataset, replace(dataset, labels=labels, features=features)):
        practice, _ = divide(graphs, fold)
        model = build_model("sort", replace(PRESETS[preset].shape, size="append", norm="both"), 7, 2, 0)
        curves.append(train(model, practice, replace(PRESETS[preset].schedule, max_epochs=3), 0).curve)
        weights.append(model.state_dict())
    assert curves[0] == curves[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_exam_asks_for_test_graphs_alone(dataset: GraphDataset, fold: Fold) -> None:
    _, exam = divide(dataset, fold)
    model = build_model("mean", Shape(), 7, 2, 0)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 1.0]))  # always class 1
    assert len(exam) == len(fold.test)
    assert exam.taken_by(lambda graphs: predict(model, graphs, 4)).tolist() == [1] * len(fold.test)
    assert exam.labels == dataset.labels[fold.test].tolist()


def test_an_exam_of_one_graph_is_a_copy(dataset: GraphDataset) -> None:
    single = subset(dataset, np.array([5]))
    assert single.features.untyped_storage().data_ptr() != dataset.features.untyped_storage().data_ptr()
    assert Exam(single).labels == [int(dataset.labels[5])]


def test_batches_are_those_of_the_dataset(dataset: GraphDataset) -> None:
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1))
    parts = [order[:32], order[32:33], order[33:100], order[100::3]]
    for ours, part in zip(batches(dataset, parts), parts, strict=True):
        for one, other in zip(ours[:4], dataset.batch(part)[:4], strict=True):
            assert torch.equal(one, other)
        assert ours.edge_features is None
