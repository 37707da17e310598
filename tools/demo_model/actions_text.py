"""How users give commands: the phrasings of every action (see grammar.py; lines with `~` are held out from training)."""

PICK = """
(pick up|pick|grab|take|lift|lift up|get|fetch|grasp) {o}
pick {o} up
(get|take) hold of {o}
take {o} (in|into) your (hand|gripper)
(hold|seize|collect) {o}
i need {o} picked up
~ lift {o} off the table
~ raise {o}
"""
PLACE_ON = """
on :: (put|place|set|lay) {x} (on|onto|on top of) {y}
on :: (pick up|take|grab) {x} and (put|place|set) it (on|onto|on top of) {y}
on :: {x} (goes|belongs) (on|on top of) {y}
on :: (stack|drop) {x} (on|onto|on top of) {y}
on :: ~~(lift|get) {x} and set it (on|onto|on top of) {y}
in :: (put|place|set|drop|lay) {x} (in|into|inside) {y}
in :: (pick up|take|grab) {x} and (put|place|drop) it (in|into|inside) {y}
in :: {x} (goes|belongs) (in|into|inside) {y}
in :: ~~(lift|get) {x} and set it (in|into|inside) {y}
next to :: (put|place|set|lay) {x} (next to|beside|by|near) {y}
next to :: (pick up|take|grab) {x} and (put|place|set) it (next to|beside) {y}
next to :: {x} (goes|belongs) (next to|beside) {y}
next to :: move {x} (next to|beside|near) {y}
next to :: ~~(lift|get) {x} and set it (next to|beside) {y}
left of :: (put|place|set|lay|move) {x} (left of|to the left of|on the left of) {y}
left of :: (pick up|take|grab) {x} and (put|place) it (left of|to the left of) {y}
left of :: {x} (goes|belongs) (left of|to the left of) {y}
left of :: ~~(lift|get) {x} and set it (left of|to the left of) {y}
right of :: (put|place|set|lay|move) {x} (right of|to the right of|on the right of) {y}
right of :: (pick up|take|grab) {x} and (put|place) it (right of|to the right of) {y}
right of :: {x} (goes|belongs) (right of|to the right of) {y}
right of :: ~~(lift|get) {x} and set it (right of|to the right of) {y}
in front of :: (put|place|set|lay|move) {x} in front of {y}
in front of :: (pick up|take|grab) {x} and (put|place) it in front of {y}
in front of :: {x} (goes|belongs) in front of {y}
in front of :: ~~(lift|get) {x} and set it in front of {y}
behind :: (put|place|set|lay|move) {x} behind {y}
behind :: (pick up|take|grab) {x} and (put|place) it behind {y}
behind :: {x} (goes|belongs) behind {y}
behind :: ~~(lift|get) {x} and set it behind {y}
"""
PLACE_ON = "\n".join(
    f"~ {line.replace('~~', '')}" if "~~" in line else line for line in PLACE_ON.strip().splitlines()
)
MOVE = """
move {o} to the {p}
(bring|shift|carry|take) {o} to the {p}
(put|place|set) {o} (at|to) the {p}
(pick up|take|grab) {o} and (put|place) it at the {p}
{o} (should go|goes|belongs) to the {p}
i want {o} at the {p}
~ transfer {o} to the {p}
~ let {o} go to the {p}
"""
_PUSH = """
{d} :: push {o} {w}
{d} :: (slide|nudge|shove) {o} {w}
{d} :: give {o} a (push|nudge) {w}
{d} :: push {o} a (little|bit) {w}
~ {d} :: slide {o} a little {w}
"""
PUSH = "\n".join(
    _PUSH.strip().replace("{d}", direction).replace("{w}", ways)
    for direction, ways in {
        "left": "(left|to the left)", "right": "(right|to the right)",
        "forward": "(forward|forwards|away from you)", "back": "(back|backwards|towards you)",
    }.items()
)
GIVE = """
(give|hand|pass|bring) me {o}
(give|hand|pass|bring) {o} to me
hand {o} over
hand over {o}
(can|could|may) i (have|get) {o}
i (need|want|would like|'d like) {o}
let me have {o}
i would like to have {o}
~ i'll take {o}
~ deliver {o} to me
"""
LOOK = """
look at {o}
(take|have) a look at {o}
(watch|observe|inspect|examine) {o}
turn your (head|camera|eyes) to {o}
point your camera at {o}
focus on {o}
(look|gaze) towards {o}
~ direct your eyes to {o}
~ keep an eye on {o}
"""
POINT = """
point (at|to|towards) {o}
point your (finger|arm|hand) at {o}
(show|indicate) me {o}
indicate {o}
show me which (one|thing) is {o}
~ point out {o}
"""
GO = """
(go|drive|roll|walk|move|come) (to|over to|towards) {o}
(head|travel) (to|over to|for) {o}
approach {o}
get (close|closer) to {o}
go and stand (at|by) {o}
drive up to {o}
~ make your way to {o}
"""
_TURN = """
{d} :: turn {w} {n} degrees
{d} :: turn {n} degrees {w}
{d} :: (rotate|spin) {n} degrees {w}
{d} :: turn (yourself|around|) {w} by {n} degrees
{d} :: rotate {w} by {n} degrees
~ {d} :: spin {w} by {n} degrees
"""
TURN = "\n".join(
    _TURN.strip().replace("{d}", direction).replace("{w}", ways)
    for direction, ways in {"left": "(left|to the left)", "right": "(right|to the right)"}.items()
)
WAIT = """
wait (for|) {n} seconds
(pause|hold on|stay still|rest) for {n} seconds
wait {n} (more seconds|sec)
do nothing for {n} seconds
stay (there|here|where you are) for {n} seconds
{n} seconds (pause|break)
~ stand still for {n} seconds
"""
SIMPLE = {
    "wave": ("I will wave.", """
wave
wave (your hand|your arm|to me|at me|hello|to us|at them|goodbye)
give me a wave
give (us|them) a wave
(say hello|greet me|greet us) with your (hand|arm)
~ wave to the (people|visitors)
"""),
    "nod": ("I will nod.", """
nod
nod (your head|yes|once|at me)
(give me|give us) a nod
move your head up and down
~ nod to (me|us)
"""),
    "stop": ("I will stop now.", """
stop
(stop|halt|freeze)
stop (now|it|that|moving|everything|at once|right now|immediately|there)
(do not|don't) move
stay where you are
hold it
stand still
emergency stop
cancel
cancel that
abort
~ stop what you are doing
~ enough, stop
"""),
    "home": ("I will go to my home position.", """
(go|drive|move|return|get) (home|to your home position|to the home position|back home)
(return|go back) to your (home|start|starting|rest|resting) position
go to your (home|start) position
back to your home position
(home|homing)
park yourself
park (your arm|the arm)
~ move back to your home position
"""),
    "charge": ("I will go to the charger.", """
(go|drive|move|return|get) (to the charger|to your charger|to the charging station|to the dock|to your dock)
(go and|) (charge|recharge)
(charge|recharge) (yourself|your battery|your batteries|now)
go (charge|recharge)
(plug yourself in|dock yourself|dock)
get some (power|energy)
time to (charge|recharge)
~ refill your battery
~ fill up your battery
"""),
    "open_gripper": ("I will open my gripper.", """
open (your|the) (gripper|hand|fingers|claw)
(your|the) gripper should (open|be open)
~ open up your gripper
"""),
    "close_gripper": ("I will close my gripper.", """
close (your|the) (gripper|hand|fingers|claw)
(shut|squeeze) (your|the) (gripper|hand)
~ close up your gripper
"""),
    "dance": ("I will dance.", """
dance
(do|show me|show us) (a|your) dance
(dance|move) for (me|us)
let us (see you|) dance
(do|make) a little dance
~ can we see a dance
"""),
}
RELEASE = """
put {o} down
put down {o}
(let go of|let loose|release) {o}
(drop|lower) {o}
(set|lay) {o} down
let {o} go
~ set down {o}
~ place {o} back down
"""
IMPOSSIBLE = """
fly
fly (away|to the moon|around the room|over the table|up to the ceiling)
(jump|climb|get|go|drive|step|walk|hop) off the table
(jump|leap) (up|as high as you can|on the chair)
leave the table
(go|walk|drive|run) (upstairs|downstairs|outside|to the garden|to the shop|to the street|to the kitchen door|to another room)
(open|close|lock) the (window|door|fridge|garage|gate)
(cook|make) (me|us|) (dinner|lunch|breakfast|a soup|some coffee|a cup of tea|a sandwich|pancakes)
(turn on|turn off|switch on|switch off) the (light|lights|heating|oven|tv|radio|music)
(play|sing) (me|us|) (a song|some music|the news)
(call|phone|text) (my mother|the police|a taxi|my friend|a doctor)
(send|write) (an email|a letter|a message) (to my boss|to my friend|for me)
(order|buy) (me|us|) (a pizza|some milk|a new phone|flowers|tickets)
(clean|mop|vacuum) the (floor|house|kitchen|bathroom|windows)
(drive|take) me (home|to work|to the station|to school)
(swim|dive|ski|ride a bike|do a somersault|do a backflip)
(walk|feed|wash) the (dog|cat)
(lift|carry|move) the (table|sofa|fridge|car|house)
(drive|fix|wash|park) my car
(water the plants|mow the lawn|paint the wall|iron my shirt|do the laundry|wash the dishes|take out the trash)
~ fly (to the window|out of the window|to the lamp)
~ (roll|fall|come) off the table
~ (repair|open) the roof
~ buy me (a car|some bread)
"""
FIRST_PREFIXES = """
(|||||)
(please|please|) (robot,|)
(could|can|would|will) you (please|)
(could|can|would) you
{name},
{name}, (please|could you|can you|)
(hey|ok|okay|hi|alright|all right|well|hello) (robot|), (please|)
now (please|)
(i want you to|i'd like you to|i would like you to|i need you to)
go ahead and
(next|then|first|and now|so),
you (should|can|may|have to|must)
let's see you
~ kindly
~ be so kind and
~ do me a favour and
"""
SUFFIXES = """
(|||||||||)
(please|for me|now|thanks|right now|if you can|, please|, thanks|, would you)
~ (, thank you|if you please|, will you)
"""
QUESTION_PREFIXES = """
(||||||||||)
{name},
(hey|ok|okay|so|hi|well|hello|robot|now|and|hm|sorry|excuse me|please|tell me|one question|question|quick question),
(hey|hi|hello) (robot|{name}),
~ (just wondering|next question|let me ask),
"""
IT_PLACE = """
in :: (put|place|drop) it (in|into|inside) {y}
on :: (put|place|set) it (on|onto|on top of) {y}
next to :: (put|place|set) it (next to|beside) {y}
left of :: (put|place|set) it (left of|to the left of) {y}
right of :: (put|place|set) it (right of|to the right of) {y}
in front of :: (put|place|set) it in front of {y}
behind :: (put|place|set) it behind {y}
~ in :: now it goes (in|into) {y}
"""
CLARIFY = """
{o}
(i mean|i meant|take|use) {o}
{o} (please|of course|i think)
the one that is {c}
(the|) {c} (one|)
~ (that would be|i was thinking of) {o}
"""
