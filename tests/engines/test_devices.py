"""Tensors on another device: a stand-in that counts what an accelerator would be waited for (``programs/elsewhere.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowpool.engines.devices import HOST, carried

ONCE = {"down": 1, "up": 1, "asked": 0}  # copies to the host and from it, questions for a value
NEVER = {"down": 0, "up": 0, "asked": 0}
FLOW = {"flow_pool": 4, "FlowPool": 2}  # and how many gradients they have
STEP = {"transport_pool": 4, "FlowReadout": 7, "FlowReadout in evaluation": 7}


PROGRAMS = Path(__file__).parent / "programs"


def outputs(*commands: list[str]) -> list[list[dict[str, Any]]]:
    """What programs that run at the same time print, each a list of records."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch knows no devices written in Python")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for command in commands
    ]
    try:
        printed = [program.communicate(timeout=250) for program in started]
    finally:
        for program in started:
            program.kill()
    for program, (_, said) in zip(started, printed, strict=True):
        assert program.returncode == 0, said[-4000:]
    return [[json.loads(line) for line in lines.splitlines()] for lines, _ in printed]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (lines,) = outputs([str(PROGRAMS / "elsewhere.py")])
    return {line.pop("case"): line for line in lines}


@pytest.mark.parametrize("way", ["", " compiled"])
@pytest.mark.parametrize("case", FLOW)
def test_each_pass_goes_to_the_host_once_and_comes_back_once_with_the_bits_of_the_cpu(
    found: dict[str, Any], case: str, way: str
) -> None:
    if case + way not in found:
        pytest.skip("compiled in its plain form alone")
    seen = found[case + way]
    assert seen["equal"] and seen["gradients"] == FLOW[case]
    assert seen["forward"] == seen["backward"] == ONCE


def test_coarsening_goes_to_the_host_for_its_points_alone(found: dict[str, Any]) -> None:
    seen = found["FlowCoarsen"]
    assert seen["near"] < 1e-5 and seen["gradients"] == 2
    assert (seen["forward"]["down"], seen["forward"]["up"]) == (1, 1) and seen["forward"][
        "asked"
    ] <= 7  # checks of edges
    assert seen["backward"] == ONCE


@pytest.mark.parametrize("way", ["", " compiled"])
@pytest.mark.parametrize("case", STEP)
def test_the_step_stays_on_the_device_and_never_waits_for_it(found: dict[str, Any], case: str, way: str) -> None:
    if case + way not in found:
        pytest.skip("compiled in its plain form alone")
    seen = found[case + way]
    assert seen["near"] < 5e-5  # in single precision the gradients of a norm are small differences
    assert seen["gradients"] == STEP[case]
    assert seen["forward"] == seen["backward"] == NEVER


def test_half_precision_under_autocast_is_that_of_the_cpu(found: dict[str, Any]) -> None:
    assert found["autocast"]["near"] < 1e-5 and found["autocast"]["gradients"] == 7


def test_everything_handed_over_is_on_the_device_and_says_where_it_was_found(found: dict[str, Any]) -> None:
    seen = found["records"]
    assert all(seen["there"]) and len(seen["there"]) == 14
    assert all(seen["equal"])
    assert seen["where"] == ["compiled engine on cpu"] * 2
    assert seen["report"].endswith("torch engine on elsewhere:0")
    assert len(seen["said"]) == 1 and "elsewhere:0 are pooled by kernels on the CPU" in seen["said"][0]
    assert all(seen["torch engine"])  # stayed there, and found the same


def test_what_is_learned_on_the_host_has_its_gradient_there(found: dict[str, Any]) -> None:
    seen = found["apart"]
    assert seen["equal"] and seen["epsilon"] == "cpu" and seen["backward"] == ONCE


def test_trouble_is_told_as_on_the_cpu(found: dict[str, Any]) -> None:
    broken, negative, apart, unable = found["trouble"]["said"]
    assert "1 of 6 graphs are NONFINITE_INPUT (graph 2)" in broken
    assert "is -1; graph ids must be at least 0" in negative
    assert apart.startswith("reference is on cpu, nodes are on elsewhere:0")
    assert "squared Euclidean cost" in unable


def test_no_double_precision_reaches_a_device_that_has_none(found: dict[str, Any]) -> None:
    assert found["single"]["equal"] and set(found["single"]["single"]) == {"torch.float32"}


def test_two_processes_train_there_as_two_do_on_the_cpu(tmp_path: Path) -> None:
    program, meeting = str(PROGRAMS / "elsewhere_processes.py"), str(tmp_path / "meeting")
    first, second = outputs(*([program, rank, meeting] for rank in ("0", "1")))
    assert first == second
    seen = first[0]
    assert seen["near"] < 1e-5 and seen["gradients"] == 10
    assert seen["forward"]["asked"] == 0
    assert seen["backward"] == ONCE  # for the sum over processes, which goes by way of the host here


def test_what_is_on_the_host_stays_itself() -> None:
    values = [torch.ones(2), None, 0.1]
    assert all(a is b for a, b in zip(carried(values, HOST), values, strict=True))
