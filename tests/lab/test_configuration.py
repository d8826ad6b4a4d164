"""A configuration: what is in it decides the numbers, and what cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowpool.lab import identity
from flowpool.lab.configuration import Configuration, folder_name
from flowpool.lab.datasets import Source
from flowpool.lab.options import Columns, FlowSettings, Grid, Schedule, Shape

SHORT = Configuration(schedule=Schedule(max_epochs=2))
MUTAG = Source()


def test_what_decides_the_numbers_is_in_the_identity() -> None:
    base = SHORT.identity()
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"metric": "auc"},
        {"grid": Grid((16,), (0.01,), ("loss",))},
        {"shape": Shape(propagation="raw")},
        {"shape": Shape(size="append")},
        {"shape": Shape(num_points=6)},
        {"shape": Shape(padding="empty")},
        {"schedule": Schedule(patience=7)},
        {"source": Source("SHAPES")},
        {"source": Source(table=Columns(split="stratified"))},
        {"flow": FlowSettings(epsilon=0.2)},
        {"flow": FlowSettings(reference_seed=0)},
    ]
    found = [base, *(replace(SHORT, **change).identity() for change in changes)]
    assert len({json.dumps(entry, sort_keys=True) for entry in found}) == len(found)
    assert len({folder_name(entry) for entry in found}) == len(found)
    elsewhere = replace(SHORT, source=Source(data=str(Path(__file__).parent)))
    assert elsewhere.identity() == base  # the place is not the content


def test_another_code_has_another_identity(tmp_path: Path) -> None:
    for folder, name in (("core", "flow.py"), ("cli", "app.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("value = 1\n")
    fingerprint = identity.of_sources.__wrapped__  # without its memory
    before = fingerprint(tmp_path)
    assert before == fingerprint(tmp_path)
    (tmp_path / "cli" / "app.py").write_text("value = 2\n")
    assert fingerprint(tmp_path) == before  # what shows results decides none
    (tmp_path / "core" / "flow.py").write_text("value = 2\n")
    assert fingerprint(tmp_path) != before
    assert SHORT.identity()["code"] == identity.of_sources()


@pytest.mark.parametrize("part", identity._SHOWING)
def test_what_decides_no_number_is_there(part: str) -> None:
    assert (Path(identity.flowpool.__file__).parent / part).exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"seed": 3}, True),
        ({"source": Source(data="somewhere")}, True),
        ({"shape": Shape(padding="mass")}, True),  # the paper does not say
        ({"flow": FlowSettings(epsilon=1.0, relative=False)}, True),  # nor this
        ({"shape": Shape(propagation="raw")}, False),
        ({"shape": Shape(num_points=4)}, False),
        ({"shape": Shape(norm="nodes")}, False),
        ({"shape": Shape(size="append")}, False),
        ({"grid": Grid((16,), (0.01,), ("loss",))}, False),
        ({"schedule": Schedule(max_epochs=100)}, False),
        ({"source": Source("PTC_MR")}, False),
        ({"source": Source(table=Columns(split="random"))}, False),
    ],
)
def test_the_papers_numbers_stand_beside_the_papers_settings_alone(change: dict[str, Any], expected: bool) -> None:
    assert replace(Configuration(), **change).is_as_in_paper is expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": Grid((8, 16), (0.01,), ("loss",))}, "2 settings; the paper's protocol trains exactly one"),
        ({"grid": Grid(())}, "0 settings"),
        ({"grid": Grid((0,), (0.01,), ("loss",))}, "0 channels"),
        ({"grid": Grid((8,), (-1.0,), ("loss",))}, "learning rate is -1.0"),
        ({"protocol": "mine"}, "Unknown protocol 'mine'; pass paper, errica, frozen"),
        ({"metric": "f1"}, "Unknown metric 'f1'; pass accuracy, auc, rmse, mae, r2"),
        ({"source": Source(table=Columns(smiles="s"))}, "--smiles is an option for a CSV file; MUTAG is none"),
        ({"source": Source("a.csv")}, "a.csv: say which column it is with --smiles COLUMN"),
    ],
)
def test_wrong_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SHORT, **change)


def test_a_preset_holds_for_what_is_not_given() -> None:
    given = {"num_points": 4, "max_epochs": 7, "norm": "output"}
    made = Configuration.made(MUTAG, "paper", "strong", None, 3, given)
    assert (made.shape.backbone, made.shape.size, made.shape.hidden) == ("gin", "append", 64)
    assert (made.shape.num_points, made.shape.norm, made.seed) == (4, "output", 3)
    assert made.schedule.cosine
    assert (made.schedule.max_epochs, made.schedule.patience) == (7, 7)  # the learning rate falls until the last epoch
    assert made.grid == Grid((32,), (2e-3,), ("score",), (3,))
    grid = Configuration.made(MUTAG, "errica", "strong", None, 0, {"channels": (16,)})
    assert [setting["layers"] for setting in grid.grid.settings()] == [2, 3, 5]
    assert {setting["channels"] for setting in grid.grid.settings()} == {16}


def test_another_backbone_propagates_nothing() -> None:
    assert Configuration.made(MUTAG, "paper", "plain", None, 0, {}).shape.propagation == "normalised"
    assert Configuration.made(MUTAG, "paper", "plain", None, 0, {"backbone": "gin"}).shape.propagation is None
    with pytest.raises(ValueError, match="belongs to the backbone sgc; gin has none"):
        Configuration.made(MUTAG, "paper", "plain", None, 0, {"backbone": "gin", "propagation": "raw"})
    with pytest.raises(ValueError, match="--layers is an option of the backbones gin and gine; sgc has one layer"):
        Configuration.made(MUTAG, "paper", "plain", None, 0, {"layers": (3,)})


def test_the_frozen_protocol_trains_nothing() -> None:
    made = Configuration.made(MUTAG, "frozen", "strong", None, 0, {"num_points": 4})
    assert made.identity()["num_points"] == 4
    with pytest.raises(ValueError, match="--max-epochs is about training, and nothing is trained"):
        Configuration.made(MUTAG, "frozen", "plain", None, 0, {"max_epochs": 3})
