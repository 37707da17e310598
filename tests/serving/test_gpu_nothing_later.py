"""After a model was opened on a GPU nothing is compiled, loaded, built or captured for what it serves."""

from __future__ import annotations

import pytest
from every_kind import DRAFTINGS, PARAMS, SAMPLED, answer_all, for_sequences

from edgellm import LLM, Request, SamplingParams, SpecDecodeRuntime, Structure
from edgellm.kernels.made import CAPTURED

pytestmark = pytest.mark.gpu

RULED = SamplingParams(max_tokens=40, structure=Structure(regex='\\{"colour": "(red|green)", "count": [0-9]{1,2}\\}'))


@pytest.mark.parametrize("name", DRAFTINGS)
def test_nothing_is_made_after_opening(name: str) -> None:
    with LLM(drafting=DRAFTINGS[name]) as llm:
        runtime = llm._runtime
        before = dict(runtime.made.counts)
        print(f"\n{name}: {runtime.made}")
        llm._called(lambda runtime: answer_all(runtime, 1, RULED))
        assert runtime.made.counts == before
        assert not runtime._runner.uncaptured
        del runtime


@pytest.mark.parametrize("name", ["plain", "chain", "adaptive"])
def test_nothing_is_made_once_all_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sequences at a time, of whose steps the rest is captured while nobody waits."""
    for_sequences(3, monkeypatch)
    with SpecDecodeRuntime(drafting=DRAFTINGS[name]) as runtime:
        while runtime.idle():
            pass
        before = dict(runtime.made.counts)
        print(f"\n{name}: {runtime.made}")
        answer_all(runtime, 3, RULED)
        assert runtime.made.counts == before


def test_answers_are_those_of_steps_that_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its capture runs as it is, and gives the same tokens."""
    monkeypatch.setattr("edgellm.opened_model.CAPTURED_AT_ONCE", 0)
    with SpecDecodeRuntime() as runtime:
        captured = runtime.made.counts[CAPTURED]  # at opening: the encoder of images
        requests = [Request([5, 6, 7], None, params) for params in (PARAMS, SAMPLED, RULED)]
        expected = [runtime.handle_request(request).token_ids for request in requests]
        assert runtime.made.counts[CAPTURED] == captured
        assert runtime.capture_decoding_cuda_graph()
        assert [runtime.handle_request(request).token_ids for request in requests] == expected
