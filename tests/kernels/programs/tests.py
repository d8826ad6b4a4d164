"""Runs the tests that it is given; prints the way the kernels were compiled."""

from __future__ import annotations

import sys

import pytest

from flowpool.kernels.machine.jit import CHECKED, QUICK

if __name__ == "__main__":
    print("checked" if CHECKED else "quick" if QUICK else "plain", flush=True)
    sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
