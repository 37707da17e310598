"""After a model was opened nothing is compiled, loaded or captured for what it serves: on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from absent_serving import ServingOnNothing

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.image_inputs import ImageRows
from edgellm.kernels.made import CAPTURED

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=0.9, seed=1, repetition_penalty=1.1, top_p=0.9)
#: How an answer may be drawn: greedily, sampled, biased, under rules that leave a choice, and that force tokens.
ALL_PARAMS = {
    "greedy": PARAMS,
    "sampled": SAMPLED,
    "biased": replace(PARAMS, logit_bias={7: 2.0}),
    "ruled": replace(PARAMS, allowed_token_ids=[1, 7]),
    "forced": replace(SAMPLED, allowed_token_ids=[1]),
}
TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)
DRAFTINGS = {
    "plain": None,
    "tree": TREE,
    "chain": DraftingConfig(kind="chain", draft_steps=3),
    "sampled chain": DraftingConfig(kind="chain", draft_steps=2, sampled=True),
    "typical": replace(TREE, acceptance="typical"),
    "choices": DraftingConfig(kind="choices", choices=[[0], [1], [0, 0]]),
    "suffix": DraftingConfig(kind="suffix"),
    "joint": replace(TREE, suffix_decoding=True),
    "adaptive": DraftingConfig(10, 6, 60, adaptive=True),
}


@contextmanager
def opened(
    monkeypatch: pytest.MonkeyPatch, drafting: DraftingConfig | None, batch: int
) -> Iterator[tuple[SpecDecodeRuntime, ServingOnNothing]]:
    """The shipped model, for so many sequences at a time."""
    made: list[ServingOnNothing] = []
    monkeypatch.setattr(ImageRows, "check", lambda *arguments: None)  # no image reaches its tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            "edgellm.runtime.open_backend",
            lambda _, directory, executor: made.append(ServingOnNothing(directory)) or made[-1],
        )
        own = EngineDirectory.with_kv_cache

        def with_batch(directory: EngineDirectory, kv_cache: str | None) -> EngineDirectory:
            found = own(directory, kv_cache)
            return replace(found, limits=replace(found.limits, max_batch=batch))

        patch.setattr(EngineDirectory, "with_kv_cache", with_batch)
        runtime = SpecDecodeRuntime(drafting=drafting)
    with runtime:
        yield runtime, made.pop()


def answer_all(runtime: SpecDecodeRuntime, batch: int, image: str) -> None:
    """Requests of every kind, alone and several at a time."""
    prompts = [[5] * length for length in (1, 3, 20, 65, 129, 300)]
    kinds = [Request(prompt, None, params) for prompt in prompts for params in ALL_PARAMS.values()]
    kinds += [replace(each, adapter="pirate") for each in kinds[:5]]
    shown = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
    kinds.append(Request(messages=[{"role": "user", "content": shown}], params=PARAMS))
    for number, request in enumerate(kinds):
        runtime.handle_request(request)
        if batch > 1:
            together = [*kinds[number : number + batch]]
            for response in runtime.handle_request(together):
                assert not isinstance(response, Exception), response


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTINGS)
def test_nothing_is_made_after_opening(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, DRAFTINGS[name], batch) as (runtime, backend):
        while batch > 1 and runtime.idle():
            pass
        before, captured = set(backend.module.sources), backend.made.counts[CAPTURED]
        assert captured > 5 and not runtime._runner.uncaptured
        assert not runtime.idle(), "all of one sequence at a time is captured when the model is opened"
        answer_all(runtime, batch, str(runtime.directory.path / "scenes" / "toys.png"))
        assert set(backend.module.sources) == before
        assert backend.made.counts[CAPTURED] == captured
