"""How users give commands: the phrasings of every action (see grammar.py; lines with `~` are held out from training)."""

PICK = """
(pick up|pick|grab|take|lift|lift up|get|fetch|grasp) {o}
pick {o} up
(get|take) hold of {o}
take {o} (in|into) your (hand|gripper)
(hold|seize|collect) {o}
i need {o} picked up
(lift|take|raise|pick|grab) {o} (off|up from|from) the table
(raise|clasp|catch|get a hold of|get your hand on|lift up|scoop up) {o}
(use your gripper to|use your hand to|try to) (pick up|take|grab|lift|raise|hold) {o}
(close your gripper around|put your gripper around|get a grip on) {o}
(have|keep|hold) {o} in your (hand|gripper)
~ get {o} up from the table
~ try to get hold of {o}
~ use your hand to collect {o}
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
PLACE_ON = "\n".join(f"~ {line.replace('~~', '')}" if "~~" in line else line for line in PLACE_ON.strip().splitlines())
MOVE = """
move {o} to the {p}
(bring|shift|carry|take) {o} to the {p}
(put|place|set) {o} (at|to) the {p}
(pick up|take|grab) {o} and (put|place) it at the {p}
{o} (should go|goes|belongs) to the {p}
i want {o} at the {p}
(transfer|relocate|get|push over|send|transport) {o} to the {p}
(let|have) {o} (go|be|stand) (to|at) the {p}
(the new place|the new position|the place|the position) of {o} (should be|is now|shall be) the {p}
{o} (has to|must|needs to|should) (be|go|stand) (at|to) the {p}
(lift|get) {o} and (put|place|set|carry) it (to|at) the {p}
(use|take) the {p} (as the place|as the position|) for {o}
~ carry {o} over to the {p}
~ have {o} transported to the {p}
"""
_PUSH = """
{d} :: push {o} {w}
{d} :: (slide|nudge|shove) {o} {w}
{d} :: give {o} a (push|nudge) {w}
{d} :: push {o} a (little|bit) {w}
{d} :: (push|slide|nudge|shove|press|tap|knock) {o} (a little|a bit|slightly|gently|) {w}
{d} :: (make|let) {o} (slide|roll|move) (a little|a bit|) {w}
{d} :: (slide|nudge|shove|push) {w} {o}
{d} :: {o} (should|must|has to) (slide|move|be pushed) (a little|a bit|) {w}
~ {d} :: let {o} be pushed a little {w}
"""
PUSH = "\n".join(
    _PUSH.strip().replace("{d}", direction).replace("{w}", ways)
    for direction, ways in {
        "left": "(left|to the left)",
        "right": "(right|to the right)",
        "forward": "(forward|forwards|away from you)",
        "back": "(back|backwards|towards you)",
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
(i'll|i will|i'd like to|i would like to) (take|have|get|hold) {o}
(deliver|bring|carry|send|transfer|get) {o} (to me|over to me|into my hand|here)
(get|fetch|deliver) me {o}
(give|hand|pass) {o} (to me|into my hand|over|over to me)
(put|place) {o} (in|into) my hand
(would you|could you|can you) (pass|hand|give|get) me {o}
{o} (is for me|for me|to me)
(can|could|may|might) i (have|get|take|hold|borrow) {o}
~ i will get {o}
~ bring {o} over to me
"""
LOOK = """
look at {o}
(take|have) a look at {o}
(watch|observe|inspect|examine) {o}
turn your (head|camera|eyes) to {o}
point your camera at {o}
focus on {o}
(look|gaze) towards {o}
(direct|turn|move|point) your (eyes|camera|head|gaze) (to|at|towards) {o}
(keep|have) (an eye|your eyes|your camera) on {o}
(see|view|check|study|check out|look over|stare at|gaze at|monitor) {o}
(look|take a look|have a look) (at|over at|towards|to) {o}
(let us|let's) (look|have a look|take a look) at {o}
(aim|fix) your (camera|eyes) (at|on) {o}
(i want you to|you should) look at {o}
~ keep your camera on {o}
~ move your eyes towards {o}
"""
POINT = """
point (at|to|towards) {o}
point your (finger|arm|hand) at {o}
(show|indicate) me {o}
indicate {o}
show me which (one|thing) is {o}
(point|point out|mark|show) {o}
(point|show) me {o}
point me to {o}
(point|aim) (your|a) (finger|arm|hand|gripper) (at|to|towards) {o}
(point|show) (with|using) your (hand|arm|finger) (at|to|towards) {o}
(point|show) (us|me) {o}
(indicate|mark) (which one is|which is) {o}
(let your finger|let your arm) point (at|to) {o}
~ indicate {o} with your arm
~ show us which is {o}
"""
GO = """
(go|drive|roll|walk|move|come) (to|over to|towards) {o}
(head|travel) (to|over to|for) {o}
approach {o}
get (close|closer) to {o}
go and stand (at|by) {o}
drive up to {o}
(make|find) your way (to|over to|towards) {o}
(head|travel|go|drive|roll|move|walk|come|steer) (to|over to|for|towards|up to|close to|near|nearer to) {o}
(go|drive|move|roll) (until you are|so that you are) (at|near|close to) {o}
(get|be|come) (near|close to|over to|to) {o}
(take yourself|bring yourself) (to|over to) {o}
(visit|reach) {o}
~ steer towards {o}
~ find your way over to {o}
"""
_TURN = """
{d} :: turn {w} {n} degrees
{d} :: turn {n} degrees {w}
{d} :: (rotate|spin) {n} degrees {w}
{d} :: turn (yourself|around|) {w} by {n} degrees
{d} :: rotate {w} by {n} degrees
{d} :: (turn|rotate|spin|swivel|swing|pivot) (yourself|around|round|) {w} (by|for|) {n} degrees
{d} :: (make|do) a turn of {n} degrees {w}
{d} :: {n} degrees {w}
{d} :: (turn|rotate|spin) (by|for) {n} degrees {w}
~ {d} :: rotate yourself by {n} degrees {w}
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
(stand|stay|remain|keep|hold) still for {n} (seconds|sec)
(take a break|take a pause|make a pause|make a break|sleep|stop) (for|of) {n} seconds
(wait|pause|rest) (for|) {n} (seconds|more seconds|sec) (here|there|where you are|and do nothing|)
(do not|don't) (move|do anything) for {n} seconds
give me {n} seconds
~ take a rest for {n} seconds
~ remain where you are for {n} seconds
"""
SIMPLE = {
    "wave": (
        "I will wave.",
        """
(say hello|say goodbye|greet me|greet us|greet the people|greet everyone) (with your hand|with your arm|by waving|with a wave)
(wave|start waving|keep waving) (with your arm|with your hand|to everyone|to everybody|at the camera|to my friend|to the people|to the visitors|at us|)
(make|do) a (wave|waving move)
(wave|move|lift) your (arm|hand) (to greet me|to say hello|to say goodbye)
wave
wave (your hand|your arm|to me|at me|hello|to us|at them|goodbye)
give me a wave
give (us|them) a wave
(say hello|greet me|greet us) with your (hand|arm)
~ wave to the (people|visitors)
""",
    ),
    "nod": (
        "I will nod.",
        """
(nod|move|bow) your head (for me|to me|to us|once|twice|)
(nod|nodding) (to me|to us|for me|for us|at us|please|)
(show|make|do) (a|me a|us a) nod
(tell me yes|say yes) with your head
nod
nod (your head|yes|once|at me)
(give me|give us) a nod
move your head up and down
~ nod to (me|us)
""",
    ),
    "stop": (
        "I will stop now.",
        """
(stop|end|quit|cease) (this|that|it|what you are doing|whatever you do|everything you do|the movement|your movement|all movement)
(enough|that is enough|no more)(, stop|, stop it|, stop now|)
(stop|halt) (please|robot|right there|where you are|here|)
(break off|interrupt|abort|cancel) (the|this|your) (action|movement|task|job)
(keep|hold|stand|stay) (still|where you are|right there)
(stop|freeze|halt), (stop|robot|please)
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
""",
    ),
    "home": (
        "I will go to my home position.",
        """
(move|drive|go|return|come|get) (back|) (home|to your home position|to your home place|to the home position|to the start position|to your rest position|to where you started)
(take|find) (up|) your (home|start|rest) position
(home|home position|rest position|start position)
(go|move|return) into your (home|start|rest) position
(it is time to|you can) (go home|return home|go back home)
(go|drive|move|return|get) (home|to your home position|to the home position|back home)
(return|go back) to your (home|start|starting|rest|resting) position
go to your (home|start) position
back to your home position
(home|homing)
park yourself
park (your arm|the arm)
~ move back to your home position
""",
    ),
    "charge": (
        "I will go to the charger.",
        """
(refill|fill up|load|top up|charge up|recharge) your (battery|batteries)
(drive|go|move|return|roll) (back|) (to the charger|to your charger|to the charging station|to your charging station|to the charging dock|to the power station|to your dock)
(connect|plug) (yourself|) (to the charger|in|into the charger|to the power)
(you should|you need to|you have to) (charge|recharge|go to the charger|charge yourself)
(start|begin) (charging|to charge|recharging)
(go|drive|move|return|get) (to the charger|to your charger|to the charging station|to the dock|to your dock)
(go and|) (charge|recharge)
(charge|recharge) (yourself|your battery|your batteries|now)
go (charge|recharge)
(plug yourself in|dock yourself|dock)
get some (power|energy)
time to (charge|recharge)
~ refill your battery
~ fill up your battery
""",
    ),
    "open_gripper": (
        "I will open my gripper.",
        """
(open|spread|widen) (up|) (your|the) (gripper|hand|fingers|claw) (wide|again|fully|)
(make|keep) (your|the) (gripper|hand) (open|wide open)
gripper open
(your|the) (hand|fingers|claw) should (open|be open)
open (your|the) (gripper|hand|fingers|claw)
(your|the) gripper should (open|be open)
~ open up your gripper
""",
    ),
    "close_gripper": (
        "I will close my gripper.",
        """
(close|shut|squeeze|clench) (up|) (your|the) (gripper|hand|fingers|claw) (again|fully|tightly|)
(make|keep) (your|the) (gripper|hand) (closed|shut)
gripper (closed|shut|close)
(your|the) (hand|fingers|claw|gripper) should (close|be closed)
(make|form) a fist
close (your|the) (gripper|hand|fingers|claw)
(shut|squeeze) (your|the) (gripper|hand)
~ close up your gripper
""",
    ),
    "dance": (
        "I will dance.",
        """
(dance|start dancing|keep dancing) (with me|with us|for everyone|a little|around|to the music|)
(show|give) (me|us) (your|a|some|your best) (dance|dancing|dance moves)
(can we|can i|let us|let me|i want to) see (a dance|you dance|some dancing|your dance|a little dance)
(do|perform|make) (a|your|some) (dance|dancing|dance moves)
dance
(do|show me|show us) (a|your) dance
(dance|move) for (me|us)
let us (see you|) dance
(do|make) a little dance
~ can we see a dance
""",
    ),
}
RELEASE = """
put {o} down
put down {o}
(let go of|let loose|release) {o}
(drop|lower) {o}
(set|lay) {o} down
let {o} go
(set|lay|place|put|bring) {o} (back|back down|down|down again|back on the table|on the table|down on the table)
(set|lay|place|put|bring) (back|down|back down) {o}
(open your hand and|open your gripper and) (let go of|release|drop|put down) {o}
(stop|do not keep|don't keep) holding {o}
(unload|unhand|loosen|free|leave) {o}
you can (let go of|release|put down|drop) {o}
(let|get) (loose|go of|rid of) {o}
(drop|release|lower) {o} (now|again|gently|onto the table|at once|here)
(just|simply|carefully|slowly) (drop|release|lower) {o}
(now|then|and then) (drop|release) {o}
(place|lay|set) (down|back down) {o} (again|now|gently|carefully)
~ lay {o} back on the table
~ do not hold {o}
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
play (me|us|) (a song|some music|the news)
(call|phone|text) (my mother|the police|a taxi|my friend|a doctor)
(send|write) (an email|a letter|a message) (to my boss|to my friend|for me)
(order|buy) (me|us|) (a pizza|some milk|a new phone|flowers|tickets)
(clean|mop|vacuum) the (floor|house|kitchen|bathroom|windows)
(drive|take) me (home|to work|to the station|to school)
(swim|dive|ski|ride a bike|do a somersault|do a backflip)
(walk|feed|wash) the (dog|cat)
(drive|fix|wash|park) my car
(water the plants|mow the lawn|paint the wall|iron my shirt|do the laundry|wash the dishes|take out the trash)
(sew|knit|weld|bake|fry|grill|boil|cook|build|paint|draw|print|mend|repair|fix|wash|iron|polish|sell|steal|hunt|ride|plant|dig|burn|design|translate|invent|throw out|blow up|chase|tow|unlock) (a|the|my|our|your) (jacket|trousers|bread|pizza|house|garage|bridge|roof|garden|bicycle|horse|bird|fish|tree|rocket|computer|film|novel|country|mountain|river|train station|airport|hotel|shop|church|castle|engine|laundry|carpet|curtains|chimney|swimming pool)
(fly|jump|run|swim|walk|drive off|climb|hike|travel|sail|crawl|sneak|escape) (out of|into|through|up|around) (the|a|my) (window|roof|garden|street|city|moon|sea|river|mountain|wall|stairs|kitchen|hall|forest|sky|ceiling|cupboard|house|room|building|door)
(jump|climb|get|go|drive|step|walk|hop|roll|fall|come) (off|down from|away from|over the edge of|from) (the table|this table|your table)
(fetch|bring|get|buy|order|find) me (a|some|the) (pizza|newspaper|beer|coffee|tea|ice cream|milk|bread|taxi|present|magazine|sandwich|burger|wine|chocolate) (from the shop|from the kitchen|from the fridge|from the street|in town|online)
(turn|switch) (on|off|up|down) the (light|lights|heating|oven|tv|radio|music|washing machine|fan|air conditioning|computer|alarm|camera in the hall)
(drive|take|fly|carry) (me|us|him|her|the children) (home|to work|to the station|to school|to the airport|to bed|to town|to the doctor)
(call|phone|text|email|write to) (my|the|a) (mother|father|police|taxi|friend|doctor|boss|neighbour|wife|husband|bank|teacher)
(play|put on|stream) (me|us|) (a song|some music|the news|a video|the radio|a film|a podcast)
(do|finish|check) my (homework|taxes|shopping|work|laundry|exams|emails|bank account)
(fly|swim|dive|ski|skate|surf|gallop|levitate|disappear|become invisible|time travel|teleport|explode|grow taller|lay an egg)
~ walk through the (window|garden|city)
~ (roll|fall|come) off the table
~ (repair|open) the roof
~ buy me (a car|some bread)
"""
PREFIXES = """
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
(kindly|quickly|carefully|slowly|gently|just|simply|now just|please just|please try to|try to)
(be so kind and|be so good and|be nice and|be a dear and|do me a favour and|do me a favor and|do us a favour and)
(would|could|can) you (be so kind and|be so good as to|kindly|maybe|quickly|perhaps|possibly|just|now|then)
(i was wondering if you could|it would be nice if you could|i would be happy if you could|do you think you could|would you mind to)
(if you can|if you like|when you can|when you are ready|as soon as you can|if possible), (please|)
(my friend|little robot|dear robot|buddy|robot friend|{name}), (could you|can you|please|)
(your task|your job|the next task|my wish|the plan) is to
(let us|let's|time to|we need to|you need to|it is time to|i ask you to|i order you to|i tell you to)
(good|great|fine|perfect|nice|thanks|thank you|wonderful|super)(,|, now|, then|, and now|, next)
(after that|afterwards|once more|again|in a moment|finally|at last|meanwhile|instead),
~ would you just
~ my friend, please try to
~ now could you
~ do you think you can
~ be so good and quickly
"""
SUFFIXES = """
(please|for me|now|thanks|right now|if you can|, please|, thanks|, would you)
(, thank you|, if you please|if you please|, will you|will you|, my friend|, robot|, ok|, okay|, right|, buddy|, {name})
(as soon as you can|when you can|if you like|if possible|quickly|carefully|slowly|gently|again|immediately|at once|this time|then)
(, would you please|, could you|, can you|and thank you|and be careful|and hurry)
~ (, thank you robot|if you can now)
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
(that would be|that is|it is|it's|i was thinking of|i was thinking about|i think|i want|i would say|make it|choose|pick) {o}
(well|oh|sorry|ok|hm|right|oh sorry|of course), {o}
{o} (then|thanks|thank you|i guess|if possible|of course|, please)
(the one i mean is|the one i want is|let us take|let's take) {o}
~ i would take {o}
~ sorry, i want {o}
"""
