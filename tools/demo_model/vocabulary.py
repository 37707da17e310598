"""The vocabulary: byte-level BPE of 4,096 entries, digits one by one, special tokens first; and the chat format."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 4096
PAD, START, END, TEXT_END = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
NAMED = [PAD, START, END, TEXT_END, "<|image|>", "<|image_start|>", "<|image_end|>"]
SPECIAL_TOKENS = NAMED + [f"<|reserved_{index}|>" for index in range(48 - len(NAMED))]
TOOLS_BEGIN = "# Tools\n<tools>"
TOOLS_END = """</tools>
To call a tool, answer
<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>"""
CHAT_TEMPLATE = (
    "{% set signatures %}{% if tools %}"
    f"{{{{ {TOOLS_BEGIN!r} }}}}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    f"{{{{ {chr(10) + TOOLS_END!r} }}}}"
    "{% endif %}{% endset %}"
    "{% for message in messages %}"
    "{% if loop.first and tools and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\n' + signatures + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% if message['content'] is string %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ '<tool_response>\n' if message['role'] == 'tool' else '' }}"
    "{{ message['content'] }}"
    "{% else %}"  # parts: every picture is a system message of its own, before the message
    "{% for part in message['content'] or [] %}{% if part['type'] in ('image', 'image_url') %}"
    "{{ '<|im_start|>system\n<|image|><|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ '<tool_response>\n' if message['role'] == 'tool' else '' }}"
    "{% for part in message['content'] or [] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ '\n</tool_response>' if message['role'] == 'tool' else '' }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] %}"
    "{{ '\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": ' + function['name'] | tojson + ', \"arguments\": ' }}"
    "{{ function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '\n\n' + signatures if loop.first and tools and message['role'] == 'system' else '' }}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_vocabulary(texts: Iterable[str]) -> Tokenizer:
    """Train on plain texts (without special tokens). All 256 bytes are in the alphabet: any UTF-8 text is encodable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != SIZE:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} entries, not {SIZE}: train on more text")
    return tokenizer


def load_vocabulary(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def written_call(name: str, arguments: str) -> str:
    """A call as Hermes models write it; `arguments` is JSON text."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def written_answer(message: Mapping[str, Any]) -> str:
    """What an assistant's message says, and its calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [written_call(call["name"], call["arguments"]) for call in calls]
    return "\n".join([message["content"]] * bool(message["content"]) + written)


def render(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The chat template in Python, for contents that are text; `tests/tools` hold it against the jinja one."""
    signatures = "\n".join([TOOLS_BEGIN, *(json.dumps(tool, ensure_ascii=False) for tool in tools or ()), TOOLS_END])
    texts = []
    for place, message in enumerate(messages):
        text = written_answer(message)
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if place == 0 and tools:
            if message["role"] == "system":
                text += f"\n\n{signatures}"
            else:
                texts.append(f"{START}system\n{signatures}{END}\n")
        texts.append(f"{START}{message['role']}\n{text}{END}\n")
    return "".join(texts) + (f"{START}assistant\n" if add_generation_prompt else "")
