"""The tools that a dialogue offers: what an action of the model becomes as a function with a name and parameters.

Names, descriptions and the spelling of parameters vary within closed lists: the adapter learns to read which of them a
request offers, and the same lists serve the held-out items, in new combinations.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from tools.demo_model.grammar import choose
from tools.demo_model.scene import World

RELATIONS = ("in", "on", "next to", "left of", "right of", "in front of", "behind")
DIRECTIONS = ("left", "right", "forward", "back")
#: What a parameter may be called, by what it means.
SPELLINGS = {
    "object": ("object", "object", "item", "thing"),
    "target": ("target", "target", "reference"),
    "relation": ("relation", "where"),
    "position": ("position", "to", "place", "destination"),
    "direction": ("direction", "way"),
    "degrees": ("degrees", "angle"),
    "seconds": ("seconds", "duration"),
    "text": ("text", "message"),
    "on": ("on", "switch_on"),
    "open": ("open", "is_open"),
    "slow": ("slow", "slowly"),
    "speed": ("speed", "speed"),
}
#: What the description of a parameter may be.
MEANINGS = {
    "object": "(The object|Which object|Colour and kind of the object|The name of the object).",
    "target": "(The other object|The object to put it at|Name of the other object).",
    "relation": "(Where to put it|Where to put it, seen from the other object|Place beside the other object).",
    "position": "(Where to put it|The new place|Place on the table).",
    "direction": "(Which way|The direction).",
    "degrees": "(How far to turn|Angle in degrees|Degrees to turn).",
    "seconds": "(How long to wait|Time in seconds|Number of seconds).",
    "text": "(What to say|The words to say).",
    "on": "(Whether the light is to be on|True for on, false for off).",
    "open": "(Whether the gripper is to be open|True to open, false to close).",
    "slow": "(Whether to be slow and careful|True to move slowly).",
    "speed": "(How fast to move|Slow or fast).",
}


@dataclass(frozen=True)
class Kind:
    """A kind of tool: spellings of its name, phrasings of its description, what its parameters mean, in order."""

    names: tuple[str, ...]
    descriptions: str
    parameters: tuple[str, ...] = ()
    can_be_slow: bool = False


def _kind(names: str, descriptions: str, *parameters: str, can_be_slow: bool = False) -> Kind:
    return Kind(tuple(names.split()), descriptions, parameters, can_be_slow)


KINDS = {
    "pick": _kind(
        "pick pick_up pickUp pick_object grab grab_object",
        "(Pick up|Take|Lift|Grasp) (an object|a thing|one object) (from the table|).",
        "object",
        can_be_slow=True,
    ),
    "give": _kind(
        "give give_object hand_over handOver bring",
        "(Give|Hand|Bring) (an object|a thing|one object) to the (user|person).",
        "object",
        can_be_slow=True,
    ),
    "release": _kind(
        "release put_down putDown let_go",
        "(Put down|Let go of|Release) (the object in the gripper|what the robot holds|an object).",
        "object",
    ),
    "place": _kind(
        "place place_object put put_object",
        "(Put|Place) (an object|one object) (in, on or next to|beside, in or on) another (object|one).",
        "object",
        "relation",
        "target",
        can_be_slow=True,
    ),
    "move": _kind(
        "move move_object moveObject move_to",
        "(Move|Bring|Carry) (an object|a thing) to (a place|another place|a position) (on the table|).",
        "object",
        "position",
        can_be_slow=True,
    ),
    "push": _kind(
        "push push_object nudge slide",
        "(Push|Slide|Nudge) (an object|a thing) (a little|in a direction|on the table).",
        "object",
        "direction",
        can_be_slow=True,
    ),
    "look": _kind(
        "look look_at lookAt inspect", "(Look at|Turn the camera to|Inspect) (an object|a thing|one object).", "object"
    ),
    "point": _kind("point point_at pointAt show", "(Point at|Point to|Show) (an object|a thing|one object).", "object"),
    "go": _kind(
        "go go_to goTo drive_to approach",
        "(Go|Drive|Roll) to (an object|a thing|one object).",
        "object",
        can_be_slow=True,
    ),
    "weigh": _kind(
        "weigh weigh_object get_weight",
        "(Weigh|Measure the weight of|Find how heavy is) (an object|a thing).",
        "object",
    ),
    "turn": _kind(
        "turn rotate turn_robot", "(Turn|Rotate) (the robot|) (left or right|to a side).", "direction", "degrees"
    ),
    "wait": _kind("wait pause wait_seconds", "(Wait|Pause|Do nothing) for (a time|some seconds|some time).", "seconds"),
    "say": _kind("say speak say_text", "(Say something|Speak|Say words) (with the loudspeaker|aloud|).", "text"),
    "light": _kind(
        "light set_light setLight lamp", "(Switch|Turn) the (light|lamp) (on or off|on and off) (at the table|).", "on"
    ),
    "gripper": _kind("gripper set_gripper setGripper", "(Open or close|Open and close) the (gripper|hand).", "open"),
    "open_gripper": _kind("open_gripper openGripper open_hand", "Open the (gripper|hand)."),
    "close_gripper": _kind("close_gripper closeGripper close_hand", "Close the (gripper|hand)."),
    "wave": _kind("wave wave_hand waveHand", "Wave (with the hand|with the arm|to people)."),
    "nod": _kind("nod nod_head", "(Nod|Nod with the head|Move the head up and down)."),
    "stop": _kind("stop stop_moving halt", "(Stop|Stop all movement|Stop at once)."),
    "home": _kind("home go_home goHome", "(Go|Move|Return) to the (home|rest) position."),
    "charge": _kind("charge go_charge recharge", "(Go to the charger|Charge the battery|Recharge the battery)."),
    "dance": _kind("dance do_dance", "(Dance|Do a little dance)."),
    "time": _kind("time get_time getTime clock", "(Tell the time|Get the time|Read the clock) (of day|)."),
    "temperature": _kind(
        "temperature get_temperature getTemperature", "(Measure|Get|Read) the temperature (of the room|in the room|)."
    ),
}
#: How often a kind is offered: those with more to copy are harder.
_WEIGHTS = [
    3 if "object" in kind.parameters else 2 if kind.parameters and kind.parameters[0] not in ("on", "open") else 1
    for kind in KINDS.values()
]
#: Kinds that do the same and are not offered side by side.
EXCLUSIVE = ({"gripper", "open_gripper", "close_gripper"},)
_PREFIXES = ("robot_", "arm_", "pip_")


@dataclass(frozen=True)
class Tool:
    """A tool as a request offers it: of a kind, with a name and names of its parameters by what they mean; `slow` is
    what its optional parameter means, or empty."""

    kind: str
    name: str
    spelled: dict[str, str]
    slow: str
    signature: dict[str, Any]

    def call(self, action: dict[str, Any]) -> dict[str, Any]:
        """The call for an action ("action" and values by what they mean), as OpenAI's API has it, without an id."""
        values = {self.spelled[meaning]: action[meaning] for meaning in self.spelled if meaning in action}
        return {
            "type": "function",
            "function": {"name": self.name, "arguments": json.dumps(values, ensure_ascii=False)},
        }


def _schema(meaning: str, world: World, rng: random.Random, split: str, enumerate_objects: bool) -> dict[str, Any]:
    """The JSON schema of a parameter."""
    choices: tuple[str, ...] = {
        "relation": RELATIONS,
        "position": tuple(world.all_places()),
        "direction": DIRECTIONS,
        "speed": ("slow", "fast"),
        "object": tuple(thing.name for thing in world.things) if enumerate_objects else (),
        "target": tuple(thing.name for thing in world.things) if enumerate_objects else (),
    }.get(meaning, ())
    type_name = {"degrees": "integer", "seconds": "integer", "on": "boolean", "open": "boolean", "slow": "boolean"}
    schema: dict[str, Any] = {"type": type_name.get(meaning, "string")}
    if choices and rng.random() < 0.3:
        schema = {}
    if rng.random() < 0.4:
        schema["description"] = choose(rng, MEANINGS[meaning], split).replace(" .", ".")
    if choices:
        schema["enum"] = list(choices)
    return schema


def offered(kind: str, world: World, rng: random.Random, split: str) -> Tool:
    """A tool of the kind, spelled and described in one of the ways."""
    found = KINDS[kind]
    name = rng.choice(found.names)
    if rng.random() < 0.08:
        name = rng.choice(_PREFIXES) + name
    slow = rng.choice(("slow", "speed")) if found.can_be_slow and rng.random() < 0.3 else ""
    meanings = [*found.parameters, *([slow] if slow else [])]
    spelled = {meaning: rng.choice(SPELLINGS[meaning]) for meaning in meanings}
    enumerate_objects = bool(world.things) and rng.random() < 0.2
    description = choose(rng, found.descriptions, split).replace(" .", ".")
    function: dict[str, Any] = {"name": name, "description": description}
    if meanings or rng.random() < 0.6:
        properties = {spelled[each]: _schema(each, world, rng, split, enumerate_objects) for each in meanings}
        if kind == "turn":
            properties[spelled["direction"]]["enum"] = ["left", "right"]
        function["parameters"] = {"type": "object", "properties": properties}
        if meanings:
            function["parameters"]["required"] = [spelled[each] for each in found.parameters]
        if rng.random() < 0.5:
            function["parameters"]["additionalProperties"] = False
    return Tool(kind, name, spelled, slow, {"type": "function", "function": function})


def toolbox(world: World, rng: random.Random, split: str, needed: tuple[str, ...] = ()) -> list[Tool]:
    """One to four tools in random order, those of the `needed` kinds among them; names differ."""
    count = max(len(needed), rng.choices((1, 2, 3, 4), (2, 3, 3, 3))[0])
    kinds = list(needed)
    while len(kinds) < count:
        kind = rng.choices(list(KINDS), _WEIGHTS)[0]
        if kind not in kinds and not any({kind} & group and set(kinds) & group for group in EXCLUSIVE):
            kinds.append(kind)
    rng.shuffle(kinds)
    return [offered(kind, world, rng, split) for kind in kinds]
