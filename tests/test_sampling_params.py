"""Ranges of the sampling parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm.errors import RequestError
from edgellm.sampling_params import SamplingParams, with_structure
from edgellm.structure.description import Structure

GOOD = {
    "temperature": [0, 0.001, 0.7, 100, np.float32(0.5)],
    "top_k": [0, 1, 2**31 - 1, np.int64(40)],
    "top_p": [1e-6, 0.5, 1, 1.0],
    "min_p": [0, 0.1, 1],
    "repetition_penalty": [0.01, 1, 1.3, 100],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "seed": [None, 0, 2**64 - 1],
    "max_tokens": [None, 1, 5000],
    "min_tokens": [0, 5000],
    "stop": [(), ["a"], ("a", "bc")],
    "stop_token_ids": [(), [0, 5], (7,)],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 5, 20],
    "structure": [None],
    "logit_bias": [()],
    "allowed_token_ids": [None, [0, 5], (7,)],
    "bad_words": [(), ["a"], ("a b", (1, 2))],
}
NAN, INFINITY = float("nan"), float("inf")
BAD = {
    "temperature": [-0.1, 100.5, NAN, INFINITY, "0.5", None, True],
    "top_k": [-2, 2**31, 1.5, "3", None, False],
    "top_p": [0, -0.5, 1.0001, NAN, None],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, 101, INFINITY],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, "0"],
    "seed": [-(2**63) - 1, 2**64, 1.0, "7"],
    "max_tokens": [0, -5, 1.0, True],
    "min_tokens": [-1, 1.0, True, None],
    "stop": ["", [""], ["a", ""], [1], 5, None],
    "stop_token_ids": [[-1], ["a"], [1.5], "12", None],
    "ignore_eos": [1, "yes", None],
    "logprobs": [-1, 21, 1.5, True, "5"],
    "structure": [5, "json", True],
    "logit_bias": [5, "a", {1: 101}, {1: NAN}, {-1: 0}, {"a": 1}, {1.5: 1}, [3], dict.fromkeys(range(1025), 1), None],
    "allowed_token_ids": [[], [-1], ["a"], "12", 5],
    "bad_words": [None, "word", [""], [" "], [[]], [[-1]], [["a"]], [5], ["a"] * 1025, ["a" * 1000] * 66],
}


def test_no_more_tokens_are_needed_than_there_may_be():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match="min_tokens is 6 and max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_what_others_write_for_nothing_is_nothing():
    """Qwen2.5-VL's `generation_config.json` has the temperature 1e-6, vLLM's clients send a `top_k` of -1."""
    assert SamplingParams(temperature=1e-6, top_k=-1) == SamplingParams()
    assert SamplingParams(seed=-1).seed == 2**64 - 1


def test_every_field_is_tested():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(GOOD) == set(BAD)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_values_in_range_are_kept(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == (tuple(value) if isinstance(value, list) else value)
    assert type(kept) in (int, float, bool, tuple, type(None))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(RequestError, match=rf"^{name} .*(expected|empty)"):
        SamplingParams(**{name: value})


def test_message_names_value_and_range():
    with pytest.raises(RequestError, match=r"^top_p is 1\.5: expected a number above 0 and up to 1$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"^max_tokens is 0: expected a whole number from 1 to 2147483647$"):
        SamplingParams(max_tokens=0)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop_token_ids=3).stop_token_ids == (3,)


def test_biases_are_kept_by_token_id():
    assert SamplingParams(logit_bias={7: -100, "3": 5}).logit_bias == ((3, 5.0), (7, -100.0))
    params = SamplingParams(logit_bias={1: 2}, bad_words=["a", [1]], allowed_token_ids=[5, 2, 5])
    assert dataclasses.replace(params) == params and hash(params)
    assert (params.bad_words, params.allowed_token_ids) == (("a", (1,)), (2, 5))


def test_a_structure_comes_in_several_forms():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = SamplingParams(structure=schema)
    assert params.structure == Structure(json=schema) and hash(params) == hash(dataclasses.replace(params))
    assert SamplingParams(structure=["yes", "no"]).structure == Structure(choice=("yes", "no"))
    assert SamplingParams(structure="json_object").structure == Structure(json_object=True)
    with pytest.raises(RequestError, match="ignore_eos goes on behind the end"):
        SamplingParams(structure=["yes"], ignore_eos=True)


def test_the_structure_of_a_call_takes_the_place_of_that_of_its_parameters():
    params = SamplingParams(temperature=0.5, structure=["yes"])
    assert with_structure(params) is params and with_structure(None) is None
    asked = with_structure(params, structure="json_object")
    assert (asked.temperature, asked.structure) == (0.5, Structure(json_object=True))
    assert with_structure(None, response_format={"type": "json_object"}) == SamplingParams(structure="json_object")
    assert with_structure(params, response_format={"type": "text"}).structure is None
    with pytest.raises(RequestError, match="give one of them"):
        with_structure(params, structure=["a"], response_format={"type": "text"})


def test_default_is_greedy_and_plain():
    params = SamplingParams()
    assert not params.needs_sampling


def test_seeds_are_drawn_only_where_needed():
    assert SamplingParams().seeded().seed is None
    assert SamplingParams(temperature=1, seed=5).seeded().seed == 5
    drawn = {SamplingParams(temperature=1).seeded().seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**32 for seed in drawn)


def test_parameters_stay_what_they_were_when_a_request_was_made():
    stop, stop_token_ids = ["END"], [7]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append("more")
    stop_token_ids.append(8)
    assert (params.stop, params.stop_token_ids) == (("END",), (7,))
    assert {params: 1}[SamplingParams(stop=["END"], stop_token_ids=[7])] == 1, "equal parameters are one key"
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
