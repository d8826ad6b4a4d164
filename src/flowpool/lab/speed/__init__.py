"""Speed and memory of FlowPool beside its peers, as ratios measured in one process."""

from flowpool.lab.speed.bench import Measurement, run_bench, write_bench

__all__ = ["Measurement", "run_bench", "write_bench"]
