"""Makes `tests/goldens/policy` with transformers, and lets the action part of pi0 read this package's states.

    PYTHONPATH=.:tests/helpers python tools/goldens/make_policy.py tests/goldens/policy/expected.safetensors

Needs torch and transformers (5.23 or later, which has pi0). The prefix is that of the golden model `paligemma`
(`tests/goldens/image_prompts`): images and a text, each token of which sees all of it. Of what transformers computes
the file holds `keys` and `values` [layers, heads, N, D / 4] and the `hidden_states` [2, N, H / 8] that enter the second
layer and leave the final norm, float32: every 4th and 8th element of a row.

Then pi0, whose PaliGemma has the golden's weights and whose action part is tiny and random, makes its actions of a
noise in 10 steps twice: by its own `sample_actions` of pixels and tokens, and of the rows of this package's NumPy
encoder and runner, as `torch.from_dlpack` sees them where they are. It fails where these differ by more than 1e-3.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from golden_folders import VERSIONS, pack, whole
from golden_images import FOLDER, GoldenModel, prepared_images
from golden_vision import golden_directory, open_vision
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PaliGemmaForConditionalGeneration, PI0Config, PI0ForConditionalGeneration

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import place_media
from edgellm.engines.runners.sampling_state import SamplingValues

STEPS, _SEED = 10, 3800
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def make_pi0(vlm: PaliGemmaForConditionalGeneration) -> PI0ForConditionalGeneration:
    """A tiny pi0 whose action part reads the layers of this PaliGemma."""
    torch.manual_seed(_SEED)
    text = vlm.config.text_config
    shared = {name: getattr(text, name) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")}
    shared |= {"num_attention_heads": text.num_attention_heads, "model_type": "gemma", "initializer_range": 0.2}
    config = PI0Config(
        vlm_config=vlm.config.to_dict(),
        dit_config={**shared, "hidden_size": 32, "intermediate_size": 48},
        chunk_size=6,
        max_state_dim=4,
        max_action_dim=5,
        num_inference_steps=STEPS,
    )
    model = PI0ForConditionalGeneration(config)
    model.model.vlm.load_state_dict(vlm.model.state_dict())
    return model.eval()


def actions(model: PI0ForConditionalGeneration, pairs: Pairs, state: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Actions [1, chunk, dimensions] of keys and values [1, heads, N, D] of each layer: `sample_actions` behind its
    prefix."""
    mask = torch.ones(1, pairs[0][0].shape[2], dtype=torch.long)
    for step in range(STEPS):
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys, values, layer)
        given = {"timestep": torch.full((1,), 1.0 - step / STEPS), "attention_mask": mask, "past_key_values": cache}
        noise = noise - model(state=state, noise=noise, **given).logits / STEPS
    return noise


def own_pairs(golden: GoldenModel) -> Pairs:
    """Keys and values of this package, from pixels on."""
    with tempfile.TemporaryDirectory() as folder:
        directory = golden_directory("paligemma", Path(folder) / "engines", goldens=FOLDER)
        vision = open_vision(open_backend("numpy", directory), directory)
        media = {golden.config.media["image"]: vision.encode(prepared_images(golden))}
    runner, ids = golden.runner(EngineLimits(1, prefill_chunk=32, kv_capacity=96)), golden.token_ids
    runner.start(0, ids, 0, SamplingValues(), place_media(ids, media, golden.config)).wait()
    layers = range(golden.config.num_layers)
    pairs = [runner.states.shared_rows(0, layer, len(ids), None) for layer in layers]
    return [(torch.from_dlpack(keys), torch.from_dlpack(values)) for keys, values in pairs]


@torch.no_grad()
def main(target: Path) -> None:
    """Write the file, and compare actions."""
    golden = GoldenModel("paligemma")
    with whole(golden.path) as complete:
        kind = PaliGemmaForConditionalGeneration
        vlm = kind.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager").eval()
        pixels = load_file(complete / "expected.safetensors")["pixel_values"]
    ids, count = torch.tensor([golden.token_ids]), len(golden.token_ids)
    positions = torch.arange(count)[None]  # as pi0 counts them
    asked = {"token_type_ids": torch.zeros_like(ids), "position_ids": positions, "output_hidden_states": True}
    found = vlm(input_ids=ids, pixel_values=pixels, use_cache=True, **asked)
    theirs, ours = [(layer.keys, layer.values) for layer in found.past_key_values.layers], own_pairs(golden)
    rows = max((a - b).abs().max().item() for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
    pi0 = make_pi0(vlm)
    state, noise = torch.randn(1, pi0.config.max_state_dim), torch.randn(1, pi0.config.chunk_size, 5)
    shown = {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, len(pixels), dtype=torch.bool)}
    own = pi0.sample_actions(state, ids, noise=noise.clone(), attention_mask=torch.ones_like(ids), **shown)
    read = actions(pi0, ours, state, noise)
    other = actions(pi0, [(keys.flip(2), values) for keys, values in theirs], state, noise)
    difference = (own - read).abs().max().item()
    print(f"rows differ by {rows:.2g}, actions by {difference:.2g} (by {(own - other).abs().max():.2g} of other keys)")
    if difference > 1e-3:
        raise SystemExit("the actions differ")
    keys, values = (torch.cat([pair[side] for pair in theirs])[..., ::4].contiguous() for side in (0, 1))
    hidden = torch.cat([found.hidden_states[layer] for layer in (1, golden.config.num_layers)])[..., ::8].contiguous()
    save_file({"keys": keys, "values": values, "hidden_states": hidden}, target, {**VERSIONS})
    pack(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
