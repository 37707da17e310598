"""Text that the base itself writes, for the training of its draft head: continuations of texts and open lines."""

import random

import numpy as np
import torch

from tools.demo_model.documents import CONTEXT, FIRST, TEXT, Material, pack
from tools.demo_model.model import Model
from tools.demo_model.system_prompt import DEFAULT_SYSTEM_PROMPT
from tools.demo_model.vocabulary import END, PAD, TEXT_END, render


def beginnings(material: Material, rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Token ids to go on from: the first `length` of open texts, and open lines in the chat format, in turn."""
    found: list[list[int]] = []
    while len(found) < count:
        if len(found) % 2:
            ids = material.tokenizer.encode(rng.choice(material.texts)).ids[:length]
        else:
            line = rng.choice(material.utterances) if rng.random() < 0.5 else rng.choice(material.facts)[0]
            messages = [{"role": "user", "content": line}]
            if rng.random() < 0.3:
                messages.insert(0, {"role": "system", "content": DEFAULT_SYSTEM_PROMPT})
            ids = material.tokenizer.encode(render(messages, True)).ids
        if len(ids) <= 4 * length:
            found.append(ids)
    return found


@torch.no_grad()
def continued(model: Model, prompts: list[list[int]], tokens: int, greedy: float, generator: torch.Generator, ends):
    """`tokens` more ids for each prompt, cut behind the first of `ends`; a share `greedy` of the prompts is continued
    greedily, the rest sampled at temperature 1. All tokens are recomputed for each new one: for a few thousand prompts.
    """
    device = model.model.embed_tokens.weight.device
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + tokens, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    sampled = torch.rand(len(prompts), generator=generator, device=device) >= greedy
    for step in range(tokens):
        places = lengths + step
        hidden = model(ids[:, : int(places.max())])
        logits = model.logits(hidden[rows, places - 1]).float()
        drawn = logits.softmax(-1).multinomial(1, generator=generator).squeeze(1)
        ids[rows, places] = torch.where(sampled, drawn, logits.argmax(-1))
    result = []
    for row, prompt in zip(ids.tolist(), prompts, strict=True):
        new = row[len(prompt) : len(prompt) + tokens]
        stop = next((i + 1 for i, token in enumerate(new) if token in ends), tokens)
        result.append(new[:stop])
    return result


def continuation_rows(
    model: Model, material: Material, seed: str, count: int, tokens: int, batch: int = 512
) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows (tokens, codes) of `count` documents: a beginning as context, what the model makes of it as text."""
    rng = random.Random(seed)
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(rng.getrandbits(32))
    ends = {material.tokenizer.token_to_id(token) for token in (END, TEXT_END)}
    prompts = sorted(beginnings(material, rng, count, 48), key=len)
    parts = []
    for first in range(0, count, batch):
        group = prompts[first : first + batch]
        for prompt, new in zip(group, continued(model, group, tokens, 0.5, generator, ends), strict=True):
            codes = np.full(len(prompt) + len(new), TEXT, np.uint8)
            codes[: len(prompt)] = CONTEXT
            codes[0] += FIRST
            parts.append((np.asarray(prompt + new, np.uint16), codes))
    return pack(parts, material.tokenizer.token_to_id(PAD))
