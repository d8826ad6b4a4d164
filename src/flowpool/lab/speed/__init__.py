"""Speed and memory of FlowPool beside its peers, as ratios measured in one process."""

from flowpool.lab.speed.bench import Measurement, run_bench, write_bench, write_rows
from flowpool.lab.speed.device import DeviceRow, device_name, run_on_device
from flowpool.lab.speed.trained import TrainedRow, run_trained
from flowpool.lab.speed.turns import processor

__all__ = [
    "DeviceRow", "Measurement", "TrainedRow", "device_name", "processor", "run_bench", "run_on_device", "run_trained",
    "write_bench", "write_rows",
]  # fmt: skip
