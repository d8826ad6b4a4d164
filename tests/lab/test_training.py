"""Training: the stopping rule, the order of mini-batches, and the steps themselves."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import cross_entropy

from flowpool.lab import training
from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import load_dataset, load_splits
from flowpool.lab.leakproof import Practice, divide
from flowpool.lab.model import GraphModel, build_model, derived_seed
from flowpool.lab.options import Schedule, Shape, StopOn
from flowpool.lab.training import mini_batches, train


@pytest.fixture(scope="module")
def practice() -> Practice:
    dataset = prepare(load_dataset("MUTAG"), "sgc", "normalised")
    return divide(dataset, load_splits("MUTAG", dataset)[0])[0]


def fresh(pool: str = "sum", seed: int = 0) -> GraphModel:
    return build_model(pool, Shape(), 7, 2, seed)


def script(monkeypatch: pytest.MonkeyPatch, losses: list[float], accuracies: list[float]) -> None:
    """Makes validation say what the test wants."""
    values: Iterator[tuple[float, float]] = iter(zip(losses, accuracies, strict=True))
    monkeypatch.setattr(training, "_assess", lambda model, parts, metric: next(values))


@pytest.mark.parametrize(
    ("losses", "stop_on", "best", "epochs"),
    [
        ([5, 4, 3, 3, 3, 3, 1], "loss", 2, 6),  # three epochs without a better one, equal is not better
        ([5, 4, 3, 4, 4, 2, 3, 3, 3, 0], "loss", 5, 9),
        ([5, 4, 3, 2, 1, 0.5], "loss", 5, 6),
        ([math.nan] * 8, "loss", 0, 4),
        ([5, 1, 1, 1, 1, 1, 1, 1], "score", 1, 5),
    ],
)
def test_training_ends_when_patience_is_over(
    monkeypatch: pytest.MonkeyPatch, practice: Practice, losses: list[float], stop_on: StopOn, best: int, epochs: int
) -> None:
    accuracies = losses if stop_on == "loss" else [1 / loss for loss in losses]
    script(monkeypatch, losses, accuracies)
    trained = train(fresh(), practice, Schedule(patience=3, max_epochs=len(losses), stop_on=stop_on), 0)
    assert trained.best_epoch == best
    assert len(trained.curve.train_loss) == epochs


def test_the_weights_are_those_of_the_best_epoch(monkeypatch: pytest.MonkeyPatch, practice: Practice) -> None:
    script(monkeypatch, [3, 2, 4, 4, 4], [0] * 5)
    stopped = fresh()
    train(stopped, practice, Schedule(patience=3), 7)
    script(monkeypatch, [3, 2], [0] * 2)
    short = fresh()
    train(short, practice, Schedule(max_epochs=2), 7)
    for one, other in zip(stopped.parameters(), short.parameters(), strict=True):
        assert torch.equal(one, other)


def test_no_weights_are_kept_while_training_settles(monkeypatch: pytest.MonkeyPatch, practice: Practice) -> None:
    script(monkeypatch, [1, 1, 3, 4, 2, 5, 6, 7], [0] * 8)
    trained = train(fresh(), practice, Schedule(max_epochs=8, settling=0.25), 0)
    assert trained.best_epoch == 4


def test_weights_decay_and_the_learning_rate_falls(practice: Practice) -> None:
    model, twin = fresh(), fresh()
    schedule = Schedule(max_epochs=2, batch_size=1000, weight_decay=0.5, cosine=True, settling=1.0)
    train(model, practice, schedule, 0)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.5, fused=False, foreach=False)
    everything = practice.graphs.batch(practice.train)
    for rate in (0.01, 0.005):  # (1 + cos(0)) / 2 and (1 + cos(pi / 2)) / 2 of it
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        scores = twin(everything.x, everything.edge_index, everything.batch, len(everything.y)).outputs
        torch.nn.functional.cross_entropy(scores, everything.y).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_epochs_are_plain_adam_steps_on_shuffled_batches(practice: Practice) -> None:
    model, twin, seed = fresh(), fresh(), 3
    trained = train(model, practice, Schedule(max_epochs=2), seed)
    order = torch.Generator().manual_seed(derived_seed(seed, "order"))
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01, fused=False, foreach=False)
    losses = []
    for _ in range(2):
        permutation = torch.randperm(practice.num_train, generator=order)
        total = 0.0
        for start in range(0, len(permutation), 32):
            numbers = permutation[start : start + 32]
            part = practice.graphs.batch(numbers)
            loss = cross_entropy(twin(part.x, part.edge_index, part.batch, len(numbers)).outputs, part.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(numbers)
        losses.append(total / practice.num_train)
    assert trained.curve.train_loss == pytest.approx(losses, rel=1e-4)
    validation = practice.graphs.batch(practice.validation)
    with torch.no_grad():
        outputs = twin(validation.x, validation.edge_index, validation.batch, len(validation.y)).outputs
    assert trained.curve.validation_loss[-1] == pytest.approx(float(cross_entropy(outputs, validation.y)), rel=1e-4)
    accuracy = float((outputs.argmax(1) == validation.y).double().mean())
    assert trained.curve.validation_score[-1] == accuracy


def test_every_pool_sees_the_same_graphs_in_the_same_order(monkeypatch: pytest.MonkeyPatch, practice: Practice) -> None:
    seen: dict[str, list[list[int]]] = {}
    original = training.mini_batches
    for pool in ("sum", "sort", "gmt", "wegl"):

        def note(*arguments: object, pool: str = pool) -> list[torch.Tensor]:
            parts = original(*arguments)  # type: ignore[arg-type]
            seen.setdefault(pool, []).extend(part.tolist() for part in parts)
            return parts

        monkeypatch.setattr(training, "mini_batches", note)
        train(fresh(pool), practice, Schedule(max_epochs=2), 5)
    assert len(seen["sum"]) == 10
    assert seen["sum"] == seen["sort"] == seen["gmt"] == seen["wegl"]


@pytest.mark.parametrize(("num_graphs", "sizes"), [(64, [32, 32]), (65, [32, 33]), (66, [32, 32, 2]), (1, [1])])
def test_mini_batches_hold_every_graph_once_and_none_is_alone(num_graphs: int, sizes: list[int]) -> None:
    parts = mini_batches(num_graphs, 32, torch.Generator().manual_seed(0))
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(num_graphs))


def test_an_auxiliary_loss_is_part_of_the_training_loss(practice: Practice) -> None:
    model = fresh("mincut")
    part = practice.graphs.batch(practice.train)
    with torch.no_grad():
        output = model(part.x, part.edge_index, part.batch, len(part.y))
    assert float(output.loss) != 0
    trained = train(model, practice, Schedule(max_epochs=1, batch_size=1000, learning_rate=1e-12), 0)
    expected = float(cross_entropy(output.outputs, part.y) + output.loss)
    assert trained.curve.train_loss[0] == pytest.approx(expected, rel=1e-5)


def test_training_leaves_the_random_state_alone_and_repeats_itself(practice: Practice) -> None:
    first, second = fresh("gmt"), fresh("gmt")
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = train(first, practice, Schedule(max_epochs=2), 0)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert train(second, practice, Schedule(max_epochs=2), 0).curve == one.curve


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning rate is 0.0"),
        ({"batch_size": 1}, "at least 2 graphs"),
        ({"max_epochs": 0}, "0 epochs"),
        ({"patience": 0}, "patience 0"),
        ({"stop_on": "luck"}, "Unknown criterion"),
    ],
)
def test_wrong_schedules_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**change)  # type: ignore[arg-type]
