"""Networks as learners: one training per setting of the grid, judged by the validation graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flowpool.lab.configuration import Configuration
from flowpool.lab.datasets import GraphDataset
from flowpool.lab.leakproof import Practice
from flowpool.lab.model import GraphModel, build_model
from flowpool.lab.results import Candidate
from flowpool.lab.training import Trained, predict, train


@dataclass(frozen=True)
class LearnedNetwork:
    """A trained model."""

    model: GraphModel
    trained: Trained
    batch_size: int
    ranks: bool

    @property
    def about(self) -> dict[str, Any]:
        return {
            "seconds": self.trained.seconds,
            "width": self.model.pool.out_channels,
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "curve": self.trained.curve,
            "best_epoch": self.trained.best_epoch,
        }

    def predict(self, graphs: GraphDataset) -> NDArray[Any]:
        return predict(self.model, graphs, self.batch_size, ranks=self.ranks)


@dataclass(frozen=True)
class NetworkLearner:
    """The model of a configuration with one pool."""

    configuration: Configuration
    pool: str

    def candidates(self, practice: Practice, seed: int) -> list[Candidate]:
        """Nothing is trained if there is one setting only."""
        settings = self.configuration.grid.settings()
        if len(settings) == 1:
            return [Candidate(settings[0])]
        return [
            Candidate(setting, self.learn(practice, setting, seed).trained.validation_score) for setting in settings
        ]

    def model(self, graphs: GraphDataset, setting: dict[str, Any], seed: int) -> GraphModel:
        """With fresh weights."""
        configuration = self.configuration
        # All graphs, not only those that training may see: a program with fixed shapes would know it too.
        largest = int(configuration.prepared.node_ptr.diff().max())
        return build_model(
            self.pool,
            configuration.shape_of(setting),
            graphs.num_features,
            graphs.num_outputs,
            seed,
            edge_channels=0 if graphs.edge_features is None else graphs.edge_features.shape[1],
            numbers=not graphs.has_classes,
            flow=configuration.flow,
            largest=largest,
        )

    def learn(self, practice: Practice, setting: dict[str, Any], seed: int) -> LearnedNetwork:
        configuration, model = self.configuration, self.model(practice.graphs, setting, seed)
        schedule = configuration.schedule_of(setting)
        trained = train(model, practice, schedule, seed, metric=configuration.measure)
        return LearnedNetwork(model, trained, schedule.batch_size, configuration.measure.ranks)
