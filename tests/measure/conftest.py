"""What tests of the scripts in benchmarks/ share."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """The module that a script of benchmarks/ is, by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
