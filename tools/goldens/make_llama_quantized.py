"""Holds the reading of GGUF files to llama.cpp's own quantizer, and our greedy texts to its own.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py python tools/goldens/make_llama_quantized.py BUILD/bin \\
        --golden tests/goldens/gguf --table TABLE.md --published MODEL.gguf

BUILD/bin has `llama-quantize` and `llama-simple` of the llama.cpp that the converter is of. A random Llama is
converted, and quantized to each type; compared are the values that we decode with gguf-py's, bit by bit, and our NumPy
logits with those of transformers on gguf-py's values. The golden is one such file, smaller, and these logits of it.
With a published model also texts: what `llama-simple` and the NumPy backend put behind some prompts, greedily.
"""

from __future__ import annotations

import argparse
import copy
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_folders import VERSIONS, pack, randomize_vectors
from llama_cpp import convert, dequantized, our_reading, transformers_logits, types, write_dequantized, write_tokenizer
from safetensors.numpy import save_file

from edgellm import LLM

#: As `llama-quantize` is asked for them; MXFP4 is for experts, unless layers are named.
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"), ()),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4_MOE"), ()),
    "Q4_0, MXFP4 in ffn": ("--tensor-type", "ffn_.*=mxfp4"),
}
LARGE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
#: Whose matrices have 256 columns or, where no type of 256 fits, 32.
SMALL = LARGE | {
    **{"vocab_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
}
#: So many rows of a matrix of the golden are not the same as others, so that little of it is stored.
_DIFFERENT_ROWS = 10
LENGTH = 12
PROMPTS = (
    "What is the capital of France?",
    "Name three fruits that are red.",
    "Say hello in Spanish, French and German.",
    "Explain in simple words why the sky is blue.",
    "List the planets of the solar system.",
)


def write_dense(settings: dict[str, Any], place: Path) -> tuple[Any, Path]:
    """A random Llama, and its GGUF file of 16 bits."""
    torch.manual_seed(33)
    config = transformers.LlamaConfig(
        **settings, max_position_embeddings=64, initializer_range=0.1, bos_token_id=1, eos_token_id=2
    )
    place.mkdir()
    model = transformers.LlamaForCausalLM(config)
    randomize_vectors(model.named_parameters())
    if settings is SMALL:
        with torch.no_grad():
            for matrix in model.parameters():
                if matrix.ndim == 2:
                    matrix.copy_(matrix[torch.randint(0, _DIFFERENT_ROWS, (len(matrix),))])
    model.half().save_pretrained(place / "model")
    write_tokenizer(place / "model")
    again = transformers.LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    return again.eval(), convert(place / "model", "f16", place / "dense.gguf")


def with_values(model: Any, values: dict[str, np.ndarray]) -> Any:
    """The model with a file's values, by published names: rows of q and k in two halves, not in pairs."""
    config, state = model.config, {}
    for name, tensor in model.state_dict().items():
        stored = _names(name)
        if stored not in values:  # a head that is the embedding
            stored = "token_embd.weight"
        found = torch.tensor(values[stored], dtype=torch.float32)
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(stored[-8])
        if "attn_" in stored and "norm" not in stored and heads and stored.endswith(("q.weight", "k.weight")):
            found = found.reshape(heads, -1, 2, found.shape[1]).transpose(1, 2).reshape(found.shape)
        assert found.shape == tensor.shape
        state[name] = found
    model.load_state_dict(state)
    return model


def _names(name: str) -> str:
    """The name in a file of what transformers calls `name`."""
    renamed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in renamed:
        return f"{renamed[module]}.weight"
    layer, inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module).groups()
    own = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    inner = own.get(inner) or re.sub(r".*\.(\w+)_proj", ("attn_" if "self_attn" in inner else "ffn_") + r"\1", inner)
    return f"blk.{layer}.{inner}.weight"


def quantize(bin_folder: Path, dense: Path, kind: str, place: Path) -> Path:
    """The file in the type `kind`, one of `KINDS`."""
    target = place / f"{kind.replace(' ', '_').replace('*', '')}.gguf"
    command = [bin_folder / "llama-quantize", *KINDS[kind], dense, target, kind.partition(",")[0], "1"]
    subprocess.run(command, check=True, capture_output=True)
    return target


def compare(kind: str, file: Path, model: Any, place: Path) -> tuple[str, dict[str, np.ndarray]]:
    """A line of the table, and tokens with transformers' logits."""
    token_ids = np.random.default_rng(6).integers(3, model.config.vocab_size, (1, LENGTH))
    place.mkdir()
    expected = transformers_logits(with_values(copy.deepcopy(model), dequantized(file)), token_ids)
    found, ours = our_reading(file, token_ids, place / "packed")
    _, theirs = our_reading(write_dequantized(file, place / "values.gguf"), token_ids, place / "values")
    same = sum(np.array_equal(np.asarray(ours[name]), theirs[name]) for name in theirs)
    kinds = Counter(types(file).values()).most_common()
    counts = ", ".join(f"{count} {name}" for name, count in kinds if name != "F32")
    far, lost = (np.abs(found - each).max() for each in (expected, transformers_logits(model, token_ids)))
    line = f"| {kind} | {counts} | {same} of {len(theirs)} | {far:.1e} | {lost:.2g} |"
    return line, {"token_ids": token_ids, "logits": expected}


def same_texts(bin_folder: Path, file: Path, count: int, place: Path) -> list[str]:
    """A line for each prompt: whether `count` tokens behind it are the same text, by llama.cpp's sums over activations
    of 8 bits, and by those over the same values as float32."""
    wide = place / "float32.gguf"
    subprocess.run([bin_folder / "llama-quantize", "--allow-requantize", file, wide, "F32", "2"], check=True)
    lines = []
    with LLM(file, backend="numpy", build={"kv_capacity": 256}) as model:
        for prompt in PROMPTS:
            asked = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            ours = model.generate(asked, temperature=0.0, max_tokens=count)
            found = []
            for each in (file, wide):
                command = [bin_folder / "llama-simple", "-m", each, "-n", str(count), asked]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found.append(_agreement(ours.text.strip(), said.partition("assistant\n")[2].strip()))
            lines.append(f"| {prompt} | {len(ours.token_ids)} | {' | '.join(found)} |")
            print(lines[-1], flush=True)
    return lines


def _agreement(ours: str, theirs: str) -> str:
    if ours == theirs:
        return "the same text"
    pairs = enumerate(zip(ours, theirs, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    there, here = (text[same : same + 20] for text in (theirs, ours))
    return f"the same up to character {same} of {len(theirs)}: {there!r}, here {here!r}"


HEAD = """| Asked for | tensors | values equal to gguf-py's | logits against transformers | against those unquantized |
|---|---|---:|---:|---:|"""


def main() -> None:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=Path)
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--published", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if arguments.golden:
            model, dense = write_dense(SMALL, place / "small")
            file = quantize(arguments.bin, dense, "Q4_K_M", place)
            line, expected = compare("Q4_K_M, small", file, model, place / "golden")
            print(line, len(file.read_bytes()))
            pack(Path(shutil.copy(file, arguments.golden / "llama_q4_k_m.gguf")))
            save_file(expected, arguments.golden / "llama_q4_k_m.safetensors", metadata=VERSIONS)
        if arguments.table:
            model, dense = write_dense(LARGE, place / "large")
            lines.append(HEAD)
            for number, kind in enumerate(KINDS):
                lines.append(compare(kind, quantize(arguments.bin, dense, kind, place), model, place / str(number))[0])
                print(lines[-1], flush=True)
    if arguments.published:
        lines += [
            "",
            "| Prompt | tokens | llama.cpp, the file | llama.cpp, its values as float32 |",
            "|---|---:|---|---|",
        ]
        with tempfile.TemporaryDirectory() as folder:
            lines += same_texts(arguments.bin, arguments.published, arguments.tokens, Path(folder))
    if arguments.table:
        arguments.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
