"""Traffic and acceptance that a test spells out."""

from dataclasses import dataclass

import numpy as np
import pytest

from dspark.simulate.acceptance import Block
from dspark.simulate.traffic import _Timed
from dspark.simulate.workload import RequestPool


@dataclass(frozen=True, eq=False)
class Listed:
    """Requests at given times."""

    times: list
    prompt: list
    output: list

    def start(self, rng, until):
        arrays = [np.array(column, dtype=np.int64) for column in (self.prompt, self.output)]
        return _Timed(
            np.array(self.times, dtype=float), RequestPool(*arrays, np.zeros_like(arrays[0]), ("any",))
        )


@dataclass(frozen=True, eq=False)
class Told:
    """Every block of pool row r goes as far as `run(r)`; confidences are `c` at every slot (None: there are none)."""

    gamma: int
    run: object
    c: float | None = None
    domain_names: tuple = ("any",)

    def start(self, domains, domain, seeds):
        return self

    def block(self, requests, with_survival):
        survival = None
        if self.c is not None and with_survival:
            survival = np.full((len(requests), self.gamma), self.c).cumprod(axis=1)
        return Block(survival, np.array([self.run(r) for r in requests.tolist()]))


@pytest.fixture
def listed():
    return Listed


@pytest.fixture
def told():
    return Told
