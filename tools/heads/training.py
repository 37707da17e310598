"""Training of an EAGLE-3 head on what its base wrote, by training-time test of several steps (Y. Li and others 2025).

The base is a published checkpoint that transformers opens; its hidden states and its own distribution are computed
batch by batch, beside the head, so that nothing of them is kept. The head, its steps and its loss are those of the
shipped model's (`tools.demo_model`).
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tools.demo_model.documents import ANSWER, CONTEXT, FIRST, NOTHING
from tools.demo_model.draft_model import Draft, DraftDimensions, begin_from, export_draft
from tools.demo_model.optimizer import Optimizer
from tools.demo_model.unrolled import ChainAttention, attend_with_sum, unrolled_loss
from tools.heads.answers import Document
from tools.heads.settings import Course

#: Lengths of batches are multiples of it: fewer shapes for the allocator, and for attention's kernels.
_STEP = 32
#: Seconds between lines of the log.
_SHOWN = 10.0
#: Documents that the head is measured on and not trained on: one of so many, and the most.
_MEASURED, _MOST_MEASURED = 50, 256
#: Steps until the learning rate is at its peak, from which it falls as a cosine.
_WARM = 20
_OTHER_LOGITS = "{}: logits are not the head's product with the last hidden state, expected that"


def check_base(folder: Path) -> None:
    """Raise SystemExit for a model that no head can be trained for, as far as its configuration says so: before it has
    answered for minutes."""
    if not (folder / "config.json").exists():
        raise SystemExit(f"{folder} has no config.json: expected a checkpoint as it is published, or a GGUF file")
    try:
        config: Any = AutoConfig.from_pretrained(folder).get_text_config()
    except (ValueError, OSError) as error:
        raise SystemExit(f"{folder}: transformers does not open it: {str(error).splitlines()[0]}") from None
    if getattr(config, "final_logit_softcapping", None):
        raise SystemExit(_OTHER_LOGITS.format(folder))
    _attention_width(config)


def _attention_width(config: Any) -> int:
    """Of a head's attention heads: the base's where they divide its hidden size, else 64. Raises SystemExit."""
    width, wide = config.hidden_size, config.to_dict().get("head_dim") or 0  # of layers that differ it is no attribute
    wide = wide if wide and width % wide == 0 else 64
    if width % wide:
        raise SystemExit(f"the base's hidden size is {width}: expected a multiple of 64")
    return wide


class Base:
    """A frozen language model: hidden states, features and embeddings of tokens, and logits of hidden states."""

    def __init__(self, folder: Path, device: str):
        """Raises SystemExit for a model whose logits are more than its head's product with the last hidden state."""
        dtype = torch.float32 if device == "cpu" else "auto"
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
        self.config: Any = self.network.config.get_text_config()
        self.embedding = self.network.get_input_embeddings().weight
        self.head = self.network.get_output_embeddings().weight
        count = self.config.num_hidden_layers
        #: The layers that are entered with the features: the field's usual ones, where there are enough layers.
        self.taps = (2, count // 2, count - 3) if count > 6 else tuple(sorted({1, (count + 1) // 2, count - 1}))
        ids = torch.arange(16, device=device)[None]
        with torch.no_grad():
            hidden, _ = self.read(ids)
            expected = self.network(ids, use_cache=False).logits.float()
        if not torch.allclose(self.logits(hidden).float(), expected, rtol=1e-2, atol=1e-2 * float(expected.std())):
            raise SystemExit(_OTHER_LOGITS.format(folder))

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of token ids [B, T] the last hidden states [B, T, H], and the features [B, T, taps * H] before any norm."""
        states = self.network(ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        return states[-1], torch.cat([states[tap] for tap in self.taps], dim=-1)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of last hidden states [.., H] the logits [.., vocabulary], in the base's own dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden, self.head) / getattr(self.config, "logits_scaling", 1.0)

    def final_norm(self) -> torch.Tensor:
        """The weight [H] of the norm before the head; ones where no module of the usual name has one."""
        norm = getattr(self.network.get_decoder(), "norm", None)
        return torch.ones(self.config.hidden_size) if norm is None else norm.weight.float()

    def head_dimensions(self, draft_vocabulary: int, inner: int) -> DraftDimensions:
        """A head of this base's width, with so many tokens and inner columns. Its attention heads are as wide as the
        base's, else 64 columns, and together as wide as the head: SafeAILab's drafter takes no others."""
        config, wide = self.config, _attention_width(self.config)
        width = config.hidden_size
        heads, most = width // wide, config.num_key_value_heads
        return DraftDimensions(
            vocab_size=len(self.embedding),
            draft_vocab_size=min(draft_vocabulary, len(self.embedding)),
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=max(count for count in range(1, min(heads, most) + 1) if heads % count == 0),
            head_dim=wide,
            intermediate_size=inner,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            eagle_aux_hidden_state_layer_ids=self.taps,
        )


def frequent_tokens(documents: Sequence[Document], count: int, vocabulary: int) -> tuple[torch.Tensor, float]:
    """The `count` ids most frequent in what the model wrote, and the share of it that they are."""
    written = np.concatenate([each.ids[each.first :] for each in documents])
    counts = np.bincount(written, minlength=vocabulary)
    chosen = np.argsort(-counts, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen)), float(counts[chosen].sum() / counts.sum())


def batches(documents: Sequence[Document], tokens: int, draw: random.Random) -> Iterator[list[Document]]:
    """All documents once, those of similar lengths together: at most so many tokens a batch, padding included."""
    ordered = sorted(documents, key=lambda each: (len(each.ids), draw.random()))
    found: list[list[Document]] = []
    for document in ordered:
        if not found or _padded(len(document.ids)) * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(document)
    draw.shuffle(found)
    yield from found


def rows_of(documents: Sequence[Document], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and codes [B, T], each document at the beginning of a row. What is behind its end has no weight, and no
    row before it sees it, in models of any kind."""
    length = _padded(max(len(each.ids) for each in documents))
    ids, codes = np.zeros((2, len(documents), length), np.int64)
    codes[:] = NOTHING
    for row, document in enumerate(documents):
        end = len(document.ids)
        ids[row, :end], codes[row, :end] = document.ids, CONTEXT
        codes[row, document.first : end] = ANSWER
    codes[:, 0] += FIRST
    return torch.from_numpy(ids).to(device), torch.from_numpy(codes).to(device)


def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP


def batch_loss(draft: Draft, base: Base, documents: Sequence[Document], course: Course) -> tuple[torch.Tensor, list]:
    """The loss of a batch, and of each step of the chain how often its likeliest token is the base's, of how many."""
    device = draft.d2t.device.type
    ids, codes = rows_of(documents, device)
    hidden, features = base.read(ids)
    embedded = F.embedding(ids, base.embedding)
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        if device == "cuda":
            features, embedded = features.bfloat16(), embedded.bfloat16()
        attention = ChainAttention(partial(attend_with_sum, causal, False))
        read = (base.logits, hidden, features, embedded)
        return unrolled_loss(draft, read, attention, codes, course.steps, course.decay)


def train(draft: Draft, base: Base, documents: Sequence[Document], course: Course) -> dict[str, Any]:
    """Train the head in place, and return the record: steps, tokens, epochs and the log's lines, which are printed.
    Raises SystemExit without documents."""
    if not documents:
        raise SystemExit("there are no answers to learn from: expected some that come to at least a token each")
    began, draw = time.perf_counter(), random.Random(course.seed)
    optimizer = Optimizer(draft, weight_decay=0.05, plain="lm_head")
    step, seen, epochs, shown, log = 0, 0, 0, -_SHOWN, []
    progress = 0.0
    while progress < 1:
        epochs += 1
        for batch in batches(documents, course.batch_tokens, draw):
            seconds = time.perf_counter() - began
            most = course.optimizer_steps
            progress = step / most if most else seconds / (60 * course.train_minutes)
            if progress >= 1:
                break
            loss, found = batch_loss(draft, base, batch, course)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step(course.peak * min(1.0, (step + 1) / _WARM, 0.5 * (1 + math.cos(math.pi * progress))))
            step, seen = step + 1, seen + sum(len(each.ids) for each in batch)
            if seconds - shown >= _SHOWN:
                shown = seconds
                hits = [round(int(right) / max(1, count), 4) for right, count in found]
                log.append({"seconds": round(seconds, 1), "step": step, "loss": round(loss.item(), 4), "hits": hits})
                print(*(f"{name} {value}" for name, value in log[-1].items()), flush=True)
    seconds = time.perf_counter() - began
    return {"steps": step, "tokens": seen, "epochs": epochs, "seconds": round(seconds, 1), "log": log}


@torch.no_grad()
def held_out_hits(draft: Draft, base: Base, documents: Sequence[Document], course: Course) -> list[float]:
    """How often each step's likeliest token is the base's in documents that training never saw."""
    sums = torch.zeros(course.steps, 2, dtype=torch.float64)
    for batch in batches(documents, course.batch_tokens, random.Random(course.seed)):
        _, found = batch_loss(draft, base, batch, course)
        sums += torch.tensor([[int(right), count] for right, count in found], dtype=torch.float64)
    return [round(float(right / max(1, count)), 4) for right, count in sums]


def train_head(folder: Path, documents: Sequence[Document], sizes: tuple[int, int | None], course: Course, to: Path):
    """A head for the checkpoint in `folder`, written to the folder `to` in SpecForge's layout, in place of an earlier
    one, whole or not at all. `sizes` are the draft vocabulary and the inner columns (None: four times its width).
    Returns the record of it; what it learns from is printed."""
    documents, device = list(documents), "cuda" if torch.cuda.is_available() else "cpu"
    random.Random(course.seed).shuffle(documents)
    measured = min(_MOST_MEASURED, len(documents) // _MEASURED)
    torch.manual_seed(course.seed)
    torch.set_float32_matmul_precision("high")
    base = Base(folder, device)
    dimensions = base.head_dimensions(sizes[0], sizes[1] or 4 * base.config.hidden_size)
    targets, share = frequent_tokens(documents[measured:], dimensions.draft_vocab_size, dimensions.vocab_size)
    draft = Draft(dimensions, targets)
    begin_from(draft, base.final_norm().cpu(), base.head.float().cpu())
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "answers": len(documents),
        "learned_tokens": int(sum(len(each.ids) - each.first for each in documents)),
        "draft_vocabulary_share": round(share, 5),
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
    }
    print(*(f"{name} {value}" for name, value in record.items()), flush=True)
    record["training"] = train(draft.to(device), base, documents[measured:], course)
    record["held_out_hits"] = held_out_hits(draft, base, documents[:measured], course) if measured else []
    part = to.with_name(to.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = part / "float32.safetensors"
    save_file({name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()}, weights)
    export_draft(weights, part, dimensions, base.config.eos_token_id, base.config.pad_token_id)
    weights.unlink()
    shutil.rmtree(to, ignore_errors=True)
    part.rename(to)
    return record
