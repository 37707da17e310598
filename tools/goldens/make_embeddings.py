"""Makes the golden files of `tests/goldens/embedding` with transformers and sentence-transformers.

    python tools/goldens/make_embeddings.py tests/goldens/embedding

Needs torch, transformers (5.0 or later) and sentence-transformers (6.0 or later). `published` is an embedding model
with the files of Qwen3-Embedding, its random weights only described (`tests/helpers/golden_files.py`), tied, and named
as a model with a head; `newer` has those files that are others where sentence-transformers writes a model now, one that
is not tied and has no head. `expected.safetensors` holds `embeddings` [N, H] float32, which sentence-transformers makes
of the texts in `texts.json` in one padded batch, `queries` [N, H], the same with the prompt "query", `token_ids` [T]
int64, and of `last_states` [T, H] a share: of its first 1 to T tokens the last hidden state behind the final norm, of
length 1.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import sentence_transformers
import torch
from golden_folders import VERSIONS, draw_tensors, pack, whole, with_shares, write_folders
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

PROMPTS = {"query": "Instruct: Find what answers the query\nQuery:", "document": ""}
TEXTS = ["Where is the red cup?", "The red cup is on the table.", "", "x", "¿Qué? 日本", "A longer text. " * 5]
TOKENS, HIDDEN, _SEED = 70, 32, 3400
_SIZES = {
    "vocab_size": 272,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
}
_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a token that ends every text, by the post-processor alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    ending = processors.TemplateProcessing("$A <|endoftext|>", special_tokens=[("<|endoftext|>", len(alphabet))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ending])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def save(directory: Path, is_tied: bool) -> None:
    """A model of the family, as the packages write one."""
    torch.manual_seed(_SEED)
    Qwen3Model(Qwen3Config(**_SIZES, tie_word_embeddings=is_tied)).to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    layers = [Transformer(str(directory)), Pooling(HIDDEN, "lasttoken"), Normalize()]
    SentenceTransformer(modules=layers, prompts=PROMPTS).save(str(directory), create_model_card=False)
    shutil.rmtree(directory / "2_Normalize")  # it says nothing
    (directory / "sentence_bert_config.json").unlink()


def make_newer(directory: Path) -> None:
    """What is written of a model now, where that is not as it was published."""
    save(directory, False)
    for path in directory.iterdir():
        if path.is_file() and path.name not in ("config.json", "modules.json"):
            path.unlink()


def make_published(directory: Path) -> None:
    """Write the checkpoint and what the packages compute with it."""
    save(directory, True)
    rewrite_as_published(directory)
    draw_tensors(directory / "model.safetensors", _SEED, 0.3)
    write_json(directory / "texts.json", TEXTS)
    with whole(directory) as complete:
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        encoder = SentenceTransformer(str(complete), device="cpu", model_kwargs=options)
        embed = partial(encoder.encode, TEXTS, batch_size=len(TEXTS), convert_to_tensor=True)
        expected = {"embeddings": embed(), "queries": embed(prompt_name="query")}
        expected |= last_states(Qwen3Model.from_pretrained(complete, **options))
    expected = {key: each.contiguous() for key, each in expected.items()}
    versions = VERSIONS | {"sentence_transformers": sentence_transformers.__version__}
    save_file(expected, directory / "expected.safetensors", metadata=versions)
    pack(directory / "tokenizer.json")


@torch.no_grad()
def last_states(model: Qwen3Model) -> dict[str, torch.Tensor]:
    """A text of `TOKENS` tokens, and what is stored of its states; those of shorter texts in a padded batch agree."""
    token_ids = torch.randint(0, 256, (TOKENS,))
    states = model(token_ids[None]).last_hidden_state[0]
    lengths = (1, 2, 33, TOKENS)
    padded = torch.stack([torch.cat((torch.zeros(TOKENS - each).long(), token_ids[:each])) for each in lengths])
    mask = torch.stack([(torch.arange(TOKENS) >= TOKENS - each).long() for each in lengths])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = model(padded, attention_mask=mask, position_ids=positions).last_hidden_state[:, -1]
    difference = (batch - states[[each - 1 for each in lengths]]).abs().max()
    assert difference < 1e-4, difference
    states = torch.nn.functional.normalize(states, dim=-1)
    return with_shares({"token_ids": token_ids, "last_states": states}, "last_states")


def rewrite_as_published(directory: Path) -> None:
    """The files of Qwen3-Embedding: the architecture with a head, modules by their earlier names, a switch for each
    pooling."""
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    rope = config.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    write_json(directory / "config.json", config | old | {"transformers_version": "4.51.3"})
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(zip(_MODULES, paths, strict=True))
    ]
    write_json(directory / "modules.json", modules)
    pooling = {f"pooling_mode_{each}": each == "lasttoken" for each in _POOLINGS}
    write_json(
        directory / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **pooling, "include_prompt": True}
    )


def write_json(path: Path, value: object) -> None:
    """A file of JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False))


if __name__ == "__main__":
    write_folders(__doc__, {"published": make_published, "newer": make_newer})
