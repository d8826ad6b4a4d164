"""FlowReadout as an aggregation of Chemprop 2: from the atoms of a batch of molecules to one row for each.

    aggregation = FlowAggregation(message_passing.output_dim)
    predictor = RegressionFFN(input_dim=aggregation.output_dim)
    model = MPNN(message_passing, aggregation, predictor)

A row is wider than an atom, so the predictor has to be told. The readout has a BatchNorm of its own, so
``MPNN(batch_norm=True)`` is not needed. After ``import flowpool.chemprop``, ``AggregationRegistry["flow"]`` finds it.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from flowpool.nn.readout import FlowReadout

try:
    from chemprop.nn.agg import Aggregation, AggregationRegistry
except ImportError as missing:
    raise ImportError("flowpool.chemprop needs Chemprop 2: pip install 'flowpool[chemprop]'.") from missing

__all__ = ["FlowAggregation"]


@AggregationRegistry.register("flow")
class FlowAggregation(Aggregation):
    """The sum of the atoms of each molecule, their number, and how they are spread; see :class:`flowpool.FlowReadout`.

    All arguments are in ``hparams``, so that Chemprop's checkpoints and model files restore the layer as it was made.

    Args:
        in_channels: features of an atom, ``message_passing.output_dim``.
        num_points, size, seed, epsilon, on_failure: as in :class:`flowpool.FlowReadout`.
        dim: 0, since atoms are rows; Chemprop hands it to every aggregation.
    """

    def __init__(
        self,
        in_channels: int,
        num_points: int = 8,
        *,
        size: Literal["append"] | None = "append",
        seed: int = 0,
        epsilon: float = 0.1,
        on_failure: Literal["warn", "raise", "ignore"] = "warn",
        dim: int = 0,
    ) -> None:
        super().__init__(dim)
        if dim != 0:
            raise ValueError(f"dim is {dim}; the atoms of a batch are rows: pass 0.")
        options: dict[str, Any] = {"size": size, "seed": seed, "epsilon": epsilon, "on_failure": on_failure}
        self.hparams |= {"in_channels": in_channels, "num_points": num_points, **options}
        self.readout = FlowReadout(in_channels, num_points, **options)

    @property
    def output_dim(self) -> int:
        """Columns of a row, the ``input_dim`` of a predictor."""
        return self.readout.out_channels

    def forward(self, H: Tensor, batch: Tensor) -> Tensor:  # noqa: N803  (Chemprop's name)
        """One row per molecule, ``(B, output_dim)``, from atoms ``(V, in_channels)`` and the molecule of each, ``(V,)``."""
        rows: Tensor = self.readout(H, batch)
        return rows
