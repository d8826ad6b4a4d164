"""Everything that decides the numbers of an evaluation, apart from the pools and the number of repeats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from flowpool.lab import identity
from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import Fold, GraphDataset, Source
from flowpool.lab.frozen.selection import KernelGrid
from flowpool.lab.metrics import METRICS, Metric, kind_of, metric_for
from flowpool.lab.names import Protocol
from flowpool.lab.options import FlowSettings, Grid, Schedule, Shape
from flowpool.lab.presets import FINAL_RUNS, PRESETS

FROZEN_POINTS = 8


@dataclass(frozen=True)
class Configuration:
    """What is evaluated, and how.

    Attributes:
        source: the graphs and the folds.
        protocol: ``"paper"`` and ``"errica"`` train networks, ``"frozen"`` fits kernel machines to fixed embeddings.
        metric: its name; None: accuracy, or RMSE where numbers are predicted.
        seed: of all weights, orders and draws.
        grid: the settings of a training to choose from.
        shape: the model; its ``channels`` and ``layers`` are those of the grid. Frozen, ``num_points`` alone counts.
        schedule: the training; its learning rate and criterion are those of the grid.
        flow: settings of the pools that run the flow.
        kernels: the settings of a kernel machine to choose from.
    """

    source: Source = Source()
    protocol: Protocol = "paper"
    metric: str | None = None
    seed: int = 0
    grid: Grid = Grid()
    shape: Shape = Shape()
    schedule: Schedule = Schedule()
    flow: FlowSettings = FlowSettings()
    kernels: KernelGrid = KernelGrid()

    def __post_init__(self) -> None:
        if self.protocol not in FINAL_RUNS:
            raise ValueError(f"Unknown protocol {self.protocol!r}; pass {', '.join(FINAL_RUNS)}.")
        if self.metric not in (None, *METRICS):
            raise ValueError(f"Unknown metric {self.metric!r}; pass {', '.join(METRICS)}.")
        self.source.checked()
        if self.protocol == "frozen":
            return
        settings = self.grid.settings()
        if not settings or (self.protocol == "paper" and len(settings) > 1):
            raise ValueError(
                f"The grid has {len(settings)} settings; the paper's protocol trains exactly one. "
                "Pass one value for each, or choose the protocol errica."
            )
        for setting in settings:
            self.shape_of(setting)
            self.schedule_of(setting)

    @staticmethod
    def made(
        source: Source, protocol: Protocol, preset: str, metric: str | None, seed: int, given: Mapping[str, Any]
    ) -> Configuration:
        """A preset with what is ``given`` on top, by the names of the fields of shape, schedule, flow and grid."""
        if protocol == "frozen":
            if strange := [name for name in given if name != "num_points"]:
                raise ValueError(
                    f"--{strange[0].replace('_', '-')} is about training, and nothing is trained in the frozen protocol; "
                    "leave it out."
                )
            shape = Shape(num_points=given.get("num_points", FROZEN_POINTS))
            return Configuration(source, protocol, metric, seed, shape=shape)
        base = PRESETS[preset]
        mine = {
            kind: {f.name: given[f.name] for f in fields(kind) if f.name in given} for kind in (Shape, Schedule, Grid)
        }
        for name in mine[Grid].keys() & mine[Shape].keys():  # both have channels and layers; those of the grid count
            del mine[Shape][name]
        if "backbone" in given:
            mine[Shape].setdefault("propagation", None)
        shape = replace(base.shape, **mine[Shape])
        if "layers" in given and shape.backbone not in ("gin", "gine"):
            raise ValueError(f"--layers is an option of the backbones gin and gine; {shape.backbone} has one layer.")
        if base.schedule.cosine and "max_epochs" in given:  # its learning rate falls until the last epoch
            mine[Schedule].setdefault("patience", given["max_epochs"])
        flow = FlowSettings(**{f.name: given[f.name] for f in fields(FlowSettings) if f.name in given})
        return Configuration(
            source,
            protocol,
            metric,
            seed,
            replace(base.grids[protocol], **mine[Grid]),
            shape,
            replace(base.schedule, **mine[Schedule]),
            flow,
        )

    @property
    def is_as_in_paper(self) -> bool:
        """Whether everything that the paper states about its table (section 9) is as it states it.

        It does not state how graphs are batched and how the flow is set.
        """
        here = replace(self.source, data=None)
        stated = replace(self, source=here, seed=0, flow=FlowSettings(), shape=replace(self.shape, padding="none"))
        return stated == Configuration()

    @property
    def graphs(self) -> GraphDataset:
        return self.source.load(kind_of(self.metric))

    @property
    def prepared(self) -> GraphDataset:
        """The graphs as the trained part of the model needs them."""
        if self.protocol == "frozen":
            return self.graphs
        return _prepared(self.source, self.metric, self.shape.backbone, self.shape.propagation)

    def folds(self, repeat: int) -> tuple[Fold, ...]:
        return self.source.folds(kind_of(self.metric), repeat)

    @cached_property
    def measure(self) -> Metric:
        return metric_for(self.graphs, self.metric)

    def shape_of(self, setting: Mapping[str, Any]) -> Shape:
        return replace(self.shape, channels=setting["channels"], layers=setting["layers"])

    def schedule_of(self, setting: Mapping[str, Any]) -> Schedule:
        return replace(self.schedule, learning_rate=setting["learning_rate"], stop_on=setting["stop_on"])

    def identity(self) -> dict[str, Any]:
        """Plain data that is equal exactly for evaluations whose folds may be put side by side."""
        common = {
            "dataset": self.source.name,
            "graphs": identity.of_graphs(self.graphs),
            "splits": identity.of_folds(self.folds(0)),
            "split": self.source.table.split,
            "origin": self.source.origin(kind_of(self.metric)),
            "num_folds": len(self.folds(0)),
            "fixed_folds": not self.source.is_redrawn(kind_of(self.metric)),
            "notes": list(self.source.notes(kind_of(self.metric))),
            "protocol": self.protocol,
            "metric": self.measure.name,
            "num_points": self.shape.num_points,
            "seed": self.seed,
            "as_in_paper": self.is_as_in_paper,
            "code": identity.of_sources(),
            "packages": identity.of_packages(),
        }
        if self.protocol == "frozen":
            return {**common, **asdict(self.kernels)}
        shape, schedule = asdict(self.shape), asdict(self.schedule)
        del shape["channels"], shape["layers"], schedule["learning_rate"], schedule["stop_on"]  # in the grid
        flow = asdict(self.flow)
        return {**common, "flow": flow, **asdict(self.grid), **shape, **schedule}


@lru_cache(maxsize=4)
def _prepared(source: Source, metric: str | None, backbone: Any, propagation: Any) -> GraphDataset:
    return prepare(source.load(kind_of(metric)), backbone, propagation)


def folder_name(identity: Mapping[str, Any]) -> str:
    """A name for the folder of results that is different for every configuration."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{identity['dataset']}-{identity.get('backbone', identity['protocol'])}-{digest[:10]}"
