"""FlowReadout on MUTAG with Lightning, on two processes: the readout needs nothing special there."""

import sys

try:
    import lightning
except ImportError:
    sys.exit("This example needs Lightning: pip install lightning.")

import logging
import warnings

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv

from flowpool import FlowReadout
from flowpool.lab.datasets import load_dataset


class Classifier(lightning.LightningModule):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = GCNConv(num_features, 16), GCNConv(16, 8)
        self.readout = FlowReadout(in_channels=8, num_points=3)
        self.head = nn.Linear(self.readout.out_channels, num_classes)

    def forward(self, data: Batch) -> Tensor:
        x = torch.relu(self.first(data.x, data.edge_index))
        x = torch.relu(self.second(x, data.edge_index))
        return self.head(self.readout(x, data.batch))

    def training_step(self, data: Batch, _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(data), data.y)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=data.num_graphs)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(
                f"epoch {self.current_epoch + 1}: loss {float(self.trainer.callback_metrics['loss']):.3f}", flush=True
            )

    def test_step(self, data: Batch, _: int) -> None:
        right = (self(data).argmax(1) == data.y).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=data.num_graphs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":  # the second process runs this file too
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    dataset = load_dataset("MUTAG")
    graphs = [Data(x=graph.x, edge_index=graph.edge_index, y=torch.tensor(graph.y)) for graph in dataset]
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0)).tolist()
    train = DataLoader([graphs[i] for i in order[:140]], batch_size=16, shuffle=True)
    test = DataLoader([graphs[i] for i in order[140:]], batch_size=24)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(dataset.num_features, dataset.num_classes)
    trainer.fit(model, train)
    found = trainer.test(model, test, verbose=False)
    if trainer.is_global_zero:
        print(f"one split, for show: held-out accuracy {found[0]['accuracy']:.2f}, {trainer.world_size} processes")
