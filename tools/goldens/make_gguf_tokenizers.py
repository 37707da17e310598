"""A small SentencePiece model as llama.cpp's converter writes it into GGUF files, and the ids that it makes of texts.

Run with sentencepiece (0.2.3 here): python tools/goldens/make_gguf_tokenizers.py tests/goldens/gguf/pieces.json
Two variants: with a space before each text, as Llama's and Mistral's, and without, as Gemma's, which has pieces of
several spaces that are defined by hand.
"""

from __future__ import annotations

import io
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import sentencepiece

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_files import pack

#: Words of several scripts, digits, marks, and what no piece has.
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the other foxes jumped after it.",
    "Every quantity that is quoted was quoted quickly; the questions were quite queer.",
    "Die Straße führt über die Brücke, und über der Straße fliegen die Vögel.",
    "Съешь же ещё этих мягких французских булок, да выпей же чаю.",
    "今日は良い天気ですね。散歩に行きましょう。",
    "def add(first, second):\n    return first + second\n",
    "1234567890 12 345 6,789.01",
    "naïve café, déjà vu — “quotes” … and 😀 emoji 👩‍👩‍👧",
    "  two spaces,   three spaces    four",
    "مرحبا بالعالم",
    "",
    " ",
    "\n\n\n",
    "<s>not a token</s>",
)


def trained(prefixed: bool) -> dict[str, Any]:
    """Pieces, scores and types as the metadata has them, and the ids of each text without BOS."""
    model, own = io.BytesIO(), [] if prefixed else ["▁▁", "▁▁▁", "\n\n"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        add_dummy_prefix=prefixed,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        user_defined_symbols=own,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = []
    for index in range(processor.vocab_size()):
        is_own = processor.id_to_piece(index) in own
        kinds.append(
            2 if processor.is_unknown(index) else 3 if processor.is_control(index) else 4 if is_own
            else 6 if processor.is_byte(index) else 1
        )  # fmt: skip
    pieces = [processor.id_to_piece(index) for index in range(processor.vocab_size())]
    # The converter writes pieces of spaces that were defined by hand with spaces.
    tokens = [piece.replace("▁", " ") if kind == 4 else piece for piece, kind in zip(pieces, kinds, strict=True)]
    return {
        "tokens": tokens,
        "scores": [processor.get_score(index) for index in range(processor.vocab_size())],
        "token_type": kinds,
        "unknown_token_id": processor.unk_id(),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "add_space_prefix": prefixed,
        "ids": [processor.encode(text) for text in TEXTS],
    }


def main(target: str) -> None:
    """Write both variants."""
    found = {"prefixed": trained(True), "plain": trained(False), "texts": TEXTS}
    found["sentencepiece"] = metadata.version("sentencepiece")
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    Path(target).write_text(f"{text}\n", encoding="utf-8")
    pack(Path(target))


if __name__ == "__main__":
    main(sys.argv[1])
