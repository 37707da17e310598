"""What users say to a robot with tools, beyond the commands of `actions_text.py` (see grammar.py; `~` is held out)."""

#: Commands that leave out what a tool needs, by action and the parameter that is missing.
LACKING = {
    ("turn", "degrees"): """
(turn|rotate|spin) (yourself|around|) {d}
(turn|rotate|spin|swing|pivot) (a bit|a little|) {d}
(make|do) a turn {d}
(you should|please) turn {d}
{d} turn
(turn|rotate) (robot|) {d} (a bit|a little|)
~ do a little turn {d}
""",
    ("turn", "direction"): """
(turn|rotate|spin) {n} degrees
(turn|rotate|spin|swivel|pivot) (by|for) {n} degrees
(turn|rotate) yourself (by|) {n} degrees
(make|do) a turn of {n} degrees
{n} degrees (turn|rotation)
~ turn around by {n} degrees
""",
    ("wait", "seconds"): """
(wait|pause|rest)
(wait|pause|rest) (a moment|a bit|a little|some time|for a while|for some time|a few seconds)
(wait|pause) (here|there|where you are)
(do nothing|stay still|stand still) for (a while|a bit|some time|a moment)
(take|make) a (little|short|) (pause|break|rest)
~ rest here for a while
""",
    ("move", "position"): """
move {o}
(move|shift|carry|transfer|relocate) {o} (somewhere else|to another place|elsewhere|away)
(put|bring|take) {o} (somewhere else|to another place|elsewhere)
{o} (should|must|has to) (go|be) (somewhere else|elsewhere)
(find|use) another place for {o}
~ carry {o} somewhere else
~ {o} should be in another place
""",
    ("push", "direction"): """
(push|slide|nudge|shove) {o}
(push|slide|nudge|shove) {o} (a bit|a little|gently|slightly)
give {o} a (push|nudge|shove|little push|little nudge)
(make|let) {o} slide (a bit|a little|)
~ give {o} a gentle push
""",
    ("pick", "object"): """
(pick|lift) (something|an object|a thing|one object) up
(pick up|take|grab|lift|get|grasp) (something|an object|a thing|one of the objects|one object|one of the things)
(take|pick up|grab) (something|anything) (from|off) the table
(hold|collect) (something|an object) (in your hand|in your gripper|)
~ get something off the table
""",
    ("give", "object"): """
(give|hand|pass|bring) me (something|an object|a thing|one object|one of the objects|one of the things)
(can|could|may) i (have|get) (something|an object|one of the objects|one of the things)
hand (something|an object|one of the things) over
(i want|i need|i would like) (something|an object|one of the objects|one of the things)
~ pass one of the things to me
""",
    ("look", "object"): """
look at (something|an object|one of the objects|one of the things)
(have|take) a look at (something|an object|one object|one of the things)
(inspect|examine|watch) (something|an object|one of the objects|one of the things)
(turn|point) your (camera|eyes|head) to (something|an object|one of the things)
~ examine one object
""",
    ("point", "object"): """
point (at|to) (something|an object|one of the objects|one of the things)
(point|show) with your (hand|arm|finger) at (something|an object|one of the things)
(indicate|point out|mark) (something|an object|one of the objects|one object)
~ point at one object
""",
    ("weigh", "object"): """
(weigh|measure) (something|an object|one of the objects|one of the things)
(find|tell me) (how heavy|what weight) (something|an object|one of the objects) is
(use|try) the (scale|scales) (with|on) (something|an object|one of the things)
~ weigh one of the things with the scale
""",
    ("say", "text"): """
(say|speak|announce) something
(say|tell) (something|some words) (aloud|with your speaker|to us|to the people|to everyone)
(speak|talk) (to us|aloud|with your loudspeaker|to the people|to everyone)
(use|try) your (speaker|loudspeaker|voice)
~ say some words to everyone
""",
}
#: What is asked back, by the parameter; {o} is the object that was named.
ASKING = {
    "degrees": "How many degrees shall I turn?",
    "direction": "Which way?",
    "seconds": "How many seconds shall I wait?",
    "position": "Where shall I put the {o}?",
    "object": "Which object?",
    "text": "What shall I say?",
}
#: Replies to that.
REPLIES = {
    "degrees": """
{n}
{n} (degrees|degrees please|degrees, please|please)
(by|about|i mean|make it|exactly) {n} (degrees|)
(oh|well|sorry|ok), {n} (degrees|)
~ please make it {n} degrees
""",
    "direction": """
{d}
{d} (please|of course|this time|i think)
(i mean|i want|make it|oh|well|sorry|ok,) {d}
~ i want {d} please
""",
    "seconds": """
{n}
{n} (seconds|seconds please|seconds, please|please)
(for|about|i mean|make it|exactly) {n} (seconds|)
(oh|well|sorry|ok), {n} (seconds|)
~ please make it {n} seconds
""",
    "position": """
{p}
(at|to|on) the {p}
the {p} (please|, please|of course|i think)
(i mean|i want it at|put it at|move it to|make it|take) the {p}
(oh|well|sorry|ok), (at|to|) the {p}
~ i think to the {p}
""",
    "object": """
{o}
{o} (please|of course|i think|, please|this time)
(i mean|i meant|i want|take|use|make it) {o}
(well|oh|sorry|ok), {o}
(the one i mean is|the one i want is|let us take|let's take|i was thinking of) {o}
~ i want {o}, please
""",
    "text": """
"{t}"
(say|just say|i mean|oh,|well,) "{t}"
"{t}" (please|of course|would be good|would be nice)
~ please just say "{t}"
""",
}
#: Words that come behind or before a command and set a tool's optional parameter.
SLOWLY = ("slowly", "gently", "carefully")
QUICKLY = ("quickly", "fast", "immediately")
WEIGH = """
(weigh|measure) {o}
how heavy is {o}
(what is|tell me|find) the weight of {o}
(what does|how much does) {o} weigh
(put|place|set) {o} on the (scale|scales)
(find|tell me|measure) how heavy {o} is
(use|try) the (scale|scales) (with|on|for) {o}
how many grams (is|are in|has) {o}
~ find the weight of {o}
~ tell me how much {o} weighs
"""
SAY = """
say "{t}"
(say|speak|announce) "{t}" (aloud|to everyone|to us|to the people|to the visitors|with your speaker|)
(say|tell) (the words|this:|this sentence:|the following:) "{t}"
(i want you to|please|now) say "{t}"
(use your voice and|use your speaker and) say "{t}"
(let us|let me|let everyone) hear "{t}"
~ speak the words "{t}" aloud
~ tell everyone "{t}"
"""
#: What is to be said.
TEXTS = """
(good morning|good evening|good afternoon|good night|hello|welcome|goodbye)(| everyone| dear visitors| my friends| {person})
(dinner|lunch|breakfast|tea|coffee|the cake|the game) is ready(| now|, {person})
(the meeting|the lesson|the show|the game) (starts|begins|ends) (now|soon|at noon|in ten minutes)
(please|) (come|sit down|be quiet|wait|help me|look at me|listen)(| everyone|, {person}| now)
(thank you|well done|happy birthday|good luck|congratulations|take care)(| everyone| {person})
(the|my|your) (door|window|table|battery|robot|box) is (open|empty|full|clean|ready|here)
(i am|we are|you are) (ready|here|happy|done|late|early)(| now| today)
~ (thank you|welcome), (my friends|everyone)
"""
LIGHT = {
    True: """
(turn|switch|put) (the|your) (light|lamp) on
(turn|switch|put) on (the|your|a) (light|lamp)
(light|lamp) on
(i need|we need|i want|give me|give us|make) (light|some light|more light)
(let there be|i want to see some) light
it is (too|very) dark (here|in here|)
~ we need the light on
~ switch some light on
""",
    False: """
(turn|switch|put) (the|your) (light|lamp) off
(turn|switch|put) (off|out) (the|your|that) (light|lamp)
(light|lamp) off
(i need|we need|i want) (no light|no more light|the light off)
(make it|i want it|we want it) dark
it is (too|very) bright (here|in here|)
~ we want no light
~ put that lamp off
""",
}
TIME = """
what time is it (now|)
what is the time (now|)
(tell|give|show) me the time
(do you know|have you got|can you tell me) (the time|what time it is)
how late is it (now|)
(read|check|look at) the clock
what (does the clock say|time do we have)
~ check what time it is
~ give me the time now
"""
TEMPERATURE = """
(what is|tell me|give me|measure|check|read) the temperature (here|now|in this room|in the room|)
how (warm|cold|hot) is it (here|now|in this room|in the room|)
(is it|tell me if it is) (warm|cold|hot) (here|in here|in this room)
how many degrees (are there|is it) (here|now|in this room|in the room|)
(use|read|check) (the|your) thermometer
~ check how warm it is in this room
~ tell me how cold it is
"""
#: Two objects for one tool, three ways to join them.
PAIRS = ("{a} and {b}", "{a} and then {b}", "{a} and also {b}", "both {a} and {b}")
MOVE_PAIR = """
move {a} to the {p} and {b} to the {q}
(bring|put|carry|take) {a} to the {p} and {b} to the {q}
(move|bring|put|carry) {a} to the {p} and (then|also) {b} to the {q}
(move|put) {a} to the {p} and (move|put) {b} to the {q}
{a} (goes|belongs) to the {p} and {b} (goes|belongs|) to the {q}
(set|place) {a} at the {p} and {b} at the {q}
~ carry {a} to the {p} and put {b} to the {q}
"""
TURN_PAIR = """
turn {n} degrees {d} and then {m} degrees {e}
(turn|rotate|spin) {n} degrees {d} and {m} degrees {e}
(turn|rotate) {d} by {n} degrees and (then|after that) {e} by {m} degrees
(turn|rotate|spin) {d} {n} degrees, then {e} {m} degrees
first (turn|rotate) {n} degrees {d}, then {m} degrees {e}
~ spin {n} degrees {d}, after that {m} degrees {e}
"""
SAY_PAIR = """
say "{t}" and "{u}"
say "{t}" and then (say|) "{u}"
(first|) (say|speak) "{t}", then (say|) "{u}"
(announce|say) "{t}" and after that "{u}"
~ speak "{t}" and then "{u}"
"""
#: Why a tool failed.
REASONS = """
the (gripper|arm|motor|hand|camera|wheel|joint) (is stuck|is blocked|is busy|does not move|is too hot|is broken|has no power)
(it|the object) is (too heavy|too far away|too hot|too big|not there|out of reach|not safe)
(something|a hand|an object|a person) is in the way
(the object|it) (slipped|fell down|rolled away)
(no|lost) (connection|signal) to the (arm|robot|camera|motor)
(timeout|emergency stop|collision)
~ the (arm|wheel) is too hot
~ a person is too far away
"""
