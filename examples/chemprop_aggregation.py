"""FlowReadout as an aggregation of Chemprop: the class, its name in the registry, and a model that is trained with it."""

import sys

try:
    from chemprop import data, models
    from chemprop import nn as chemprop_nn
    from chemprop.nn.agg import Aggregation, AggregationRegistry
except ImportError:
    sys.exit("This example needs Chemprop: pip install chemprop.")

import numpy as np
import torch
from torch import Tensor

from flowpool import FlowReadout


@AggregationRegistry.register("flow")
class FlowAggregation(Aggregation):
    """What M learned points receive of the atoms of each molecule; a predictor needs ``input_dim=out_channels``."""

    def __init__(self, in_channels: int, num_points: int = 4, dim: int = 0) -> None:
        super().__init__(dim)
        self.hparams |= {"in_channels": in_channels, "num_points": num_points}
        self.readout = FlowReadout(in_channels=in_channels, num_points=num_points)

    @property
    def out_channels(self) -> int:
        return self.readout.out_channels

    def forward(self, H: Tensor, batch: Tensor) -> Tensor:
        return self.readout(H, batch)


torch.manual_seed(0)
# How many carbon atoms a molecule has: something that a mean forgets and a readout should not.
chains = [("C" * carbon + "O" * oxygen) for carbon in range(1, 11) for oxygen in range(4)]
points = [data.MoleculeDatapoint.from_smi(smiles, np.array([smiles.count("C") / 5])) for smiles in chains]
loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=20, num_workers=0)

passing = chemprop_nn.BondMessagePassing(d_h=16)
aggregation = AggregationRegistry["flow"](passing.output_dim)
predictor = chemprop_nn.RegressionFFN(input_dim=aggregation.out_channels, hidden_dim=32)
model = models.MPNN(passing, aggregation, predictor)
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(1, 31):
    total = 0.0
    for batch in loader:
        optimiser.zero_grad()
        found = model(batch.bmg)
        loss = (found - batch.Y).square().mean()
        loss.backward()
        optimiser.step()
        total += float(loss.detach()) / len(loader)
    if epoch in (1, 10, 20, 30):
        print(f"epoch {epoch:2}: squared error {total:.4f}")
