"""Whether SafeAILab's own drafter accepts with a head what this runtime accepts: tokens of every round, in float32.

Usage: python -m tools.heads.reference_drafter BASE HEAD PROMPTS --eagle FOLDER [--count 20] [--tokens 64]
       [--plans chain:5 tree:10/5/32] [--output RESULTS.json]

FOLDER is a checkout of SafeAILab's EAGLE, of which `eagle/model/cnets.py` alone is read; BASE a checkpoint as
published, HEAD an EAGLE-3 head for it, PROMPTS JSON lines with `turns`, of which the first is asked. This runtime
answers greedily on NumPy, plainly and drafted. The reference drafts behind the plain answer, from the features that
transformers computes on a CPU, and accepts what the answer goes on with. Depths are those of this runtime: the
reference's `depth` is one less. Exits with 1 where an answer differs, or the rounds of one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from edgellm import LLM
from edgellm.benchmark.comparing import load_prompts, parse_configurations
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from tools.bench.provenance import provenance, report
from tools.heads.answers import chat_ids
from tools.heads.training import Base

#: What a head's config.json need not say, as the reference's own class of configurations has it.
_DEFAULTS = {"pad_token_id": None, "pretraining_tp": 1, "rope_scaling": None, "num_key_value_heads": None}


def reference_drafter(module: ModuleType, head: Path, base: Base, top_k: int, steps: int, size: int) -> Any:
    """Its drafter of trees `top_k` wide and `steps` deep with `size` nodes, the root included, in float32."""
    config = SimpleNamespace(**(_DEFAULTS | json.loads((head / "config.json").read_text(encoding="utf-8"))))
    drafter = module.Model(config, bias=False, total_tokens=size, depth=steps - 1, top_k=top_k)
    missing, unexpected = drafter.load_state_dict(load_file(head / "model.safetensors"), strict=False)
    left = [name for name in missing if not name.startswith("embed_tokens")]
    if left or unexpected:
        raise SystemExit(f"{head}: the reference misses {left} and does not know {unexpected}, expected neither")
    drafter.embed_tokens.weight.data = base.embedding.float()
    drafter = drafter.float().eval()
    drafter.init_tree()
    return drafter


@torch.no_grad()
def reference_rounds(drafter: Any, features: torch.Tensor, ids: list[int], first: int) -> list[int]:
    """Tokens of each round behind token `first` of `ids`, the root of the first round; `features` [1, T, 3H]."""
    drafter.reset_kv()
    found, known, root = [], 0, first
    while root + 1 < len(ids):
        given = torch.tensor([ids[: root + 1]])
        tokens, paths, *_ = drafter.topK_genrate(features[:, known:root], given, None, None)
        wanted, best = ids[root + 1 :], 0
        for path in paths.tolist():
            nodes = [int(tokens[0, node]) for node in path[1:] if node >= 0]
            agree = next((n for n, pair in enumerate(zip(nodes, wanted, strict=False)) if pair[0] != pair[1]), None)
            best = max(best, min(len(nodes), len(wanted)) if agree is None else agree)
        known, emitted = root, min(best + 1, len(wanted))
        found.append(emitted)
        root += emitted
    return found


def compared(llm: LLM, drafter: Any, answers: Sequence[tuple[list[int], tuple[int, ...], torch.Tensor]]) -> dict:
    """Rounds of each answer here and by the reference: `answers` are prompts, what follows, and features of both.

    Raises SystemExit where a drafted answer is another than the plain one.
    """
    sums, equal = (Counter[int](), Counter[int]()), 0
    for prompt, plain, features in answers:
        response = llm.generate(prompt, max_tokens=len(plain))
        assert response.drafting is not None
        if response.token_ids != plain:
            raise SystemExit(f"a drafted answer begins with {response.text[:60]!r}: it is not the plain one")
        own = Counter({length: count for length, count in enumerate(response.drafting.lengths) if count})
        other = Counter(reference_rounds(drafter, features, [*prompt, *plain], len(prompt)))
        equal += own == other
        for total, each in zip(sums, (own, other), strict=True):
            total.update(each)
    means = [sum(length * count for length, count in each.items()) / max(1, each.total()) for each in sums]
    return {
        "answers": len(answers),
        "equal_answers": equal,
        "tokens_a_round": [round(mean, 4) for mean in means],
        "rounds_of_lengths": [dict(sorted(each.items())) for each in sums],
    }


def main() -> None:
    """Compare every answer with every plan, print the sums (here, then the reference's), and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "head", "prompts"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--eagle", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--plans", nargs="+", default=["chain:5", "tree:10/5/32"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    folder = arguments.eagle / "eagle" / "model"
    if not (folder / "cnets.py").exists():
        parser.error(f"{folder} has no cnets.py: --eagle is a checkout of SafeAILab's EAGLE")
    base = Base(arguments.base, "cpu")
    sys.path.insert(0, str(folder))  # by its file: the package imports whole models
    module = importlib.import_module("cnets")
    results: dict[str, Any] = dict(provenance())
    capacity = min(1024, base.config.max_position_embeddings)
    limits = EngineLimits(1, 128, capacity, draft_top_k=10, draft_steps=6, verify_tree_size=60)
    _, *plans = parse_configurations(",".join(arguments.plans), limits, "numpy", {})
    with tempfile.TemporaryDirectory() as folder:
        built = {"weights": "link", "dtype": "float32", "draft": arguments.head}
        build_engine_directory(arguments.base, Path(folder), limits, [], force=True, **built)
        with LLM(folder, backend="numpy", drafting=plans[0].drafting) as llm:
            llm.use_drafting(None)
            answers = []
            for asked in load_prompts(arguments.prompts)[: arguments.count]:
                prompt = chat_ids(llm.tokenizer, llm.default_system_prompt, asked.messages[0]["content"])
                plain = llm.generate(prompt, max_tokens=arguments.tokens).token_ids
                answers.append((prompt, plain, base.read(torch.tensor([[*prompt, *plain]]))[1]))
            for each in plans:
                llm.use_drafting(each.drafting)
                plan = each.drafting.plan(limits)
                drafter = reference_drafter(module, arguments.head, base, plan.top_k, plan.steps, plan.tree_size)
                results[each.name] = compared(llm, drafter, answers)
    report(results, arguments.output)
    sys.exit(any(results[each.name]["equal_answers"] < len(answers) for each in plans))


if __name__ == "__main__":
    main()
