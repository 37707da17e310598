"""Dialogues about a table with tools: which tool is called, with what, and when the answer is in words.

A scene is told as in the model's own dialogues, whose skills and answers these are; where its answer acts, a tool of
that kind is called instead, or the robot says that it cannot. Some dialogues tell of no scene: then the user names all.
"""

import json
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from tools.demo_model import actions
from tools.demo_model.calls import requests
from tools.demo_model.calls import requests_text as text
from tools.demo_model.calls.requests import IT, QUICK, REQUESTS, SLOW, Lack, MakeRequest, Request
from tools.demo_model.calls.toolbox import KINDS, Tool, toolbox
from tools.demo_model.dialogue import Dialogue
from tools.demo_model.scene import World, random_world
from tools.demo_model.turns import Context, Turn
from tools.demo_model.vocabulary import render, written_answer
from tools.demo_model.words import Words

#: System prompts that tell of no scene.
UNTOLD = ("", "", "You are a helpful assistant.", "You are a small tabletop robot.", "You are a robot with tools.")
#: What the robot says when it has done something; {...} are values of the action.
DONE = {
    "pick": "I have picked up the {object}.",
    "give": "I have handed you the {object}.",
    "release": "I have put down the {object}.",
    "place": "I have put the {object} {relation} the {target}.",
    "move": "I have moved the {object} to the {position}.",
    "push": "I have pushed the {object}.",
    "look": "I am looking at the {object}.",
    "point": "I am pointing at the {object}.",
    "go": "I am at the {object}.",
    "turn": "I have turned {direction} {degrees} degrees.",
    "wait": "I have waited {seconds} seconds.",
    "say": "I have said it.",
    "light": "The light is switched.",
    "open_gripper": "My gripper is open.",
    "close_gripper": "My gripper is closed.",
    "wave": "I have waved.",
    "nod": "I have nodded.",
    "stop": "I have stopped.",
    "home": "I am at my home position.",
    "charge": "I am at the charger.",
    "dance": "I have danced.",
}
DONE_TWICE = "I have done both."
FAILED = "That did not work: {}."
#: Tools that are asked for what they find out.
INFORMING = ("time", "temperature", "weigh")
_WORDS_GROUPS = {
    **dict.fromkeys(("missing", "low_battery", "busy", "occupied", "release"), "refused"),
    "ambiguous": "which",
    "impossible": "cannot",
    "lacking": "lacking",
}
_CALL_GROUPS = {
    **dict.fromkeys(("pick", "give", "release", "look", "point", "go", "weigh"), "object"),
    **dict.fromkeys(("place", "move", "push"), "arguments"),
    **dict.fromkeys(("turn", "wait"), "number"),
    "light": "boolean",
    "say": "text",
}


@dataclass
class Answer:
    """What the robot answers to a user's line: words, or actions for its tools; the group that it counts for, and other
    words that are as good."""

    words: str
    actions: list[dict[str, Any]]
    group: str
    accepted: tuple[str, ...] = ()


class ToolTalk:
    """One dialogue: `messages` as OpenAI's API has them, and the `tools` that are offered."""

    def __init__(self, rng: random.Random, split: str, needed: tuple[str, ...] = ()) -> None:
        self.rng, self.split = rng, split
        self.is_told = rng.random() < 0.85
        self.world = world = random_world(rng, Words(rng, split))
        while not self.is_told and len(world.things) < 2:
            self.world = world = random_world(rng, Words(rng, split))
        if self.is_told:
            self._talk = Dialogue(rng, split, world=world)
        else:
            world.limit = world.name = None
            self._talk = Dialogue(rng, split, world=world, system=rng.choice(UNTOLD))
        self.tools = toolbox(world, rng, split, needed)
        self.messages: list[dict[str, Any]] = list(self._talk.messages)
        self.pending_kind: str | None = None  # of the command that "Which ... do you mean?" was asked about
        self.lack: Lack | None = None  # what was asked for last
        self._before = _state(world)

    @property
    def context(self) -> Context:
        """What requests draw from."""
        return self._talk.context

    @property
    def signatures(self) -> list[dict[str, Any]]:
        """The tools as a request offers them."""
        return [tool.signature for tool in self.tools]

    def tool_for(self, kind: str) -> Tool | None:
        """The tool that does an action of a kind; None where none is offered."""
        kinds = {kind, "gripper"} if kind in ("open_gripper", "close_gripper") else {kind}
        return next((tool for tool in self.tools if tool.kind in kinds), None)

    def may_handle(self, kind: str) -> bool:
        """Whether nothing that is told forbids an action of a kind, whatever its object."""
        return not (self.is_told and kind in requests.HANDLING and (self.world.low or self.world.holding))

    def step(self, make: MakeRequest | None = None) -> Answer | None:
        """Append what the user says, by `make` or a random request, and return the answer, which is not appended; None
        (and nothing changed) where the request does not fit."""
        self._before, count = _state(self.world), len(self._talk.messages)
        found: list[Request] = []

        def skill(_: Context) -> Turn | None:
            request = (make or self._next())(self)
            if request is None:
                return None
            found.append(request)
            return request.turn

        answer = None
        if self._talk.turn(skill) is not None:
            user = self._talk.messages[-2]["content"]
            answer = self._answer(found[0], user)
        if answer is None:
            _restore(self.world, self._before)
            del self._talk.messages[count:]
            return None
        self.messages.append({"role": "user", "content": user})
        self.lack = found[0].lack if answer.group == "lacking" else None
        self.pending_kind = found[0].kind if self.world.pending is not None else None
        return answer

    def say(self, answer: Answer) -> None:
        """Append an answer as the assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.words}
        calls = [
            {"id": f"call{len(self.messages):03d}{place:02d}"} | call for place, call in enumerate(self._calls(answer))
        ]
        self.messages.append(message | {"tool_calls": calls} if calls else message)

    def written(self, answer: Answer) -> list[str]:
        """All right texts of an answer."""
        calls = self._calls(answer)
        texts = [answer.words, *answer.accepted]
        return list(dict.fromkeys(written_answer({"content": each, "tool_calls": calls}) for each in texts))

    def respond(self, answer: Answer, fails: bool) -> str:
        """Append what the tools of the answer gave, which was said; what the robot says then."""
        words = []
        for place, (call, action) in enumerate(zip(self.messages[-1]["tool_calls"], answer.actions, strict=True)):
            result, said = self._failure() if fails and place == 0 else self._result(action)
            words.append(said)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if fails:
            _restore(self.world, self._before)
            return words[0]
        return " ".join(words) if len(words) == 1 or answer.actions[0]["action"] in INFORMING else DONE_TWICE

    def _next(self) -> MakeRequest:
        """A random request; what was asked back is nearly always answered."""
        if self.rng.random() < 0.9:
            if self.world.pending is not None:
                return requests.chosen
            if self.lack is not None:
                return partial(requests.completed, lack=self.lack)
        return self.rng.choices(list(REQUESTS), list(REQUESTS.values()))[0]

    def _calls(self, answer: Answer) -> list[dict[str, Any]]:
        found = []
        for action in answer.actions:
            tool = self.tool_for(action["action"])
            assert tool is not None
            found.append(tool.call(action))
        return found

    def _answer(self, request: Request, user: str) -> Answer | None:
        """The answer to a request that was typed as `user`; None for one that is not clear."""
        turn, kind = request.turn, request.kind
        found = [json.loads(line) for line in turn.answer.splitlines() if line.startswith("{")]
        if kind == IT:
            if not found:
                return None  # refused: whether it could be done at all does not show
            kind = found[0]["action"]
        tool = None if kind is None else self.tool_for(kind)
        if kind is not None and tool is None:
            _restore(self.world, self._before)
            self.world.pending = None
            return Answer(actions.CANNOT, [], "cannot")
        asked = f"{turn.user} {user}"  # a word may be mistyped, or come in as a filler
        is_slow, is_quick = bool(SLOW.search(asked)), bool(QUICK.search(asked))
        if not found:
            group = "refused" if turn.label == "clarify" and kind else _WORDS_GROUPS.get(turn.label, "words")
            if tool is not None and tool.slow and group in ("which", "lacking") and (is_slow or is_quick):
                return None  # whether the call that follows is to be slow would be asked of an earlier line
            return Answer(turn.answer, [], group, turn.accepted)
        assert tool is not None
        if is_slow and is_quick:
            return None
        for action in found:
            if action.get("text", "") not in user:
                return None  # shortened while typing
            if is_slow or is_quick:
                action.update({"slow": True, "speed": "slow"} if is_slow else {"speed": "fast"})
            action["open"] = action["action"] == "open_gripper"
        return Answer("", found, self._group(turn, found[0]["action"], len(found), tool))

    def _group(self, turn: Turn, kind: str, count: int, tool: Tool) -> str:
        if count > 1:
            return "twice"
        if turn.label in ("clarify", "completed"):
            return "clarified"
        if not self.is_told:
            return "untold"
        if tool.slow:
            return "optional"
        return "boolean" if tool.kind == "gripper" else _CALL_GROUPS.get(kind, "empty")

    def _failure(self) -> tuple[str, str]:
        reason = self.context.phrase(text.REASONS)
        objects = ({"error": reason}, {"status": "failed", "reason": reason}, {"success": False, "error": reason})
        forms = (f"error: {reason}", f"failed: {reason}", *map(json.dumps, objects))
        return self.rng.choice(forms), FAILED.format(reason)

    def _result(self, action: dict[str, Any]) -> tuple[str, str]:
        """What a tool gives, and what the robot says of it."""
        number, choice = self.context.words.number, self.rng.choice
        kind = action["action"]
        if kind == "time":
            time = f"{number(10, 23)}:{number(10, 59)}"
            return choice((time, json.dumps({"time": time}), json.dumps({"clock": time}))), f"It is {time}."
        if kind == "temperature":
            warm = number(11, 39)
            objects = ({"celsius": warm}, {"temperature": warm})
            return choice((f"{warm}", f"{warm} degrees", *map(json.dumps, objects))), f"It is {warm} degrees."
        if kind == "weigh":
            heavy = number(11, 999)
            forms = (f"{heavy} g", f"{heavy} grams", json.dumps({"grams": heavy}), json.dumps({"weight": heavy}))
            return choice(forms), f"The {action['object']} weighs {heavy} grams."
        objects = ({"status": "ok"}, {"status": "done"}, {"success": True}, {"result": "done"})
        return choice(("done", "ok", "success", *map(json.dumps, objects))), DONE[kind].format(**action)


def _state(world: World) -> tuple:
    things = [(thing.place, thing.cell, thing.moved, thing.given) for thing in world.things]
    return things, world.holding, world.focus, world.pending, list(world.candidates), world.user_name


def _restore(world: World, state: tuple) -> None:
    things, world.holding, world.focus, world.pending, world.candidates, world.user_name = state
    for thing, values in zip(world.things, things, strict=True):
        thing.place, thing.cell, thing.moved, thing.given = values


def tool_dialogue(rng: random.Random, split: str, turns: int) -> ToolTalk:
    """A dialogue of about that many requests."""
    talk = ToolTalk(rng, split)
    for _ in range(20 + 3 * turns):
        answer = talk.step()
        if answer is None:
            continue
        talk.say(answer)
        turns -= 1
        if answer.actions and rng.random() < 0.85 and not _respond(talk, answer):
            break
        if turns <= 0:
            break
    return talk


def _respond(talk: ToolTalk, answer: Answer) -> bool:
    """The tools' results, and often what the robot says of them; whether the dialogue goes on."""
    fails = talk.rng.random() < 0.12
    said = talk.respond(answer, fails)
    if fails or answer.actions[0]["action"] in INFORMING or talk.rng.random() < 0.6:
        talk.messages.append({"role": "assistant", "content": said})
    return not fails


# Held-out items.

_STRINGS = tuple(kind for kind, group in _CALL_GROUPS.items() if group == "object")
_PLAIN = tuple(kind for kind in KINDS if kind not in _CALL_GROUPS and kind != "gripper")
#: By group of items: the kinds of which one tool at least is offered, and how the request is made.
GROUPS: dict[str, tuple[tuple[str, ...], MakeRequest]] = {
    "object": (_STRINGS, requests.command),
    "arguments": (("place", "move", "push"), requests.command),
    "number": (("turn", "wait"), requests.command),
    "boolean": (("light", "gripper"), requests.command),
    "text": (("say",), requests.command),
    "empty": (_PLAIN, requests.command),
    "optional": (("pick", "give", "place", "move", "push", "go"), requests.command),
    "untold": ((*_STRINGS, "place", "move", "push", "say"), requests.command),
    "twice": (requests.TWICE, requests.twice),
    "lacking": (tuple(dict.fromkeys(kind for kind, _ in text.LACKING)), requests.lacking),
    "which": (("pick", "give", "push", "look"), requests.command),
    "clarified": (("pick", "give", "push", "look", "move", "turn", "wait", "say"), requests.command),
    "refused": (_STRINGS, requests.absent),
    "cannot": ((), requests.not_offered),
    "words": ((), requests.question),
    "results": (tuple(KINDS), requests.command),
}


def _item(rng: random.Random, group: str) -> dict[str, Any] | None:
    """A held-out item of a group; None where the random dialogue gives none."""
    kinds, make = GROUPS[group]
    talk = ToolTalk(rng, "eval", (rng.choice(kinds),) if kinds else ())
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        answer = talk.step()
        if answer is not None:
            talk.say(answer)
            if answer.actions and (rng.random() < 0.15 or not _respond(talk, answer)):
                break
    if group == "clarified":
        asking = talk.step(requests.lacking if rng.random() < 0.5 else requests.command)
        if asking is None or asking.group not in ("lacking", "which"):
            return None
        talk.say(asking)
        make = partial(requests.completed, lack=talk.lack) if talk.lack else requests.chosen
    if group == "refused" and rng.random() < 0.5:
        make = requests.command
    if group == "cannot" and rng.random() < 0.2:
        make = requests.impossible
    if group == "words" and rng.random() < 0.2:
        make = requests.small_talk
    answer = talk.step(make)
    if answer is None:
        return None
    if group == "results":
        if not answer.actions:
            return None
        talk.say(answer)
        accepted = [talk.respond(answer, rng.random() < 0.25)]
    elif answer.group == group:
        accepted = talk.written(answer)
    else:
        return None
    return {"skill": group, "messages": talk.messages, "tools": talk.signatures, "accepted": accepted}


def tool_items(seed: int, count_per_group: int) -> list[dict[str, Any]]:
    """Held-out items {skill, messages, tools, accepted}: words, phrasings and numbers as in `evaluation_items`."""
    items: list[dict[str, Any]] = []
    for group in GROUPS:
        found, attempt = 0, 0
        while found < count_per_group:
            attempt += 1
            item = _item(random.Random(f"tools {seed} {group} {attempt}"), group)
            if item is not None:
                items.append(item)
                found += 1
    return items


def beginning(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """How a dialogue begins, with the scene, the tools and the first line of the user: no two items share it with a
    training dialogue."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "user")
    return render(messages[: first + 1], tools=tools)
