"""How users ask about a picture as such (see grammar.py; lines with `~` are held out from training)."""

from tools.demo_model.questions_text import COUNT_ALL, COUNT_KIND, EXISTS, LIST, WHERE

_P = "(picture|image|photo)"
_IN = f"(in|on) (the|this) {_P}"

# Phrasings of a block of the text skills -> phrasings of the same question that name the picture.
IN_PICTURE: dict[str, str] = {
    LIST: f"""
what is {_IN}
what's {_IN}
what (do|can) you see {_IN}
what (objects|things|items) (are|do you see|can you see) {_IN}
describe (the|this) (picture|image|photo|scene)
(please|can you|could you) describe (the|this) (picture|image|photo|scene)
what does (the|this) {_P} show
what (is|do you see) (shown|there) {_IN}
(list|name) (the|all) (objects|things|items) {_IN}
tell me what (is|you see) {_IN}
what is this {_P} (of|about|showing)
look at (the|this) {_P}, what do you see
here is (a|another|a new) {_P}, what (do|can) you see
what do you see now
what is there now
~ tell me what (the|this) {_P} shows
~ which (objects|things) does (the|this) {_P} show
~ i want to know what is {_IN}
""",
    COUNT_ALL: f"""
how many (objects|things|items) are {_IN}
how many (objects|things|items) (do|can) you see {_IN}
count the (objects|things|items) {_IN}
what is the number of (objects|things) {_IN}
~ tell me how many (objects|things) there are {_IN}
""",
    COUNT_KIND: f"""
how many {{ks}} are {_IN}
how many {{ks}} (do|can) you see {_IN}
how many {{ks}} does (the|this) {_P} show
count the {{ks}} {_IN}
~ tell me how many {{ks}} there are {_IN}
""",
    EXISTS: f"""
is there {{a}} {_IN}
(do|can) you see {{a}} {_IN}
does (the|this) {_P} show {{a}}
is {{a}} {_IN}
~ tell me if there is {{a}} {_IN}
""",
    WHERE: f"""
where is {{o}} {_IN}
where (do|can) you see {{o}} {_IN}
where {_IN} is {{o}}
in which (place|position) is {{o}} {_IN}
~ tell me where {{o}} is {_IN}
""",
}
