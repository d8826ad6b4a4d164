"""What a wheel says about itself: no link of its description leads nowhere, wherever it was built."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RELATIVE = re.compile(r"""(?:\]\(|src=["'])(?![a-z]+:|\#)""")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_script", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_and_links_lead_to_the_repository(build: ModuleType) -> None:
    assert RELATIVE.search(README)  # or this test could not fail
    made = build.description(README, "https://host/us/flowpool")
    assert not RELATIVE.search(made)
    named = re.findall(r"https://host/us/flowpool/(?:raw|blob)/HEAD/([\w./-]+)", made)
    assert len(named) > 10 and [name for name in named if not (ROOT / name).is_file()] == []


def test_without_a_repository_there_are_none(build: ModuleType) -> None:
    made = build.description(README, None)
    assert not RELATIVE.search(made) and "<img" not in made
    assert "pip install" in made and "flow_pool(" in made
    assert build.addresses(None) == {}
