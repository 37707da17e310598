"""The frozen language model that reads rows of pictures: its loss on answers, and exact match on held-out items."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.demo_model.model import Model
from tools.demo_model.vision.documents import render_seen
from tools.demo_model.vision.layout import cells_of
from tools.demo_model.vision.sparing import Sparing
from tools.demo_model.vocabulary import END


def with_pictures(model: Model, tokens: torch.Tensor, rows: torch.Tensor, image: int) -> torch.Tensor:
    """Embeddings [B, T, H] of tokens [B, T] with rows [M, 81, H] in order at the tokens `image`."""
    places = tokens == image
    number = (places.flatten().cumsum(0) - 1).clamp(min=0, max=rows.shape[0] * rows.shape[1] - 1).view(tokens.shape)
    embedded = model.model.embed_tokens(tokens)
    return torch.where(places[..., None], rows.flatten(0, 1)[number].to(embedded.dtype), embedded)


def answer_loss(model: Model, tokens, answers, rows, image: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of the answers' tokens, and the share of them that is the most probable one."""
    hidden, _ = model.from_embeddings(with_pictures(model, tokens, rows, image))
    return spoken_loss(model, hidden, tokens, answers)


def spoken_loss(
    model: Model, hidden, tokens, answers, sparing: Sparing | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`answer_loss` from the hidden states [B, T, H]."""
    row, place = answers[:, 1:].nonzero(as_tuple=True)
    logits = model.logits(hidden[row, place]).float()
    targets = tokens[row, place + 1]
    right = (logits.detach().argmax(-1) == targets).float().mean()
    if sparing is not None:
        after = tokens[row, (place + 2).clamp(max=tokens.shape[1] - 1)]
        logits = sparing.answers(logits, tokens[row, place], targets, after)
    return F.cross_entropy(logits, targets), right


class Examination:
    """Held-out items as padded tokens, in batches of one shape: the exact match of a model that sees them."""

    def __init__(self, items: list[dict], tokenizer: Tokenizer, device: str, batch: int = 64):
        self.items, self.device, self.batch = items, device, batch
        self.cases = []
        for number, item in enumerate(items):
            prompt = render_seen(item["messages"], True)
            length = len(tokenizer.encode(prompt).ids)
            for answer in item["accepted"]:
                self.cases.append((number, length, tokenizer.encode(prompt + answer + END).ids))
        self.cases.sort(key=lambda case: len(case[2]))
        self.cells = np.stack([cells_of(world) for item in items for world in item["worlds"]])
        ends = np.cumsum([len(item["worlds"]) for item in items])
        self.shown = [list(range(end - len(item["worlds"]), end)) for item, end in zip(items, ends, strict=True)]

    @torch.no_grad()
    def exact_match(self, model: Model, rows_of: Callable[[list[int]], torch.Tensor], image: int) -> dict[str, float]:
        """Percent of the items of each skill; `rows_of` gives the rows of pictures by their numbers, as in `cells`."""
        right = [False] * len(self.items)
        for begin in range(0, len(self.cases), self.batch):
            part = self.cases[begin : begin + self.batch]
            width = -(-max(len(ids) for _, _, ids in part) // 64) * 64
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for _, _, ids in part], device=self.device)
            rows = rows_of([picture for number, _, _ in part for picture in self.shown[number]])
            hidden, _ = model.from_embeddings(with_pictures(model, tokens, rows, image))
            best = model.logits(hidden).argmax(-1).tolist()
            for (number, length, ids), row in zip(part, best, strict=True):
                right[number] |= row[length - 1 : len(ids) - 1] == ids[length:]
        scores = defaultdict(list)
        for item, good in zip(self.items, right, strict=True):
            scores[item["skill"]].append(good)
        self.right = right
        return {skill: round(100 * sum(values) / len(values), 2) for skill, values in scores.items()}
