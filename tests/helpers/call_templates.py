"""Chat templates that show calls in each format of `edgellm.tool_calls.formats`."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

_ARGUMENTS = "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}"
_PYTHON = "{% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
#: As Gemma 4's template writes values.
_KEYED = (
    "{% macro keyed(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, each in v | dictsort %}{{ k }}:{{ keyed(each) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for each in v %}{{ keyed(each) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
#: How templates write one call `c` of a message.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "{{ c.name }}", "arguments": ' + _ARGUMENTS + "}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "abcdefghi"}]',
    "nemotron": '<TOOLCALL>[{"name": "{{ c.name }}", "arguments": ' + _ARGUMENTS + "}]</TOOLCALL>",
    "mistral_args": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}",
    "gemma4": _KEYED + "<|tool_call>call:{{ c.name }}{{ keyed(c.arguments) }}<tool_call|>",
    "lfm2": "<|tool_call_start|>[{{ c.name }}(" + _PYTHON + ")]<|tool_call_end|>",
    "llama4_pythonic": "<|python_start|>[{{ c.name }}(" + _PYTHON + ")]<|python_end|>",
    "pythonic": "[{{ c.name }}(" + _PYTHON + ")]",
    "llama3_json": '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
}


def call_template(written: str) -> str:
    """A template that tells of tools, and writes each call of a message as `written`."""
    return (
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}, call them as {% raw %}"
        '{"name": NAME, "parameters": {...}}, [name(key="value")]{% endraw %}<|im_end|>\n{% endif %}'
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}" + written + "{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def add_calls(checkpoint: Path) -> None:
    """Give a tiny checkpoint Hermes's template, and the token that begins its calls."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": call_template(WRITTEN["hermes"])}))


#: As LFM2's: tools between marks, and in messages their text alone; calls are part of it.
WITHOUT_CALLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<|tool_response_start|>{{ m.content }}<|tool_response_end|>{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Qwen3.5's: an answer begins within its reasoning, but where thinking is switched off.
THINKING = call_template(WRITTEN["qwen3_coder"])[: -len("{% endif %}")] + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
