"""How answers are made, and how a head is trained: options of `tools.heads.train_eagle3`, which says what each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asking:
    """How answers are made."""

    answer_minutes: float = 4.0
    answer_count: int = 1_000_000
    answer_tokens: int = 192
    prompt_tokens: int = 320
    own_prompts: float = 0.5
    greedy: float = 0.5
    temperature: float = 0.7
    seed: int = 35


@dataclass(frozen=True)
class Course:
    """How a head is trained."""

    train_minutes: float = 4.0
    optimizer_steps: int = 0
    batch_tokens: int = 32768
    steps: int = 6
    decay: float = 0.8
    peak: float = 3e-3
    seed: int = 35
