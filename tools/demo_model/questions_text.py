"""How users ask: the phrasings of every kind of question (see grammar.py; lines with `~` are held out from training)."""

NAME = """
what is your name
what's your name
(tell|say) me your name
(what|how) are you called
what do (they|people) call you
(what|which) name do you have
(may|can|could) i (ask|know) your name
do you have a name
your name
what (should|can|shall) i call you
how (should|can) i call you
what name (do you go by|were you given)
(what is|tell me|say|do you know) (the|your) name (of this robot|you were given|you have|people gave you|)
what name (do|did) (you|they|people) (have|go by|give you|use)
how do people call you
under (what|which) name do (people|they) know you
by (what|which) name (do|should|can) (i|we|they) call you
(please state|state|give me) your name
i (would like|want) to know your name
i forgot your name
~ what is the name you go by
~ tell me what you are called
~ i want to know what i can call you
~ which name should i use
~ please state your name
"""
WHO = """
who are you
what are you
who am i (talking|speaking) to
introduce yourself
(please|) tell me who you are
tell me about yourself
who is this
what kind of (robot|machine) are you
are you a robot
(who or what|what or who) are you
(please|now|) (introduce|present|describe) yourself
(can|could) you (introduce|present|describe) yourself
i (would like|want) to know who you are
(so|and) who are you
(tell me|say) (something|a bit|more|) about (yourself|you)
what (sort|kind|type) of (robot|machine|thing) are you
~ could you tell me who you are
~ tell me what kind of machine you are
~ tell me something about yourself
"""
PLACE = """
where are you
where are you (standing|working|located|right now|now|at the moment|currently)
what is your (location|place|position)
(which|what) place are you (at|in)
where do you (work|stand)
(can|could) you tell me where you are
tell me where you are
in which place are you
do you know where you are
what place is this
where is this
where am i
where are we
your (location|place)
(where|in which place|at which place|in what place|at what place) (have they|did they|have people) (put|placed|set) you
(where|at which place|in which place|in what place) (are you|are we|am i) (now|working|standing|)
(tell me|say|do you know) (the place|your place|your location|where we are|where this is|the place you are at)
(which|what) (place|location|room) (is this|are you at|are you in|are we in)
(what is|what's|give me|name) (the|your) (place|location|current place|current location)
i (would like|want) to know where you are
~ tell me which place this is
~ in which room do you stand
~ do you know the place where you are
~ what is the place you are at
"""
BATTERY = """
how much battery (do you have|is left|have you got|do you have left)
what is your battery (level|charge|status|)
how (full|charged) is your battery
battery (level|status|)
how charged are you
what's your (battery|charge|battery level)
tell me your battery (level|charge|)
how is your battery (doing|)
how much (charge|power|energy) (is left|do you have|have you got)
what percentage is your battery at
what does your battery (show|say)
(can|could) you check your battery
how many percent (battery|) do you have
battery (percentage|percent|state|please)
(give|tell|show) me (the|your) (battery|charge|power) (level|percentage|state|status)
(what is|what's|report) (the|your) (battery|charge|power) (level|percentage|state|status)
(check|report|read) (the|your) battery (level|)
~ show me how much battery you have left
~ what percentage do you have left
"""
NEED_CHARGE = """
do you need (to charge|charging|to be charged|to recharge|a charge)
do you have to (charge|recharge)
is your battery low
is your battery too low
is the battery (too low|below the limit|low)
must you (charge|recharge)
(should|shall) i charge you
are you (low on battery|running out of battery|running low)
do you need (more power|power|energy)
(is it|would it be) time to (charge|recharge|charge you|charge your battery)
does your battery need (charging|to be charged|a charge|power)
(does|would) your battery need (charging|power|a charge) (now|)
(is|should) your battery (be charged|be recharged|charged enough|full enough)
is (there|your battery) (enough|enough power|too little power|full enough) (in your battery|left|)
do you have (enough|too little) (power|battery|energy) (left|)
(should|must|shall) (you|we|i) (charge|recharge) (you|your battery|) (now|)
~ is it time to recharge your battery
~ must your battery be charged now
~ does your battery need charging
"""
LIST = """
what (do|can) you see
what can you see (on the table|in front of you|around you|there|right now)
what do you see (on the table|in front of you|around you|there|right now|here)
what is on the table
what's (on the table|in front of you|there|around you)
(which|what) (objects|things) (are there|are on the table|do you see|can you see|are in front of you|are around you)
list (the|all|all the|) (objects|things|items) (on the table|)
list everything (you see|on the table|)
(name|tell me|describe) (everything|all the things|the objects) (you see|you can see|on the table)
what (stuff|items) (is|are) (on the table|there|in front of you)
tell me what (you see|is on the table|you can see|is there)
describe (the table|what you see|the scene)
show me what you see
what is there
what all is there
what have you got (there|on the table|in front of you)
(give|read|show|make) me (a|the) list of (the|all|all the) (objects|things|items) (you see|on the table|here|)
(i want|i would like|i need) (a|the) list of (the|all) (objects|things|items)
(which|what) (items|objects|things) (can|do) you (see|have|find|recognise|know)
(what is|what's) (lying|standing|placed|there) (on the table|here|in front of you|around you)
what (objects|items|things) (lie|stand|are lying|are standing) (on the table|in front of you|here)
~ give me the list of objects
~ name the items that you can see
~ which items can you see
~ what is lying on the table
"""
COLOUR = """
what (colour|color) is {o}
what (colour|color) does {o} have
(which|what) (colour|color) has {o}
what is the (colour|color) of {o}
what's the (colour|color) of {o}
tell me the (colour|color) of {o}
(can|could) you tell me (what|which) (colour|color) {o} is
do you know (what|which) (colour|color) {o} is
which (colour|color) is {o}
{o} is what (colour|color)
(colour|color) of {o}
the (colour|color) of {o}
{o}, what (colour|color) is it
(of what|in what|of which) (colour|color) is {o} (painted|)
i (would like|want) to know (the colour of|the color of|what colour|what color) {o} (has|is|)
(say|give me|name|i forgot) the (colour|color) of {o}
(how|in which colour|in which color) is {o} (coloured|colored|painted)
{o} has (what|which) (colour|color)
what (colour|color) would you say {o} (is|has)
~ tell me what (colour|color) {o} has
~ could you name the (colour|color) of {o}
"""
WHERE = """
where is {o}
where's {o}
where is {o} (now|right now|at the moment|standing|lying)
where (can i|do i|could i) find {o}
where do you see {o}
where (did|does) {o} (go|stand|lie|sit)
(in|at) (which|what) (place|spot|position) is {o}
what is the (place|position|location) of {o}
(can|could) you tell me where {o} is
tell me where {o} is
do you know where {o} is
i am looking for {o}
i'm looking for {o}
i cannot find {o}
i can't find {o}, where is it
have you seen {o}
(position|location) of {o}
(current|exact|present|new) (position|place|location|spot) of {o}
(position|place|location|spot) of {o} (now|right now|on the table|at the moment|currently)
(report|check|find|read) (position|place|location|spot) of {o}
where would i find {o}
any idea where {o} is
where (exactly|precisely|about|) is {o} (placed|located|right now|)
(please say|say|show me|explain|find out) where {o} (is|lies|stands|can be found)
i (need|want|would like) to know where {o} (is|lies|stands)
(give me|say|what's|tell me) the (place|position|location|spot) of {o}
where (on the table|) (do you have|have you put|did you put|did you see|have you got) {o}
{o} is where
{o}, where is it
~ could you find out where {o} lies
~ tell me where i can find {o}
"""
EXISTS = """
is there {a}
is there {a} (on the table|there|here|in front of you|somewhere|anywhere)
do you (see|have) {a}
do you see {a} (on the table|there|here|somewhere|anywhere)
can you see {a}
can you see {a} (on the table|anywhere|there)
(have you got|do you have) {a} (there|here)
is {a} (there|on the table|here)
any chance there is {a}
do you (spot|notice) {a}
does the table have {a}
(would|could) there be {a} (there|here|on the table|)
(tell me|say|check|i wonder|do you know) (if|whether) (there is|you see|you can see|you have) {a} (there|here|on the table|)
(is|was) there {a} (on your table|in your list|among the objects|around you)
(could|can) you (see|find|spot) {a} (here|anywhere|on your table|)
(tell me|say|look|i wonder) (if|whether) {a} is (on the table|around|among the objects|in your list)
(find out|check|see) (if|whether) (there is|you have|you can see) {a} (around|on your table|)
~ check if {a} is there
~ could you tell me if you have {a}
"""
EXISTS_KIND = """
are there (any|some|) {ks}
are there any {ks} (on the table|there|here|in front of you)
do you (see|have) (any|some|) {ks}
can you see (any|some) {ks}
any {ks} (there|on the table|here|)
have you got any {ks}
(would|could) there be (any|some) {ks} (there|here|)
(tell me|say|check|i wonder) (if|whether) (there are|you see|you can see) (any|some) {ks} (there|here|)
(could|can) you (see|find|spot) (any|some|) {ks} (here|anywhere|)
~ check if you can find any {ks}
"""
EXISTS_COLOUR = """
is (anything|something) {c}
is there (anything|something) {c}
is there anything {c} (on the table|there|here)
do you (see|have) (anything|something) {c}
can you see (anything|something) {c}
(which|what) (things|objects) are {c} (there|on the table|)
is there a {c} (thing|object|one)
what is {c}
anything {c} (there|on the table)
(is|are) (any object|any of the objects|any thing|any of the things|any) {c}
(tell me|say|check|i wonder) (if|whether) (anything|something|any object|any of the objects) is {c}
(which|what) (of the objects|of the things|objects|things|ones) are {c}
(find|name|list|show me) (everything|all things|the objects|all objects|the things) that (is|are) {c}
(name|list) (the|all) {c} (things|objects|ones)
(which|what) {c} (things|objects) (are there|do you see|can you see)
(could|can) you (see|find|spot) (anything|something) {c} (here|anywhere|)
~ check if any of the things are {c}
~ what {c} objects can you find
"""
COUNT_KIND = """
how many {ks} (are there|do you see|are on the table|can you see|do you have|are here|)
how many {ks} are there (on the table|in front of you|in total)
count the {ks}
(please|can you|could you) count the {ks}
what is the number of {ks}
(tell me|say) how many {ks} (there are|you see)
the number of {ks}
do you know how many {ks} there are
(give me|say|what's|find out|count) the (number|count|amount) of {ks} (there|on the table|here|you see|)
(can|could) you (say|tell me|count) how many {ks} (there are|you see|you have|are here)
how many {ks} (do|can) you (have|find|see|count) (there|here|on the table|)
(i want|i would like) to know how many {ks} (there are|you see|you have)
how many of the (objects|things) are {ks}
~ could you give me the number of {ks}
~ how many {ks} have you got
"""
COUNT_COLOUR = """
how many {c} (things|objects|ones|items) (are there|do you see|are on the table|can you see|do you have|)
how many (things|objects|items) are {c}
how many of (the objects|the things|them) are {c}
count the {c} (things|objects|ones|items)
(please|can you|could you) count the {c} (things|objects)
what is the number of {c} (things|objects)
(tell me|say) how many {c} (things|objects) (there are|you see)
(give me|say|what's|find out|count) the (number|count|amount) of {c} (things|objects|items) (there|on the table|here|you see|)
how many {c} (things|objects|items|ones) (do|can) you (have|find|see|count) (there|here|on the table|)
(i want|i would like) to know how many {c} (things|objects) (there are|you see|you have)
how many (objects|things) (have|are of) (the colour|the color) {c}
~ how many {c} (things|objects) have you got
"""
COUNT_ALL = """
how many (things|objects|items) (are there|do you see|are on the table|can you see|do you have|)
how many (things|objects|items) are there (on the table|in front of you|in total|altogether)
count (the|all the|all) (things|objects|items)
(please|can you|could you) count (everything|the objects|all objects)
what is the (total|) number of (things|objects|items)
(tell me|say) how many (things|objects|items) (there are|you see)
how many (things|objects) in total
do you know how many objects there are
~ give me the number of (things|objects|items)
~ how many (things|objects) have you got
"""
AT_POSITION = """
what is {p}
what's {p}
what do you see {p}
what can you see {p}
what (is|stands|lies|sits) {p}
which (object|thing) is {p}
what (object|thing) is {p}
what is there {p}
is there (anything|something) {p}
is (anything|something) {p}
tell me what is {p}
{p}, what is there
what do you have {p}
(can|could) you tell me what is {p}
do you see (anything|something) {p}
(what|which object|which thing|who) (can|do|did) you (see|find|have|notice) {p}
(what|which object|which thing) (is|do you have|have you got|have you|is placed|is located|was put) {p}
(say|please say|show me|name|find out) (what|which object|which thing) (is|lies|stands|is placed|you see) {p}
(could|can) you (say|see|tell me) (what|which thing) (is|lies|stands) {p}
i (want|would like) to know what is {p}
~ could you name the thing {p}
"""
RELATION = """
left of :: what is (left of|to the left of|on the left of) {o}
left of :: what (do|can) you see (left of|to the left of) {o}
left of :: what's (left of|to the left of) {o}
left of :: is (there anything|anything|something) (left of|to the left of) {o}
left of :: (which|what) (objects|things) are (left of|to the left of) {o}
left of :: tell me what is (left of|to the left of) {o}
left of :: ~~what have you got (left of|to the left of) {o}
right of :: what is (right of|to the right of|on the right of) {o}
right of :: what (do|can) you see (right of|to the right of) {o}
right of :: what's (right of|to the right of) {o}
right of :: is (there anything|anything|something) (right of|to the right of) {o}
right of :: (which|what) (objects|things) are (right of|to the right of) {o}
right of :: tell me what is (right of|to the right of) {o}
right of :: ~~what have you got (right of|to the right of) {o}
in front of :: what is in front of {o}
in front of :: what (do|can) you see in front of {o}
in front of :: what's in front of {o}
in front of :: is (there anything|anything|something) in front of {o}
in front of :: (which|what) (objects|things) are in front of {o}
in front of :: tell me what is in front of {o}
in front of :: ~~what have you got in front of {o}
behind :: what is behind {o}
behind :: what (do|can) you see behind {o}
behind :: what's behind {o}
behind :: is (there anything|anything|something) behind {o}
behind :: (which|what) (objects|things) are behind {o}
behind :: tell me what is behind {o}
behind :: ~~what have you got behind {o}
"""
RELATION = "\n".join(f"~ {line.replace('~~', '')}" if "~~" in line else line for line in RELATION.strip().splitlines())
_SIDE = """
{s} :: what is {w}
{s} :: what's {w}
{s} :: what (do|can) you see {w}
{s} :: (which|what) (objects|things) are {w}
{s} :: is (there anything|anything|something) {w}
{s} :: tell me what is {w}
{s} :: (list|name) (the|all) (objects|things) {w}
~ {s} :: what have you got {w}
"""
SIDE = "\n".join(
    _SIDE.strip().replace("{s}", side).replace("{w}", ways)
    for side, ways in {
        "left": "(on the left|on the left side|on the left side of the table)",
        "right": "(on the right|on the right side|on the right side of the table)",
        "front": "(in the front row|at the front|at the front of the table)",
        "back": "(in the back row|at the back|at the back of the table)",
    }.items()
)
COMPARE_COLOUR = """
are the {x} and the {y} (the same colour|the same color|of the same colour|of the same color)
is the {x} the same (colour|color) as the {y}
does the {x} have the same (colour|color) as the {y}
do the {x} and the {y} have the same (colour|color)
do the {x} and the {y} match in (colour|color)
have the {x} and the {y} the same (colour|color)
compare the (colour|color|colours|colors) of the {x} and the {y}
same (colour|color), the {x} and the {y}
is the (colour|color) of the {x} the same as (that of|the colour of|the color of) the {y}
(do|would you say|can you say if|tell me if|i wonder if) the {x} and the {y} (have|share|are) the same (colour|color)
is the {x} (of the same colour as|of the same color as|as colourful as|coloured like|colored like) the {y}
are the {x} and the {y} (equal|alike|the same|matching) in (colour|color)
do the {x} and the {y} (share|agree in|match in) the (colour|color)
~ would you say the {x} and the {y} have the same (colour|color)
"""
_COMPARE = """
{d} :: which (is|one is|object is|thing is) {w}, {x} or {y}
{d} :: what is {w}, {x} or {y}
{d} :: is {x} or {y} {w}
{d} :: which of {x} and {y} is {w}
{d} :: tell me which is {w}, {x} or {y}
{d} :: {x} or {y}, which (is|one is) {w}
{d} :: between {x} and {y}, which (is|one is) {w}
~ {d} :: of {x} and {y}, which is {w}
"""
COMPARE_POSITION = "\n".join(
    _COMPARE.strip().replace("{d}", way).replace("{w}", ways)
    for way, ways in {
        "further left": "(further left|more to the left|further to the left)",
        "further right": "(further right|more to the right|further to the right)",
        "closer to the front": "(closer to the front|nearer to the front|further forward|further in front)",
        "closer to the back": "(closer to the back|nearer to the back|further back)",
    }.items()
)
HOLDING = """
what are you holding
are you holding (anything|something)
what (do you have|is) in your (hand|gripper|arm)
what have you got in your (hand|gripper)
is there (anything|something) in your (hand|gripper)
is your (hand|gripper) (empty|free)
do you hold (anything|something)
what is in the gripper
what did you pick up
what are you (carrying|gripping|grasping|holding now|holding right now)
(which|what) (object|thing) (are you|do you) (holding|carrying|hold|carry|have in your hand)
(tell me|show me|say) what you (are holding|hold|are carrying|have in your hand|have in your gripper)
(do you|are you) (carry|carrying|hold|holding|have) (anything|something) (now|right now|at the moment|in your hand|in your gripper|)
(what is|what's|what do you have) in (your|the) (hand|gripper|claw|arm) (now|right now|)
what have you (picked up|taken|grabbed|lifted)
what (did you|have you) (pick up|take|grab|lift|taken)
~ which thing do you carry right now
~ tell me what is in your gripper
"""
USER_NAME_TELL = """
my name is {n}
i am {n}
i'm {n}
(hello|hi|hey), (my name is|i am|i'm) {n}
(hello|hi), {n} here
call me {n}
you can call me {n}
(please|) remember (that|) my name is {n}
(people|my friends) call me {n}
(they|everybody|everyone|people|my parents) (call|calls) me {n}
(nice|good|pleased) to meet you, (my name is|i am|i'm) {n}
(you should know|by the way), (my name is|i am|i'm) {n}
(good morning|good evening|greetings), (my name is|i am|i'm) {n}
this is {n} (speaking|here|)
the name is {n}
~ hello, people call me {n}
~ please remember that i am {n}
"""
USER_NAME_ASK = """
what is my name
what's my name
do you (know|remember) my name
who am i
who am i (now|then|again|to you|by name|called|really)
(so|and|now|right), who am i (now|again|then)
what am i called
(can|could) you tell me my name
have you (remembered|forgotten) my name
tell me my name
(do|can) you (still|) (know|remember|recall|say|tell me) (my name|what my name is|what i am called|who i am)
what did i (say|tell you) (my name was|my name is|i was called)
(did i|have i) (tell|told|say|said) you my name
(say|tell me|repeat) (my name|who i am|what i am called)
what (is|was) my name (again|please|)
(which|what) name did i (give you|tell you|say)
(do you know|tell me) (what|how) i am called
~ can you still tell me who i am
~ which name did i say
"""
