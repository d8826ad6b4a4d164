"""The aggregation of Chemprop: the rows of FlowReadout, in Chemprop's models, checkpoints and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("chemprop", reason="Chemprop is not installed")

import lightning  # noqa: E402
from chemprop import data, models, nn  # noqa: E402
from chemprop.models.utils import load_model, save_model  # noqa: E402
from chemprop.nn.agg import AggregationRegistry  # noqa: E402
from chemprop.nn.hparams import from_hparams  # noqa: E402

from flowpool import FlowReadout  # noqa: E402
from flowpool.chemprop import FlowAggregation  # noqa: E402

SMILES = ["CCO", "c1ccccc1O", "CC(=O)N", "C", "CCCCCC", "OCC(O)CO", "c1ccncc1", "CC#N"]


def molecules() -> data.MoleculeDataset:
    rows = [data.MoleculeDatapoint.from_smi(smiles, np.array([float(len(smiles))])) for smiles in SMILES]
    return data.MoleculeDataset(rows)


def model(**options: Any) -> models.MPNN:
    torch.manual_seed(0)
    passing = nn.BondMessagePassing(d_h=8, depth=2)
    aggregation = FlowAggregation(passing.output_dim, 3, **options)
    return models.MPNN(passing, aggregation, nn.RegressionFFN(input_dim=aggregation.output_dim, hidden_dim=8))


def test_rows_are_those_of_flow_readout() -> None:
    atoms, batch = torch.randn(9, 5), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    aggregation, readout = FlowAggregation(5, 3, seed=4, epsilon=0.2), FlowReadout(5, 3, seed=4, epsilon=0.2)
    readout.load_state_dict(aggregation.readout.state_dict())
    torch.testing.assert_close(aggregation(atoms, batch), readout(atoms, batch), rtol=0, atol=0)
    assert aggregation(atoms, batch).shape == (3, aggregation.output_dim)


def test_it_is_found_by_name_and_made_again_from_its_hyper_parameters() -> None:
    given = {"in_channels": 5, "num_points": 3, "size": None, "seed": 7, "epsilon": 0.3, "on_failure": "raise"}
    aggregation = AggregationRegistry["flow"](**given)
    assert aggregation.hparams == {"cls": FlowAggregation, "dim": 0, **given}
    again = from_hparams(aggregation.hparams)
    assert again.output_dim == aggregation.output_dim and repr(again) == repr(aggregation)
    torch.testing.assert_close(again.readout.reference, aggregation.readout.reference)


def test_other_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="dim is 1; the atoms of a batch are rows: pass 0"):
        FlowAggregation(5, dim=1)


def test_gradients_reach_the_message_passing() -> None:
    batch = next(iter(data.build_dataloader(molecules(), batch_size=8, num_workers=0, shuffle=False)))
    whole = model()
    whole(batch.bmg).square().sum().backward()
    for parameter in (whole.message_passing.W_i.weight, whole.agg.readout.node_norm.weight):
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize("size", ["append", None])
def test_checkpoints_and_files_bring_back_the_trained_layer(tmp_path: Path, size: Any) -> None:
    whole, loader = model(size=size), data.build_dataloader(molecules(), batch_size=4, num_workers=0, shuffle=False)
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(whole, loader)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    save_model(tmp_path / "whole.pt", whole)
    batch = next(iter(loader))
    expected = whole.eval()(batch.bmg)
    for again in (models.MPNN.load_from_checkpoint(tmp_path / "whole.ckpt"), load_model(tmp_path / "whole.pt")):
        assert again.agg.output_dim == whole.agg.output_dim
        batch = next(iter(loader))
        torch.testing.assert_close(again.eval()(batch.bmg), expected, rtol=0, atol=0)
