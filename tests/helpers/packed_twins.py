"""Engine directories of packed weights on a GPU, and those of the same values dense: what both answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm import LLM, Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.tokenizer import Tokenizer

QUESTIONS = ("What is your name?", "Where is the red cup?", "Can you fly to the moon?")
DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=4, verify_tree_size=24, adaptive=False)
NO_ADAPTERS = (None, None, None)


def answers(
    directory: Path,
    drafting: DraftingConfig | None,
    adapters: tuple[str | None, ...] = NO_ADAPTERS,
    kv_cache: str | None = None,
    image: Path | None = None,
) -> list[object]:
    """A batch of three, greedy and drawn; a question behind a system prompt's snapshot; one about an image where there
    is one."""
    system = (SHIPPED_MODEL / "system_prompt.txt").read_text()
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in QUESTIONS]
    shown = [{"type": "image", "image": str(image)}, {"type": "text", "text": "What?"}]
    with LLM(directory, backend="tensorrt", drafting=drafting, kv_cache=kv_cache) as llm:
        asked = []
        for number, (chat, name) in enumerate(zip(chats, adapters, strict=True)):
            params = SamplingParams(temperature=0.9 * (number % 2), top_k=20, seed=number, max_tokens=32)
            asked.append(Request(llm.tokenizer.encode_chat(chat), None, params, name))
        found = llm.handle(asked)
        kept = llm.cache_system_prompt(system)
        found.append(llm.chat(chats[1], SamplingParams(max_tokens=24)))
        assert found[-1].usage.reused_tokens >= kept.tokens - 1
        if image is not None:
            found.append(llm.chat([{"role": "user", "content": shown}], SamplingParams(max_tokens=24)))
        return [response.token_ids for response in found]


def answer_logits(path: Path) -> tuple[list[int], list[int], np.ndarray]:
    """A prompt of all questions, its greedy answer of eight tokens, and the logits [8, V] of that."""
    prompt = Tokenizer.from_directory(path).encode(" ".join(QUESTIONS) * 4)
    with open_runner("tensorrt", EngineDirectory.open(path)) as runner:
        print(f"\n{path.name}: weights {runner.memory_plan.items['weights']:,} bytes")
        answer = greedy_tokens(runner, prompt, 8)
        return prompt, answer, teacher_forced_logits(runner, prompt, answer)
