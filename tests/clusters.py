"""A Ray cluster on this machine, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flowpool


@contextmanager
def two_cores() -> Iterator[None]:
    """A real one, which everything within uses."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from flowpool.bulk.on_ray import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(flowpool.__file__).parents[1]))
        patch.setenv("RAY_worker_niceness", "0")  # or workers wait for tests that run beside these
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        with cluster(None):
            yield
        ray.shutdown()
