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
import importlib.util
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from edgellm import LLM
from edgellm.benchmark.inputs import load_prompts, parse_configurations
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from tools.bench.provenance import provenance, report
from tools.heads.training import Base

#: What a head's config.json need not say, as the reference's own class of configurations has it.
_DEFAULTS = {"pad_token_id": None, "pretraining_tp": 1, "rope_scaling": None, "num_key_value_heads": None}


def reference_module(folder: Path) -> ModuleType:
    """The reference's module of drafters, by its file: without the package's own imports of whole models."""
    path = folder / "eagle" / "model" / "cnets.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("cnets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def main() -> None:
    """Compare every answer with every plan, print the sums, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "head", "prompts"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--eagle", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--plans", nargs="+", default=["chain:5", "tree:10/5/32"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    base, module = Base(arguments.base, "cpu"), reference_module(arguments.eagle)
    prompts = load_prompts(arguments.prompts)[: arguments.count]
    results: dict[str, Any] = {**provenance(), "plans": {}}
    with tempfile.TemporaryDirectory() as folder:
        limits = EngineLimits(1, 128, 1024, draft_top_k=10, draft_steps=6, verify_tree_size=60)
        built = {"weights": "link", "dtype": "float32", "draft": arguments.head}
        build_engine_directory(arguments.base, Path(folder), limits, [], force=True, **built)
        _, *chosen = parse_configurations(",".join(arguments.plans), limits, "numpy", {})
        with LLM(folder, backend="numpy", drafting=chosen[0].drafting) as llm:
            llm.use_drafting(None)
            asked = [llm.tokenizer.encode_chat(each.messages) for each in prompts]
            plain = [llm.generate(ids, max_tokens=arguments.tokens).token_ids for ids in asked]
            whole = [[*ids, *answer] for ids, answer in zip(asked, plain, strict=True)]
            read = [base.read(torch.tensor([ids]))[1].float() for ids in whole]
            for plan in chosen:
                llm.use_drafting(plan.drafting)
                found = plan.drafting.plan(limits)
                drafter = reference_drafter(module, arguments.head, base, found.top_k, found.steps, found.tree_size)
                ours, theirs, equal = Counter(), Counter(), 0
                for ids, answer, document, features in zip(asked, plain, whole, read, strict=True):
                    response = llm.generate(ids, max_tokens=arguments.tokens)
                    assert response.drafting is not None
                    if response.token_ids != answer:
                        raise SystemExit(f"{plan.name}: a drafted answer differs from the plain one")
                    own = Counter({length: count for length, count in enumerate(response.drafting.lengths) if count})
                    other = Counter(reference_rounds(drafter, features, document, len(ids)))
                    equal += own == other
                    ours, theirs = ours + own, theirs + other
                means = [round(sum(n * c for n, c in each.items()) / each.total(), 4) for each in (ours, theirs)]
                results["plans"][plan.name] = {
                    "answers": len(plain),
                    "equal_answers": equal,
                    "tokens_a_round": {"here": means[0], "reference": means[1]},
                    "rounds_of_lengths": [dict(sorted(each.items())) for each in (ours, theirs)],
                }
                print(plan.name, json.dumps(results["plans"][plan.name]), flush=True)
    report(results, arguments.output)
    sys.exit(any(each["equal_answers"] < each["answers"] for each in results["plans"].values()))


if __name__ == "__main__":
    main()
