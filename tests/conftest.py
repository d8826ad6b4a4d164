"""What every test can count on."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _drawn_alike() -> None:
    """Layers draw their weights from torch's own generator; a test meets the same ones alone and after any others."""
    torch.manual_seed(0)
