"""Making SamplingParams: what is no parameter is refused by name, and the dataclass stays one."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from dspark import DSparkError, SamplingParams


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "foo",
            "there is no parameter foo, leave it out; parameters are n, temperature, top_k, .*, speculative$",
        ),
        ("best_of", "best_of is not supported, leave it out; parameters are n, temperature"),
        ("prompt_logprobs", "prompt_logprobs is not supported"),
        ("max_new_tokens", "max_new_tokens is called max_tokens here"),
        ("do_sample", "is called temperature"),
    ],
)
def test_a_parameter_that_is_not_known_is_refused_by_name(name, message):
    with pytest.raises(DSparkError, match=message):
        SamplingParams(**{name: 1, "temperature": 0})
    with pytest.raises(DSparkError, match=message):
        dataclasses.replace(SamplingParams(), **{name: 1})


def test_everything_else_of_a_dataclass_is_as_it_was():
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    for same in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert same == params
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4
