"""No template holds the process or fills its memory: attacks in a process with hard limits, Ctrl-C, the compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from linked_environment import first_in_path
from template_attacks import ATTACKS

from edgellm.errors import TemplateError
from edgellm.text.template import ChatTemplate
from edgellm.text.template_budget import TemplateLimits

#: Renders the attacks of one group in turn, with 512 MiB more than the process has at first.
PROGRAM = """
import resource, sys, time
from edgellm.errors import TemplateError
from edgellm.text.template import ChatTemplate
from edgellm.text.template_budget import TemplateLimits
from template_attacks import ATTACKS

values = {"messages": [{"role": "user", "content": "hello"}]}
ChatTemplate({"default": "{{ messages[0].content }}"}, "warm").render(values)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 512 * 2**20,) * 2)
for name, source in ATTACKS[sys.argv[1]].items():
    print(f"{name}: ", end="", flush=True)
    started = time.process_time()
    try:
        ending = repr(ChatTemplate({"default": source}, "t", TemplateLimits(seconds=0.05)).render(values))[-60:]
    except TemplateError as error:
        ending = str(error)[:200]
    print(f"{time.process_time() - started:.2f} s: {ending}", flush=True)
"""


def environment() -> dict[str, str]:
    """The variables of a process that finds the attacks."""
    return os.environ | first_in_path(Path(__file__).parents[1] / "helpers")


@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
@pytest.mark.parametrize("group", ATTACKS)
def test_no_template_takes_long_or_much(group: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, group],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(),
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split(": ")[0] for line in lines] == list(ATTACKS[group])
    for line in lines:
        name, seconds, ending = line.split(": ", 2)
        assert float(seconds.split()[0]) < 1.5, line  # of the processor, so that a busy machine does not matter
        assert "MemoryError" not in ending, line
        stopped = any(word in ending for word in ("was stopped", "failed:", "refuses these messages"))
        assert stopped or ending.endswith("ok'"), f"{name} was rendered: {ending}"


INTERRUPTED = """
import sys
from edgellm.text.template import ChatTemplate
from edgellm.text.template_budget import TemplateLimits

template = ChatTemplate({"default": sys.argv[1]}, "t", TemplateLimits(seconds=60, total_size=2**40))
print("ready", flush=True)
template.render({"messages": []})
"""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x='a'*4000000 %}{% for a in range(99999) %}{% set y = ('a'*2000000+'b') in x %}{% endfor %}",
        "{% for a in range(99999) %}{% set y = (range(99999)|list)|tojson %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(80) }}",
    ],
)
def test_ctrl_c_ends_a_template_at_once(source: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.7)
        assert process.poll() is None
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - started < 2
        assert "KeyboardInterrupt" in errors
    finally:
        process.kill()


#: Templates whose compiling is what takes long.
PROGRAMS = {
    "output": "{{ a }}" * 30_000,
    "assignments": "".join(f"{{% set a{i} = 1 %}}" for i in range(2600)),
    "assignments in branches": "".join(f"{{% if a %}}{{% set a{i} = 1 %}}{{% endif %}}" for i in range(1200)),
    "nested branches": "{% if a %}" * 60 + "{{ a }}" * 3800 + "{% endif %}" * 60,
    "loops with filters": "{% for a in b if a %}{% endfor %}" * 1400,
    "macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(1700)),
    "sums": "{{ 1" + "+1" * 7900 + " }}",
    "filters": "{{ a" + "|upper" * 7900 + " }}",
    "comparisons": "{{ 1" + "<1" * 7900 + " }}",
    "nested comparisons": "{{ " + "(1<" * 60 + "1" + "<1)" * 60 + " }}",
    "colliding keys": "{{ {" + ",".join(f"{i * (2**61 - 1)}:1" for i in range(3900)) + "} }}",
    "digits": "{{ " + "1_" * 120_000 + "1 }}",
    "hexadecimal digits": "{{ 0x" + "f" * 250_000 + " }}",
    "spaces": "{%" + " " * 250_000,
    "tags": "{%" * 120_000,
    "quotes": "{{ '" + "\\\\" * 120_000 + " }}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiling_is_bounded_too(name: str) -> None:
    started = time.process_time()
    template = ChatTemplate({"default": PROGRAMS[name]}, "t", TemplateLimits(seconds=0.3))
    try:
        template.render({"messages": []})
    except TemplateError as error:
        assert "t was stopped" in str(error) or "t failed" in str(error) or "syntax error" in str(error)
    assert time.process_time() - started < 1.8


def test_too_many_words_are_refused() -> None:
    with pytest.raises(TemplateError, match="more than 16000 words and signs"):
        ChatTemplate({"default": PROGRAMS["output"]}, "t").render({})


def test_other_objects_do_not_reach_a_template() -> None:
    class Text(str):
        def strip(self) -> str:  # type: ignore[override]
            raise AssertionError("called")

    template = ChatTemplate({"default": "{{ x.strip() }}{{ y }}"}, "t")
    assert template.render({"x": Text(" a "), "y": True}) == "aTrue"
    for value in (object(), print, b"bytes", {1, 2}, 1j):
        with pytest.raises(TemplateError, match=f"a {type(value).__name__} is among the values"):
            template.render({"x": "a", "y": [{"z": value}]})
