"""Once, before training: reads the open texts, writes what training needs from them, and trains the vocabulary.

Usage: python -m tools.demo_model.prepare --sources DIR --work DIR
DIR of the sources holds chat.jsonl.xz and text.jsonl.xz with one record a line: `source`, and `messages` or `text`.
"""

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tools.demo_model.dialogue import dialogue
from tools.demo_model.vocabulary import load_vocabulary, train_vocabulary
from tools.demo_model.words import held_out_words, open_pool, suitable

STORIES = ("fairytaleqa/story", "pratham_books", "african_storybook", "classic_books")
# Rude words, and subjects (violence, drugs, sexuality, religion, politics) that a household robot need not bring up.
RUDE = re.compile(
    r"fuck|shit|bitch|nigg|whore|slut|porn|\bdamn|bastard|\bhell\b|\bcrap\b|\bsucks?\b|stupid|idiot|boobs|nude|naked|penis"
    r"|vagina|\bsex|\bgay\b|rape|\bkill|murder|suicid|\bdrug|\bdrunk|negro|slave|nazi|hitler|terroris|trump|muslim|\bjews?\b",
    re.I,
)


def records(path: Path) -> Iterator[dict]:
    """The records of one xz-compressed JSON-lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def plain_dialogue(messages: list[dict[str, str]]) -> str:
    """Two people talking, as text: not in the chat format, so that the robot does not take their lives for its own."""
    return "\n".join(f"{'A' if m['role'] == 'user' else 'B'}: {m['content'].strip()}" for m in messages)


def short_answer(messages: list[dict[str, str]]) -> bool:
    """Whether a question and its answer are short, polite and not about the speaker."""
    if len(messages) != 2:
        return False
    question, answer = messages[0]["content"], messages[1]["content"]
    personal = re.search(r"\b(I|I'm|my|me|you|your)\b", question + " " + answer)
    return len(question) < 110 and len(answer) < 130 and "\n" not in question + answer and not personal


def wondering(line: str) -> bool:
    """Whether a line of a dialogue is about the world at large, which the robot knows nothing of."""
    return 5 <= len(line.split()) <= 18 and not re.search(
        r"\b(you|your|u|ya|hi|hello|hey|thanks|thank|bye|yes|no|ok)\b", line, re.I
    )


def spelled_words(vocabulary: dict[str, int], rng: random.Random) -> list[str]:
    """Words made of entries of the vocabulary, alone and joined, so that each is met as part of a copied word."""
    heads = [entry[1:] for entry in sorted(vocabulary) if re.fullmatch("\u0120[a-z]{2,9}", entry)]
    tails = [entry for entry in sorted(vocabulary) if re.fullmatch("[a-z]{1,6}", entry)]
    words = [head for head in heads if len(head) > 2]
    for _ in range(3):
        words += [head + rng.choice(tails) for head in heads]
        words += [rng.choice(heads) + rng.choice(("", rng.choice(tails))) + tail for tail in tails]
    return [word for word in words if 3 <= len(word) <= 12 and suitable(word)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocabulary", type=Path, help="the model directory whose vocabulary to keep")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts, facts, utterances, raw = [], [], [], []
    for record in records(arguments.sources / "text.jsonl.xz"):
        if record["source"] in STORIES:
            text = record["text"]
            raw.append(text[:400_000])
            pieces = [text[i : i + 4000] for i in range(0, min(len(text), 200_000), 4000)]
            texts += [piece for piece in pieces if not RUDE.search(piece)]
    for record in records(arguments.sources / "chat.jsonl.xz"):
        messages, source = record["messages"], record["source"]
        if any(RUDE.search(m["content"]) for m in messages):
            continue
        if source in ("self_dialogue", "taskmaster4"):
            texts.append(plain_dialogue(messages)[:4000])
        if source == "self_dialogue":
            utterances += [line for m in messages[2:8:3] if wondering(line := m["content"].strip())]
        if source in ("rasbt_instruction", "chatterbot") and short_answer(messages):
            facts.append([messages[0]["content"], messages[1]["content"]])
    rng.shuffle(texts)
    pool = open_pool(raw)
    (arguments.work / "lines.json").write_text(json.dumps({"utterances": utterances[:20000], "facts": facts}))
    with lzma.open(arguments.work / "texts.json.xz", "wt", preset=6) as file:
        json.dump(texts, file)
    sample = [
        m["content"]
        for index in range(12_000)
        for m in dialogue(random.Random(f"vocabulary {index}"), "train", 8, tuple(pool))
    ]
    if arguments.vocabulary:
        tokenizer = load_vocabulary(arguments.vocabulary)
    else:
        # Words that are held out must not become entries that training never meets: smaller pieces spell them.
        held_out = re.compile(r"\b(" + "|".join(sorted(held_out_words())) + r")(es|s)?\b", re.I)
        tokenizer = train_vocabulary(sample + [held_out.sub("", text) for text in texts[:6000]])
    tokenizer.save(str(arguments.work / "tokenizer.json"), pretty=False)
    pool += spelled_words(tokenizer.get_vocab(), rng)
    (arguments.work / "pool.txt").write_text("\n".join(pool))
    characters, tokens = sum(map(len, sample[:3000])), sum(len(tokenizer.encode(text).ids) for text in sample[:3000])
    print(
        f"{len(texts)} texts, {len(pool)} open words, {len(utterances)} lines, {len(facts)} facts; "
        f"{characters / tokens:.2f} characters per token in dialogues"
    )


if __name__ == "__main__":
    main()
