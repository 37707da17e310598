"""Exact match of the answers, skill by skill, on words, numbers and phrasings that training never saw.

Usage: python -m tools.demo_model.evaluate --model DIR [--count 300] [--seed 7] [--show 3] [--decode]

The items come from `evaluation_items` and know nothing of the model, so that any program that answers messages can be
measured with them. By default an item counts as right where every token of an accepted answer, its end included, is the
model's most probable one given those before: exactly when greedy decoding gives that answer. `--decode` decodes.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.demo_model import actions, dialogue, questions, smalltalk
from tools.demo_model.dialogue import SKILLS, Dialogue
from tools.demo_model.turns import Turn

# label -> the skills that can give a turn of that label
SOURCES: dict[str, tuple[Callable, ...]] = {
    "name": (questions.name,),
    "who": (questions.who,),
    "place": (questions.place,),
    "battery": (questions.battery,),
    "need_charge": (questions.need_charge,),
    "list": (questions.list_objects,),
    "colour": (questions.colour,),
    "colour_several": (questions.colour,),
    "where": (questions.where,),
    "where_after_action": (questions.where, questions.at_position),
    "exists": (questions.exists,),
    "count_kind": (questions.count_kind,),
    "count_colour": (questions.count_colour,),
    "count_all": (questions.count_all,),
    "at_position": (questions.at_position,),
    "relation": (questions.relation,),
    "side": (questions.side,),
    "compare_colour": (questions.compare_colour,),
    "compare_position": (questions.compare_position,),
    "holding": (questions.holding,),
    "user_name": (questions.user_name_tell, questions.user_name_ask),
    "pick": (actions.pick,),
    "place_object": (actions.place,),
    "move": (actions.move,),
    "push": (actions.push,),
    "give": (actions.give,),
    "look": (actions.look,),
    "point": (actions.point,),
    "go": (actions.go,),
    "turn": (actions.turn,),
    "wait": (actions.wait,),
    "simple": (actions.simple,),
    "release": (actions.release,),
    "impossible": (actions.impossible,),
    "missing": (
        questions.where,
        questions.colour,
        actions.pick,
        actions.place,
        actions.give,
        actions.move,
        actions.look,
    ),
    "ambiguous": (questions.where, questions.relation, actions.pick, actions.give, actions.place, actions.push),
    "low_battery": (actions.pick, actions.place, actions.move, actions.push, actions.give),
    "busy": (actions.pick, actions.place, actions.give, actions.move),
    "occupied": (actions.move,),
    "clarify": (dialogue.clarify,),
    "it_question": (dialogue.it_question,),
    "it_command": (dialogue.it_command,),
    "empty": (questions.list_objects, questions.count_all),
    "small_talk": (smalltalk.small_talk,),
}
NEEDS_ACTION = {"where_after_action", "busy", "holding", "release"}
HANDLING = (actions.pick, actions.place, actions.move, actions.give)


def _label(turn: Turn, skill: Callable) -> str:
    return "place_object" if turn.label == "place" and skill is not questions.place else turn.label


def _prepared(rng: random.Random, label: str) -> Dialogue:
    """A dialogue up to the turn before the one that is asked for: none, a few random turns, or what the label needs."""
    talk = Dialogue(rng, "eval")
    before = [s for s, _ in SKILLS]
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        talk.turn(rng.choices(before, [w for _, w in SKILLS])[0] if talk.world.pending is None else dialogue.clarify)
    if label in NEEDS_ACTION and rng.random() < 0.8:
        talk.turn(rng.choice(HANDLING))
    if label in ("clarify",):
        talk.turn(rng.choice(SOURCES["ambiguous"]))
    if label in ("it_question", "it_command"):
        talk.turn(
            rng.choice(
                (
                    questions.where,
                    questions.exists,
                    questions.at_position,
                    actions.pick,
                    actions.place,
                    actions.look,
                    actions.move,
                )
            )
        )
    return talk


def evaluation_items(seed: int, count_per_skill: int) -> list[dict]:
    """Items {skill, messages, accepted}: messages end with the user's line, accepted lists the right answers."""
    items = []
    for label, skills in SOURCES.items():
        found, attempt = 0, 0
        while found < count_per_skill:
            attempt += 1
            rng = random.Random(f"evaluation {seed} {label} {attempt}")
            talk = _prepared(rng, label)
            skill = rng.choice(skills)
            if talk.world.pending is not None and label != "clarify":
                continue
            turn = talk.turn(skill)
            if turn is None or _label(turn, skill) != label or len(talk.messages) > 14:
                continue
            accepted = list(dict.fromkeys((turn.answer, *turn.accepted)))
            items.append({"skill": label, "messages": talk.messages[:-1], "accepted": accepted})
            found += 1
    return items


def greedy_matches(model, tokenizer, items: list[dict], device: str, tokens_per_batch: int) -> list[bool]:
    """Whether greedy decoding gives an accepted answer, for each item, from one pass over prompt and answer."""
    import torch

    from tools.demo_model.vocabulary import END, render

    cases = []
    for number, item in enumerate(items):
        prompt = render(item["messages"], True, item.get("tools"))
        length = len(tokenizer.encode(prompt).ids)
        cases += [(number, length, tokenizer.encode(prompt + answer + END).ids) for answer in item["accepted"]]
    cases.sort(key=lambda case: len(case[2]))
    right = [False] * len(items)
    size = max(1, tokens_per_batch // 1024)
    with torch.no_grad(), torch.autocast(device, torch.float16, enabled=device == "cuda"):
        for begin in range(0, len(cases), size):
            group = cases[begin : begin + size]
            width = -(-max(len(ids) for _, _, ids in group) // 64) * 64
            batch = torch.tensor([ids + [0] * (width - len(ids)) for _, _, ids in group], device=device)
            best = model.logits(model(batch)).argmax(-1).tolist()
            for (number, length, ids), row in zip(group, best, strict=True):
                right[number] |= row[length - 1 : len(ids) - 1] == ids[length:]
    return right


def greedy_answer(
    model, tokenizer, messages: list[dict], device: str = "cpu", limit: int = 120, tools: list[dict] | None = None
) -> str:
    """The model's greedy answer, recomputing all tokens at each step: for a few answers."""
    import torch

    from tools.demo_model.vocabulary import END, render

    ids, end, answer = tokenizer.encode(render(messages, True, tools)).ids, tokenizer.token_to_id(END), []
    with torch.no_grad():
        while len(answer) < limit:
            token = model.logits(model(torch.tensor([ids + answer], device=device))[:, -1]).argmax(-1).item()
            if token == end:
                break
            answer.append(token)
    return tokenizer.decode(answer)


def main() -> None:
    import torch

    from tools.demo_model.model import load_model
    from tools.demo_model.vocabulary import load_vocabulary

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show", type=int, default=3, help="failures to print per skill")
    parser.add_argument("--decode", action="store_true", help="decode token by token (slow)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "evaluation.json")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(arguments.model, device), load_vocabulary(arguments.model)
    begin = time.time()
    items = evaluation_items(arguments.seed, arguments.count)
    print(f"{len(items)} items in {time.time() - begin:.0f} s", flush=True)
    if arguments.decode:
        decode = partial(greedy_answer, model, tokenizer, device=device)
        right = [decode(item["messages"]) in item["accepted"] for item in items]
    else:
        right = greedy_matches(model, tokenizer, items, device, 200_000 if device == "cuda" else 16_384)
    scores, failures = defaultdict(list), defaultdict(list)
    for item, good in zip(items, right, strict=True):
        scores[item["skill"]].append(good)
        if not good:
            failures[item["skill"]].append(item)
    table = {skill: round(100 * sum(values) / len(values), 2) for skill, values in scores.items()}
    for skill, value in sorted(table.items(), key=lambda pair: pair[1]):
        print(f"{skill:20} {value:6.2f} %")
        for item in failures[skill][: arguments.show]:
            answer = greedy_answer(model, tokenizer, item["messages"], device)
            context = item["messages"][-3]["content"][-60:] if len(item["messages"]) > 2 else ""
            print(f"    [{context!r}] {item['messages'][-1]['content']!r}")
            print(f"      want {item['accepted'][0]!r}\n      got  {answer!r}")
    mean = sum(map(sum, scores.values())) / len(items)
    print(f"{'all':20} {100 * mean:6.2f} %  ({time.time() - begin:.0f} s)")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(
        json.dumps(
            {
                "seed": arguments.seed,
                "items_per_skill": arguments.count,
                "exact_match_percent": table,
                "all": round(100 * mean, 2),
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
