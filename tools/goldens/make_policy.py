"""Makes `tests/goldens/policy` with transformers, and lets an action part read this package's states.

    PYTHONPATH=.:tests/helpers python tools/goldens/make_policy.py tests/goldens/policy/expected.safetensors

Needs torch and transformers (5.23 or later, which has pi0). The prompt is that of the golden model `gemma`
(`tests/goldens/decoder`), Gemma's architecture, on which PaliGemma and so pi0 stand. The file holds `token_ids` [N] and
of transformers' `past_key_values` `keys` and `values` [layers, heads, N, D / 64] float32: every 64th element of a row.

Then the action part of pi0, tiny and with random weights, makes its actions of a noise in 10 steps twice: of the cache
that transformers made, and of the rows of this package's NumPy runner as `torch.from_dlpack` sees them where they are.
It fails where these differ by more than 1e-3. The prefix is one of text, causal as Gemma computes it: pi0's own, whose
tokens all see each other, needs PaliGemma.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from golden_answers import GOLDENS, make_runner
from golden_folders import VERSIONS, pack
from safetensors.torch import save_file
from transformers import DynamicCache, GemmaForCausalLM, PI0Config, PI0ForConditionalGeneration

from edgellm.engines.runners.sampling_state import SamplingValues

EVERY = 64
STEPS, _SEED = 10, 3800


def cache_of(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """A cache of keys and values [1, heads, N, D] of each layer."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer)
    return cache


def make_pi0(text: dict) -> PI0ForConditionalGeneration:
    """A tiny pi0 whose action part reads the layers of a Gemma with the configuration `text`."""
    torch.manual_seed(_SEED)
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "vision_use_head": False}
    shared = {key: text[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim", "num_attention_heads")}
    expert = {**shared, "model_type": "gemma", "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    config = PI0Config(
        vlm_config={"model_type": "paligemma", "text_config": text, "vision_config": vision, "projection_dim": 16},
        dit_config=expert,
        chunk_size=6,
        max_state_dim=4,
        max_action_dim=5,
        num_inference_steps=STEPS,
    )
    return PI0ForConditionalGeneration(config).eval()


@torch.no_grad()
def actions(model: PI0ForConditionalGeneration, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Actions [1, chunk, dimensions] of a fixed noise and state: `sample_actions` behind its prefix."""
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(1, model.config.chunk_size, model.config.max_action_dim, generator=generator)
    state = torch.randn(1, model.config.max_state_dim, generator=generator)
    mask = torch.ones(1, pairs[0][0].shape[2], dtype=torch.long)
    for step in range(STEPS):
        time = torch.full((1,), 1.0 - step / STEPS)
        velocity = model(
            state=state, noise=noise, timestep=time, attention_mask=mask, past_key_values=cache_of(pairs)
        ).logits
        noise = noise - velocity / STEPS
    return noise


def main(target: Path) -> None:
    """Write the file, and compare actions."""
    folder = GOLDENS / "gemma"
    gemma = GemmaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    runner = make_runner("gemma")
    ids = [int(each) for each in torch.arange(24) * 7 % 77 + 3]
    with torch.no_grad():
        cache = gemma(torch.tensor([ids]), use_cache=True).past_key_values
    theirs = [(layer.keys, layer.values) for layer in cache.layers]
    runner.start(0, ids, 0, SamplingValues()).wait()
    runner.stop(0)
    states = [runner.base.states.shared_rows(0, layer, len(ids), None) for layer in range(len(theirs))]
    ours = [(torch.from_dlpack(keys), torch.from_dlpack(values)) for keys, values in states]
    rows = max((a - b).abs().max().item() for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
    pi0 = make_pi0(json.loads((folder / "config.json").read_text()))
    own, read = actions(pi0, theirs), actions(pi0, ours)
    other = actions(pi0, [(keys.flip(2), values) for keys, values in theirs])
    difference = (own - read).abs().max().item()
    print(f"rows differ by {rows:.2g}, actions by {difference:.2g} (by {(own - other).abs().max():.2g} of other keys)")
    if difference > 1e-3:
        raise SystemExit("the actions differ")
    found = [torch.cat([pair[side] for pair in theirs])[..., ::EVERY].contiguous() for side in (0, 1)]
    save_file({"token_ids": torch.tensor(ids), "keys": found[0], "values": found[1]}, target, {**VERSIONS})
    pack(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
