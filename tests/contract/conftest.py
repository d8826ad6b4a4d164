"""The pool under test: every form of it (function, layer) with every engine, behind one callable."""

from __future__ import annotations

import pytest
from contract.support import Pool
from hypothesis import settings

ENGINES = ("torch", "compiled")
FORMS = ("function", "layer")

# The same examples on every machine and in every run; a failing one is made as small as it can be.
settings.register_profile("contract", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("contract")


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Name of the engine."""
    return str(request.param)


@pytest.fixture(scope="session", params=FORMS)
def pool(request: pytest.FixtureRequest, engine: str) -> Pool:
    """The pool in each of its forms, with each engine."""
    return Pool(str(request.param), engine)


@pytest.fixture(scope="session")
def function(engine: str) -> Pool:
    """The functional form alone, for options and results that the layer does not have."""
    return Pool("function", engine)
