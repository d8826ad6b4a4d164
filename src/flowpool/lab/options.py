"""What can be set in an evaluation, each thing once: its default, its check, and the words of the command's help.

Nothing heavy is imported, so that the help answers at once.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from flowpool.lab.names import Backbone, Gradient, Norm, Padding, Propagation, Reference, Size, UpdateStep

StopOn = Literal["loss", "score"]

MOST_POINTS = 10_000  # per graph, and features per node; more is a slip of the finger, or would not fit into memory
MOST_LAYERS = 100


def option(default: Any, about: str, *, usual: str | None = None, flag: str | None = None) -> Any:
    """A field of a dataclass that is an option of the command as well.

    Args:
        default: of the field.
        about: the help of the option.
        usual: what holds where the option is not given, in words, if that is not the default.
        flag: how it is called there, if not by the name of the field; ``--yes/--no`` for a switch.
    """
    return field(default=default, metadata={"about": about, "usual": usual, "flag": flag})


@dataclass(frozen=True)
class Columns:
    """Which columns of a reader's own table hold what; of ``target`` and ``split`` several, separated by commas."""

    smiles: str | None = option(None, "Column of a CSV file with molecules as SMILES.")
    nodes: str | None = option(None, "Column of a Parquet file with sets of vectors.")
    masses: str | None = option(None, "Column with the masses of these vectors.", usual="equal masses")
    target: str | None = option(None, "Column to be predicted, classes or numbers; several numbers: A,B.")
    split: str | None = option(
        None,
        "Columns that hold train, validation and test; or random, scaffold, stratified (80/10/10, five draws), folds (ten).",
        usual="published ones, else folds",
    )


@dataclass(frozen=True)
class Shape:
    """The model apart from its pool; the same for every pool.

    Attributes:
        backbone: see `flowpool.lab.backbones`.
        propagation: of the backbone sgc, by default normalised; None for others.
        channels: d, node features that the pool sees.
        num_points: number of points, M.
        size: the number of nodes N that a mean or a measure forgets: not handed over, appended to the pooled vector
            in units of the mean N of the training graphs, or multiplied into it.
        norm: BatchNorm before the pool, on the vector before the head, both, or none.
        padding: what the pool sees: the nodes alone, or every graph padded with rows of zeros to the size of the
            largest graph of the dataset, without mass (``"empty"``) or with that of a node (``"mass"``); see
            `flowpool.lab.padding`.
        layers: of the backbones gin and gine.
        jumping: whether each of these layers has a pool of its own, and the vectors are joined.
        hidden: units of the hidden layer of the head; 0: the head is linear.
        dropout: share of the units that are left out before each layer of the head.
        standardise: whether features come standardised by their mean and deviation over the training nodes.
    """

    backbone: Backbone = option("sgc", "Network before the pool.", usual="sgc; strong: gin")
    propagation: Propagation | None = option(None, "How sgc propagates.", usual="normalised")
    channels: int = 8
    num_points: int = option(
        5, "Points M per graph, for pools that have them.", usual="5; strong, frozen: 8", flag="--points"
    )
    size: Size = option("none", "Give the number of nodes to the head, for every pool.", usual="none; strong: append")
    norm: Norm = option("none", "BatchNorm before or after every pool.", usual="none; strong: both")
    padding: Padding = option(
        "none",
        "Pad every graph with rows of zeros to the size of the largest: no; with rows of mass zero, which changes nothing; "
        "or with rows that weigh as much as a node.",
    )
    layers: int = 2
    jumping: bool = False
    hidden: int = 0
    dropout: float = 0.0
    standardise: bool = False

    def __post_init__(self) -> None:
        if self.backbone not in get_args(Backbone):
            raise ValueError(f"Unknown backbone {self.backbone!r}; there are {', '.join(get_args(Backbone))}.")
        if self.backbone == "sgc" and self.propagation is None:
            object.__setattr__(self, "propagation", "normalised")
        if self.propagation not in (None, *get_args(Propagation)):
            raise ValueError(f"Unknown propagation {self.propagation!r}; sgc has {', '.join(get_args(Propagation))}.")
        if self.backbone != "sgc" and self.propagation is not None:
            raise ValueError(f"Propagation {self.propagation!r} belongs to the backbone sgc; {self.backbone} has none.")
        if self.size not in get_args(Size):
            raise ValueError(f"Unknown size {self.size!r}; pass {', '.join(get_args(Size))}.")
        if self.norm not in get_args(Norm):
            raise ValueError(f"Unknown norm {self.norm!r}; pass {', '.join(get_args(Norm))}.")
        if self.padding not in get_args(Padding):
            raise ValueError(f"Unknown padding {self.padding!r}; pass {', '.join(get_args(Padding))}.")
        check_count(self.channels, "channels", MOST_POINTS)
        check_count(self.num_points, "points", MOST_POINTS)
        check_count(self.layers, "layers", MOST_LAYERS)

    @property
    def pooled_layers(self) -> int:
        """Layers of the backbone that are pooled."""
        return self.layers if self.jumping and self.backbone in ("gin", "gine") else 1


@dataclass(frozen=True)
class Grid:
    """The settings among which validation graphs choose; a grid of one leaves nothing to choose."""

    channels: tuple[int, ...] = option(
        (8,), "Node features d that the pool sees.", usual="8; strong: 32; errica: 32,64"
    )
    learning_rates: tuple[float, ...] = option(
        (0.01,), "Learning rate of Adam.", usual="0.01; errica: 0.01,0.001; strong: 0.002", flag="--learning-rate"
    )
    stop_on: tuple[StopOn, ...] = ("loss",)
    layers: tuple[int, ...] = option((2,), "Layers of gin.", usual="2; strong: 3; errica with strong: 2,3,5")

    def settings(self) -> list[dict[str, Any]]:
        names = ("channels", "learning_rate", "stop_on", "layers")
        values = itertools.product(self.channels, self.learning_rates, self.stop_on, self.layers)
        return [dict(zip(names, chosen, strict=True)) for chosen in values]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; the defaults are the paper's (section 9).

    Attributes:
        learning_rate: of Adam.
        batch_size: graphs per step.
        max_epochs: at most so many.
        patience: epochs without a better validation value after which training ends.
        stop_on: the validation value: the loss, or the metric of the evaluation.
        weight_decay: of Adam, decoupled.
        cosine: whether the learning rate falls to zero over all epochs along a cosine.
        settling: share of the epochs at the beginning from which no weights are kept.
    """

    learning_rate: float = 0.01
    batch_size: int = option(32, "Graphs per training step.")
    max_epochs: int = option(300, "Longest training, in epochs.", usual="300; strong: 80")
    patience: int = option(
        20, "Stop after this many epochs without a better validation value.", usual="20; strong: all"
    )
    stop_on: StopOn = "loss"
    weight_decay: float = 0.0
    cosine: bool = False
    settling: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"The learning rate is {self.learning_rate}; it must be a positive number.")
        if self.batch_size < 2:
            raise ValueError(f"The batch size is {self.batch_size}; BatchNorm needs at least 2 graphs.")
        if self.max_epochs < 1 or self.patience < 1:
            raise ValueError(f"{self.max_epochs} epochs with patience {self.patience}; both must be at least 1.")
        if self.stop_on not in get_args(StopOn):
            raise ValueError(f"Unknown criterion {self.stop_on!r}; pass {', '.join(get_args(StopOn))}.")


@dataclass(frozen=True)
class FlowSettings:
    """Settings of the flow; None stands for the default of :class:`flowpool.FlowPool`.

    Attributes:
        epsilon: entropic regularisation.
        relative: epsilon in units of each graph's variance, and the reference placed on each graph. Otherwise both are
            absolute, as in the paper, and a normal reference has variance one in every feature.
        reference: drawn from a normal distribution, or k-means centres of the training nodes.
        reference_seed: one for all folds; None draws another reference for each fold.
        debias: descend the Sinkhorn divergence; otherwise the entropic loss alone.
        steps: at most so many.
        step_size: a fixed step of Algorithm 1.
        update_step: runs Algorithm 1 exactly as printed, with the step size as its tau.
        ridge: lambda of the backward pass.
        gradient: through the optimality condition, or through the recorded steps.
    """

    epsilon: float = option(0.1, "Entropic regularisation.")
    relative: bool = option(
        True,
        "Epsilon and reference in units of each graph, or as they are, as in the paper.",
        flag="--relative/--absolute",
    )
    reference: Reference = option("normal", "Where the flow starts.")
    reference_seed: int | None = option(
        None, "Use one reference for all folds, drawn with this seed.", usual="one for each fold"
    )
    debias: bool = option(
        True, "Descend the Sinkhorn divergence, or only the entropic loss.", flag="--debias/--no-debias"
    )
    steps: int | None = option(None, "Most steps of the flow.", usual="the layer's")
    step_size: float | None = option(None, "Fixed step of Algorithm 1.", usual="chosen by its error")
    update_step: UpdateStep | None = option(
        None, "Run Algorithm 1 exactly as printed, with the step size as its tau.", usual="our steps"
    )
    ridge: float | None = option(None, "Lambda of the backward pass.", usual="the layer's")
    gradient: Gradient = option("implicit", "Through the optimality condition, or through the steps.")

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon is {self.epsilon}; pass a positive number, like 0.1.")
        if self.reference not in get_args(Reference):
            raise ValueError(f"Unknown reference {self.reference!r}; pass {', '.join(get_args(Reference))}.")
        if self.gradient not in get_args(Gradient):
            raise ValueError(f"Unknown gradient {self.gradient!r}; pass {', '.join(get_args(Gradient))}.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"{self.steps} steps; pass at least 1.")
        longest = 1 if self.update_step is None else math.inf
        if self.step_size is not None and not 0 < self.step_size <= longest:
            raise ValueError(f"The step size is {self.step_size}; pass a value above 0 and up to {longest}.")
        if self.update_step not in (None, *get_args(UpdateStep)):
            raise ValueError(f"Unknown update step {self.update_step!r}; pass {', '.join(get_args(UpdateStep))}.")
        if self.update_step is not None and self.step_size is None:
            raise ValueError("An update step needs a step size, the tau of Algorithm 1.")
        if self.ridge is not None and not 0 <= self.ridge < math.inf:
            raise ValueError(f"The ridge is {self.ridge}; pass a value of at least 0.")

    def changed(self) -> dict[str, Any]:
        """What is not as it is by default."""
        default = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def layer_options(self) -> dict[str, Any]:
        """The arguments of :class:`flowpool.FlowPool`, apart from its reference."""
        given = {
            "max_steps": self.steps,
            "step_size": self.step_size,
            "update_step": self.update_step,
            "ridge": self.ridge,
        }
        return {
            "epsilon": self.epsilon,
            "relative": self.relative,
            "debias": self.debias,
            "gradient": self.gradient,
            **{name: value for name, value in given.items() if value is not None},
        }


def check_count(value: int, what: str, most: int) -> None:
    """Raise ValueError unless there is at least one and not an absurd number of ``what``."""
    if not 1 <= value <= most:
        raise ValueError(f"{value:,} {what}; pass a number from 1 to {most:,}.")


# Records whose fields are options of the command, the panel of these in its help, and whether only --help-all shows it.
GROUPS = (
    (Columns, "A file of your own", False),
    (Shape, "Model", True),
    (Grid, "Model", True),
    (Schedule, "Training", True),
    (FlowSettings, "Settings of the flow", True),
)
