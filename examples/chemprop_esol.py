"""Solubility with Chemprop: its own aggregations and FlowAggregation, trained alike on the first published split of ESOL.

    python examples/chemprop_esol.py [FOLDER with raw.csv and split_0.json] [EPOCHS]

Without a folder the files are looked for in FLOWPOOL_DATA, and else fetched.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

try:
    import lightning
    from chemprop import data, models, nn

    from flowpool.chemprop import FlowAggregation
except ImportError:
    sys.exit("This example needs Chemprop: pip install 'flowpool[chemprop]'.")

import numpy as np
import torch

from flowpool.lab.datasets.molecules import download_molecules, molecules_folder

known = Path(os.environ["FLOWPOOL_DATA"]) if "FLOWPOOL_DATA" in os.environ else None
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else molecules_folder("ESOL", known) or download_molecules("ESOL")
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 30
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

rows = [line.split(",") for line in (folder / "raw.csv").read_text().split()]
split = json.loads((folder / "split_0.json").read_text())
points = [data.MoleculeDatapoint.from_smi(smiles, np.array([float(value)])) for smiles, value in rows]
train, validation, test = (data.MoleculeDataset([points[k] for k in split[part]]) for part in ("train", "val", "test"))
scaler = train.normalize_targets()
validation.normalize_targets(scaler)


def error(aggregation: nn.Aggregation, width: int) -> float:
    """Root of the mean squared error on the test molecules, with the weights of the best validation epoch."""
    lightning.seed_everything(0, verbose=False)
    passing = nn.BondMessagePassing(d_h=64)
    predictor = nn.RegressionFFN(
        input_dim=width, hidden_dim=64, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)
    )
    model = models.MPNN(passing, aggregation, predictor, metrics=[nn.RMSE()])
    best = lightning.pytorch.callbacks.ModelCheckpoint(monitor="val_loss", dirpath=os.curdir, filename="best")
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=[best], logger=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(
        model,
        data.build_dataloader(train, batch_size=64, num_workers=0, seed=0),
        data.build_dataloader(validation, batch_size=128, num_workers=0, shuffle=False),
    )
    kept = models.MPNN.load_from_checkpoint(best.best_model_path)  # also with an aggregation that is not Chemprop's
    Path(best.best_model_path).unlink()
    found = trainer.predict(kept, data.build_dataloader(test, batch_size=128, num_workers=0, shuffle=False))
    return float((torch.cat(found) - torch.tensor(test.Y)).square().mean().sqrt())


flow = FlowAggregation(64)
for name, aggregation, width in [
    ("mean", nn.MeanAggregation(), 64),
    ("sum / 100", nn.NormAggregation(), 64),
    ("flow", flow, flow.output_dim),
]:
    print(f"{name:>10}: error {error(aggregation, width):.3f}, {width} numbers a molecule", flush=True)
