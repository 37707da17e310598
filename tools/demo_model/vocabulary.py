"""The vocabulary: byte-level BPE of 4,096 entries, digits one by one, special tokens first; and the chat format."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 4096
PAD, START, END, TEXT_END = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
NAMED = [PAD, START, END, TEXT_END, "<|image|>", "<|image_start|>", "<|image_end|>"]
SPECIAL_TOKENS = NAMED + [f"<|reserved_{index}|>" for index in range(48 - len(NAMED))]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% else %}"  # parts: every picture is a system message of its own, before the message
    "{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}"
    "{{ '<|im_start|>system\n<|image|><|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
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


def render(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """The chat template in Python; `tests/tools/test_demo_model.py` holds it against the jinja one."""
    text = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return text + (f"{START}assistant\n" if add_generation_prompt else "")
