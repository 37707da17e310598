"""Chat templates: what they may do, what they get, and what stops a hostile one."""

# ruff: noqa: E501 (line ends are part of a template)
from __future__ import annotations

import json
import time

import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgellm.errors import EngineDirectoryError, TemplateError
from edgellm.text.template import ChatTemplate
from edgellm.text.template_budget import TemplateLimits, current_budget, run_with_budget

MESSAGES = [
    {"role": "system", "content": "  You are Pip.\nYou help. "},
    {"role": "user", "content": "What is <here> & 'there'? 你好"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"at": ["cup", 2, None, True]}}]},
    {"role": "tool", "content": '{"seen": 1.5}', "name": "look"},
    {"role": "user", "content": "And now?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"b": {"type": "int"}, "a": {}}}}]

TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}</s>\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    """
    {%- if messages[0].role == 'system' %}
        {%- set system = messages[0]['content'] %}
        {%- set rest = messages[1:] %}
    {%- endif %}
    {{- bos_token + '<<' + system.strip() ~ '>>' }}
    {%- for m in rest if m.role != 'tool' %}
        {%- if loop.first %}F{% elif loop.last %}L{% endif %}
        {{- loop.index0 }}/{{ loop.length }}{{ loop.cycle('a', 'b') }} {{ m.content.split(' ')[-1] }}{{ '\\n' }}
    {%- else %}none{% endfor %}
    """,
    """{% macro show(x, depth=0) %}{% if x is mapping %}{% for k, v in x|dictsort %}{{ '  ' * depth }}{{ k }}:
{{ show(v, depth + 1) }}{% endfor %}{% elif x is iterable and x is not string %}{% for v in x %}{{ show(v, depth + 1) }},
{% endfor %}{% else %}{{ x|string|upper }}{% endif %}{% endmacro %}{{ show(tools) }}|{{ show(messages) }}""",
    "{% set ns = namespace(found=false, text='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.found = true %}"
    "{% set ns.text = ns.text ~ m.content[:4] %}{% endif %}{% endfor %}{{ ns.found }} {{ ns.text }}",
    "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages[1] | tojson }}|{{ messages|length }}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.role }}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('tool_calls', 'defined') | map(attribute='role') | unique | sort | join('-') }}",
    "{{ messages[-1]['content'].replace('now', 'then') | indent(4, true) }}{{ '%s-%03d' % ('a', 7) }}{{ '{0}:{1:>5}'.format(1, 'x') }}"
    "{{ '%s=%d' | format('a', 5) }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ [1, 2] + [3] }}{{ (1, 'a') }}{{ {'a': [1]}.items() | list }}",
    "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) and false -%}{{ raise_exception('x') }}{%- endif -%}"
    "{{ m.name | default('-') }}{{ m.tool_calls is defined }}{%- endfor -%}",
    "{% set x %}{{ bos_token }} and {{ eos_token|default('none') }}{% endset %}{{ x | replace('and', 'or') | capitalize }}",
    "{% filter upper %}a{{ 1 }}{% endfilter %}{% for k, v in {'z': 1, 'y': 2}.items() %}{{ k }}{{ v }}{% endfor %}{{ [3, 1, 2]|sort|first }}",
    "{% for a in [[1, [2]], [3, [4]]] recursive %}{% if a is iterable %}<{{ loop(a) }}>{% else %}{{ a }}{% endif %}{% endfor %}",
    "{{ messages[1].content.startswith('What') and 'here' in messages[1].content }}{{ documents is none }}{{ nothing is defined }}",
]


def published_environment() -> ImmutableSandboxedEnvironment:
    """jinja2's own environment, set up as templates are published for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment


def render(source: str, seconds: float = 5.0, **values) -> str:
    template = ChatTemplate({"default": source}, "a test", TemplateLimits(seconds=seconds))
    return template.render({"messages": MESSAGES, **values}, {"bos_token": "<s>"})


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_in_an_unlimited_environment(source):
    variables = {"messages": MESSAGES, "tools": TOOLS, "bos_token": "<s>", "documents": None}
    expected = published_environment().from_string(source).render(**variables, add_generation_prompt=True)
    assert render(source, tools=TOOLS) == expected
    assert expected.strip()


def test_generation_prompt_and_other_variables():
    source = "{{ add_generation_prompt }} {{ tools }} {{ thinking }} {{ bos_token }}"
    template = ChatTemplate({"default": source}, "a test")
    values = {"messages": MESSAGES, "thinking": 3}
    assert template.render(values, {"bos_token": "B"}, add_generation_prompt=False) == "False None 3 B"


def test_generation_blocks_are_transparent():
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "asystemb"


def test_date_of_today():
    assert render("{{ strftime_now('%Y-%m') }}") in (time.strftime("%Y-%m"), render("{{ strftime_now('%Y-%m') }}"))


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop filter": "{% for a in range(99999) if range(99999)|list|length == 3 %}{% endfor %}",
    "macros that branch": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(80) }}",
    "recursive loop": "{% for a in range(3) recursive %}{{ loop(range(30000)) if loop.depth < 4 }}{% endfor %}",
    "many searches": "{% set x='a'*4000000 %}{% set y='a'*2000000~'b' %}{% for i in range(10000) %}{{ y in x }}{% endfor %}",
    "many lists": "{% set x='a '*1900000 %}{% for i in range(1000) %}{% set y = x.split(' ') %}{% endfor %}",
    "deep comparison": "{% set n=namespace(x=[],y=[]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] %}{% set n.y=[n.y,n.y] %}"
    "{% endfor %}{{ n.x==n.y }}",
}
HUGE = {
    "text": "{{ 'x' * 10**9 }}",
    "constant text": "{{ 'x' * 1000000000 }}",
    "list": "{{ [1] * 10**9 }}",
    "power": "{{ 9**999**9 }}",
    "product": "{% set n=namespace(x=3) %}{% for i in range(99) %}{% set n.x=n.x*n.x %}{% endfor %}{{ n.x % 7 }}",
    "doubling with ~": "{% set n=namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling with +": "{% set n=namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling blocks": "{% set n=namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "doubling lists": "{% set n=namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "doubling dictionaries": "{% set n=namespace(x={}) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}"
    "{{ n.x|tojson }}",
    "doubling tuples": "{% set n=namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "replace": "{% set x='a'*100000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x='a'*100000 %}{{ x|replace('', x) }}",
    "join": "{% set x='a'*100000 %}{{ x.join(x) }}",
    "join filter": "{% set x='a'*4000000 %}{{ ([x]*100000)|join }}",
    "lazy map": "{% set x='a'*1000000 %}{{ ('b'*100000)|map('replace','b',x)|list|length }}",
    "wide field": "{{ '{:1000000000d}'.format(1) }}",
    "wide nested field": "{{ '{:{}d}'.format(1, 1000000000) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide filter": "{{ '%1000000000d'|format(1) }}",
    "wide date": "{{ strftime_now('%1000000000d') }}",
    "strip": "{% set x='a'*4000000 %}{% set y='b'*3999999 ~ 'a' %}{{ x.strip(y) }}",
    "separators": "{% set x='a'*100000 %}{{ (range(99999)|list)|tojson(separators=(x,x)) }}",
    "indented depth": "{% set n=namespace(x=range(9999)|list) %}{% for i in range(400) %}{% set n.x=[n.x] %}{% endfor %}"
    "{{ n.x|tojson(indent=16) }}",
    "range": "{% for a in range(10**9) %}x{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x'*1000 }}{% endfor %}",
    "many values": "".join(f"{{% set a{i} = 'x'*4000000 ~ 'é' %}}" for i in range(200)),
}
REACHING = {
    "class": "{{ ''.__class__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by map": "{{ ['']|map(attribute='__class__')|list }}",
    "class by format": "{{ '{0.__class__}'.format('') }}",
    "class by format item": "{{ ''['format'].__self__ }}{{ '{0.__class__}'['format']('') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "template": "{{ self.__init__ }}",
    "context": "{{ self._TemplateReference__context }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a':''}) }}",
    "change of a list": "{{ messages.append(1) }}",
    "change of a dictionary": "{{ messages[0].update({'a':1}) }}",
    "bytes": "{{ (1).to_bytes(1000000000,'big') }}",
    "changed text": "{{ 'x'.translate({120: 'y'}) }}",
    "keys of a class": "{{ dict.fromkeys([1]) }}",
    "parts of a method": "{{ 'x'.join.__closure__ }}",
    "parts of a loop": "{% for a in [1] %}{{ loop._iterable }}{% endfor %}",
    "escaping": "{% autoescape true %}x{% endautoescape %}",
    "file": "{% include '/etc/passwd' %}",
    "module": "{% import 'os' as os %}{{ os }}",
}
BROKEN = {
    "syntax": ("{% for %}", "syntax error in line 1"),
    "later line": ("a\nb\n{{ 1 + }}", "syntax error in line 3"),
    "unknown filter": ("{{ 1|frobnicate }}", "No filter named 'frobnicate'"),
    "undefined": ("{{ foo.bar.baz }}", "'foo' is undefined"),
    "type": ("{{ 1 + 'a' }}", "unsupported operand"),
    "refusal": ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "deep expression": ("{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}", "nested too deeply"),
    "deep blocks": ("".join(f"{{% for a{i} in [1] %}}" for i in range(60)) + "{% endfor %}" * 60, "nested blocks"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_are_stopped(name):
    started = time.process_time()
    with pytest.raises(TemplateError, match=r"was stopped: it (runs longer than|makes)"):
        render(ENDLESS[name], seconds=0.1)
    assert time.process_time() - started < 2.8


def test_a_busy_machine_stops_no_template():
    def spends_after_a_pause() -> str:
        time.sleep(0.3)
        current_budget.get().spend()
        return "spent"

    assert run_with_budget(TemplateLimits(seconds=0.2), spends_after_a_pause) == "spent"


@pytest.mark.parametrize("name", HUGE)
def test_huge_values_are_never_made(name):
    started = time.process_time()
    with pytest.raises(TemplateError, match=r"stopped|MAX_RANGE"):
        render(HUGE[name], seconds=0.7)
    assert time.process_time() - started < 4


@pytest.mark.parametrize("name", REACHING)
def test_nothing_can_be_reached(name):
    with pytest.raises(TemplateError, match=r"not allowed|No filter|is undefined|has no attribute"):
        render(REACHING[name])
    assert len(MESSAGES) == 5


@pytest.mark.parametrize("name", BROKEN)
def test_broken_templates_say_where(name):
    source, message = BROKEN[name]
    with pytest.raises(TemplateError, match=message) as caught:
        render(source)
    assert "a test" in str(caught.value)


def test_namespaces_print_as_nothing_deep():
    chain = "{% set n0=namespace(x=1) %}" + "".join(
        f"{{% set n{i}=namespace(a=n{i - 1},b=n{i - 1}) %}}" for i in range(1, 60)
    )
    assert render(chain + "{{ n59 }}") == "namespace"


def test_source_size_is_limited():
    with pytest.raises(TemplateError, match="300000 characters: at most 262144"):
        ChatTemplate({"default": "x" * 300000}, "a file")


def test_a_template_still_works_after_another_was_stopped():
    template = ChatTemplate(
        {"default": "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok"}, "a test"
    )
    template.limits = TemplateLimits(seconds=0.2)
    with pytest.raises(TemplateError):
        template.render({"n": 99999})
    assert template.render({"n": 2}) == "ok"


def test_where_templates_are_found(tmp_path):
    config = {"chat_template": "from the config"}
    assert ChatTemplate.from_directory(tmp_path, {}) is None
    assert ChatTemplate.from_directory(tmp_path, config).render({}) == "from the config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from JSON"}), encoding="utf-8")
    assert ChatTemplate.from_directory(tmp_path, config).render({}) == "from JSON"
    (tmp_path / "chat_template.jinja").write_text("from jinja", encoding="utf-8")
    assert ChatTemplate.from_directory(tmp_path, config).render({}) == "from jinja"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.from_directory(tmp_path, {"chat_template": named})
    assert template.render({}) == "plain"
    assert template.render({"tools": TOOLS}) == "tools"
    only_tools = ChatTemplate.from_directory(tmp_path, {"chat_template": named[1:]})
    with pytest.raises(TemplateError, match="tool_use, but none named 'default'"):
        only_tools.render({})


@pytest.mark.parametrize("value", [5, [1], [{"name": "default"}], {"default": 3}])
def test_malformed_config_entries(tmp_path, value):
    with pytest.raises(EngineDirectoryError, match="expected text, or a list"):
        ChatTemplate.from_directory(tmp_path, {"chat_template": value})


def test_unreadable_files(tmp_path):
    with pytest.raises(TemplateError, match="cannot be read"):
        ChatTemplate.from_file(tmp_path / "missing.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(TemplateError, match="not UTF-8 text: invalid byte 0xe9 at byte offset 3"):
        ChatTemplate.from_file(tmp_path / "latin.jinja")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(TemplateError, match="not valid JSON"):
        ChatTemplate.from_file(tmp_path / "bad.json")
    with pytest.raises(TemplateError, match="holds no template"):
        ChatTemplate({}, "nowhere")
