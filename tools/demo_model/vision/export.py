"""Write the eyes in the published LLaVA layout: fp16 weights, configuration, preprocessing.

Usage: python -m tools.demo_model.vision.export --weights DIR/eyes.safetensors --base edgellm/shipped
    --to edgellm/shipped/vision [--check]
`--check` compares the rows with the transformers library, in fp32 and fp16, and reports the greatest activation.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.demo_model.vision.dialogues import PICTURE
from tools.demo_model.vision.network import Eyes, Sizes
from tools.demo_model.vocabulary import load_vocabulary

RESULTS = Path(__file__).parent.parent / "results"
EYES = "eyes."


def sizes_of(state: dict[str, torch.Tensor]) -> Sizes:
    """The sizes that the trained tensors (`eyes.*`) have; everything else is as shipped."""
    tower = f"{EYES}vision_tower."
    inner, hidden = state[f"{tower}encoder.layers.0.mlp.fc1.weight"].shape
    layers = {int(name.split(".")[4]) for name in state if name.startswith(f"{tower}encoder.layers.")}
    return Sizes(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=len(layers))


def published(state: dict[str, torch.Tensor], sizes: Sizes) -> dict[str, torch.Tensor]:
    """The tensors by their published names, fp16; the norm after the last layer is there and not used."""
    tensors = {f"model.{name.removeprefix(EYES)}": value for name, value in state.items() if name.startswith(EYES)}
    tower = "model.vision_tower."
    patch = f"{tower}embeddings.patch_embedding.weight"
    tensors[patch] = tensors[patch].view(sizes.hidden_size, 3, sizes.patch_size, sizes.patch_size)
    tensors[f"{tower}post_layernorm.weight"] = torch.ones(sizes.hidden_size)
    tensors[f"{tower}post_layernorm.bias"] = torch.zeros(sizes.hidden_size)
    return {name: value.half().contiguous() for name, value in sorted(tensors.items())}


def configuration(sizes: Sizes, text: dict, image: int) -> dict:
    """config.json."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float16",
        "image_token_index": image,
        "image_seq_length": sizes.patches,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.num_hidden_layers,
            "num_attention_heads": sizes.num_attention_heads,
            "num_channels": 3,
            "image_size": sizes.image_size,
            "patch_size": sizes.patch_size,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": sizes.layer_norm_eps,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        },
    }


def preprocessing(sizes: Sizes) -> dict:
    """preprocessor_config.json."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True,
        "size": {"height": sizes.image_size, "width": sizes.image_size},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }


def write_directory(state: dict[str, torch.Tensor], base: Path, target: Path) -> None:
    """Write `config.json`, `preprocessor_config.json` and `model.safetensors`."""
    target.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(state)
    text = json.loads((base / "config.json").read_text())
    image = load_vocabulary(base).token_to_id(PICTURE)
    for name, content in (
        ("config.json", configuration(sizes, text, image)),
        ("preprocessor_config.json", preprocessing(sizes)),
    ):
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    save_file(published(state, sizes), target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)


def load_eyes(state: dict[str, torch.Tensor], out: int) -> Eyes:
    """The trained eyes in PyTorch."""
    eyes = Eyes(sizes_of(state), out)
    eyes.load_state_dict({name.removeprefix(EYES): value.float() for name, value in state.items() if EYES in name[:5]})
    return eyes.eval()


@torch.no_grad()
def check(state: dict[str, torch.Tensor], target: Path) -> dict[str, float]:
    """Compare rows of two random pictures with transformers, in fp32 and fp16, and find the greatest activation."""
    import transformers

    config = transformers.LlavaConfig(**json.loads((target / "config.json").read_text()))
    pictures = torch.randint(0, 256, (2, 3, 144, 144), generator=torch.Generator().manual_seed(1)).float()
    eyes = load_eyes({k: v.half().float() for k, v in state.items()}, config.text_config.hidden_size)
    _, ours = eyes(pictures)
    theirs = {}
    tensors = load_file(target / "model.safetensors")
    for dtype in (torch.float32, torch.float16):
        model = transformers.LlavaForConditionalGeneration(config).to(dtype).eval()
        missing, unexpected = model.load_state_dict({k: v.to(dtype) for k, v in tensors.items()}, strict=False)
        wrong = [name for name in missing if "language_model" not in name and name != "lm_head.weight"] + unexpected
        if wrong:
            raise ValueError(f"transformers knows other tensors: {wrong}")
        found = [0.0]
        for module in [*model.model.vision_tower.modules(), *model.model.multi_modal_projector.modules()]:
            module.register_forward_hook(
                lambda _m, _i, out, found=found: (
                    found.append(out.abs().max().item()) if isinstance(out, torch.Tensor) else None
                )
            )
        features = model.model.get_image_features(pixel_values=((pictures - 127.5) / 127.5).to(dtype))
        rows = features.pooler_output if hasattr(features, "pooler_output") else features
        theirs[dtype] = torch.stack(list(rows)).float(), max(found)
    return {
        "greatest difference to transformers, fp32": (ours - theirs[torch.float32][0]).abs().max().item(),
        "greatest difference of fp16 to fp32": (theirs[torch.float16][0] - theirs[torch.float32][0]).abs().max().item(),
        "greatest row element": ours.abs().max().item(),
        "greatest activation": theirs[torch.float32][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="what training wrote")
    parser.add_argument("--base", type=Path, required=True, help="the model directory")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    state = load_file(arguments.weights)
    write_directory(state, arguments.base, arguments.to)
    if arguments.check:
        found = check(state, arguments.to)
        print(json.dumps(found, indent=1))
        (RESULTS / "eyes_checks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
