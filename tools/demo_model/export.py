"""Write a model directory in the published layout: fp16 weights, configuration, tokenizer, chat template.

Usage: python -m tools.demo_model.export --work DIR --to DIR [--check]
`--check` compares the logits with the transformers library and reports the greatest activation in fp32.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.demo_model.model import Dimensions, Model, load_model
from tools.demo_model.system_prompt import DEFAULT_SYSTEM_PROMPT, PICTURE_SYSTEM_PROMPT
from tools.demo_model.vocabulary import CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, TEXT_END, load_vocabulary, render

RESULTS = Path(__file__).parent / "results"


def configuration(d: Dimensions, ids: dict[str, int]) -> dict:
    """config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float16",
        **asdict(d),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": d.num_hidden_layers,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }


def write_directory(weights: Path, work: Path, target: Path, dimensions: Dimensions) -> None:
    """Everything but the model card."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = load_vocabulary(work)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    shutil.copyfile(work / "tokenizer.json", target / "tokenizer.json")
    state = {name: value.to(torch.float16).contiguous() for name, value in load_file(weights).items()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)

    def write(name: str, content: dict) -> None:
        (target / name).write_text(json.dumps(content, indent=2) + "\n")

    write("config.json", configuration(dimensions, ids))
    write(
        "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.3,
            "top_k": 20,
            "top_p": 0.95,
            "repetition_penalty": 1.0,
            "eos_token_id": [ids[END], ids[TEXT_END]],
            "pad_token_id": ids[PAD],
            "max_new_tokens": 256,
        },
    )
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": dimensions.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": END,
            "pad_token": PAD,
            "unk_token": None,
            "additional_special_tokens": SPECIAL_TOKENS[1:],
            "added_tokens_decoder": {
                str(i): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for token, i in ids.items()
            },
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (target / "system_prompt.txt").write_text(DEFAULT_SYSTEM_PROMPT + "\n")
    (target / "system_prompt_image.txt").write_text(PICTURE_SYSTEM_PROMPT + "\n")


def sample_ids(directory: Path) -> torch.Tensor:
    """A short dialogue with the default system prompt [1, T]."""
    messages = [
        {"role": "system", "content": DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": "Where is the red cup?"},
    ]
    return torch.tensor([load_vocabulary(directory).encode(render(messages, True)).ids])


@torch.no_grad()
def greatest_activation(model: Model, ids: torch.Tensor) -> float:
    """The greatest magnitude that any module of the network puts out."""
    found = [0.0]
    hooks = [m.register_forward_hook(lambda _m, _i, out: found.append(out.abs().max().item())) for m in model.modules()]
    model.logits(model(ids))
    for hook in hooks:
        hook.remove()
    return max(found)


@torch.no_grad()
def check(directory: Path) -> dict[str, float]:
    """Compare with transformers, in fp32 and fp16, and find the greatest activation."""
    import transformers

    ids = sample_ids(directory)
    own = load_model(directory)
    ours = own.logits(own(ids))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
    half = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16)(ids).logits.float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [
        {"role": "system", "content": DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": "Where is the red cup?"},
    ]
    same = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids[0].tolist()
    return {
        "chat template gives the same ids": float(same),
        "greatest difference to transformers, fp32": (ours - theirs).abs().max().item(),
        "greatest difference of fp16 to fp32": (half - theirs).abs().max().item(),
        "greatest logit": theirs.abs().max().item(),
        "greatest activation": greatest_activation(own, ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--dimensions", type=json.loads, default={})
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--record", action="store_true", help="keep the check and the training record for the model card"
    )
    arguments = parser.parse_args()
    write_directory(
        arguments.work / "model.safetensors", arguments.work, arguments.to, Dimensions(**arguments.dimensions)
    )
    if arguments.check:
        found = json.dumps(check(arguments.to), indent=1)
        print(found)
        if arguments.record:
            (RESULTS / "checks.json").write_text(found + "\n")
            stage = json.loads((arguments.work / "training.json").read_text())
            (RESULTS / "training.json").write_text(json.dumps({"stages": [stage]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
