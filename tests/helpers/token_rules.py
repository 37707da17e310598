"""Rules on tokens for tests: random ones that depend on a path, wrong ones, and sequences that obey them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from runner_steps import fitting, take_step

from edgellm.decoding.sequence import StepMasks
from edgellm.engines.errors import ConstraintError
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.constraints import AllConstraints, BadWords, TokenConstraint, packed_mask
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

#: Of the tiny models, and what `ruled_answers` gives of each.
VOCABULARY, ANSWER_TOKENS = 320, 24


class RandomRules:
    """After each pair of tokens a random share of the `vocab_size` tokens is allowed; see `TokenConstraint`.

    `free` of 7 pairs leave all tokens free, `dead` of them have no way on.
    """

    def __init__(self, vocab_size: int, seed: int = 0, share: float = 0.5, free: int = 0, dead: int = 0) -> None:
        self.vocab_size, self._seed, self._share = vocab_size, seed, share
        self._free, self._dead = free, dead
        self.path: list[int] = []

    def allowed(self) -> np.ndarray:
        """[V] bool: the tokens that may come next."""
        pair = (-1, -1, *self.path)[-2:]
        kind = (3 * pair[0] + 5 * pair[1] + self._seed) % 7
        if kind < self._free:
            return np.ones(self.vocab_size, np.bool_)
        if kind >= 7 - self._dead and self.path:
            return np.zeros(self.vocab_size, np.bool_)
        random = np.random.default_rng((self._seed, pair[0] + 1, pair[1] + 1))
        return random.random(self.vocab_size) < self._share

    def fill_mask(self, row: np.ndarray) -> None:
        """See `TokenConstraint`."""
        allowed = self.allowed()
        if not allowed.any():
            raise ConstraintError("there is no way on")
        row.view(np.uint32)[:] = packed_mask(allowed)

    def try_advance(self, token: int) -> bool:
        """See `TokenConstraint`."""
        if not (0 <= token < self.vocab_size and self.allowed()[token]):
            return False
        self.path.append(token)
        return True

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        del self.path[len(self.path) - count :]

    def forced(self, most: int) -> list[int]:
        """Nothing is."""
        return []

    def is_free(self) -> bool:
        """See `TokenConstraint`."""
        return bool(self.allowed().all())

    def is_complete(self) -> bool:
        """Nothing is asked for."""
        return True

    def is_stopped(self) -> bool:
        """Nothing ends the answer."""
        return False


class RuledSequence:
    """What `StepMasks` reads of a sequence."""

    def __init__(self, constraint: TokenConstraint | None) -> None:
        self.constraint, self.failure, self.is_over = constraint, None, False

    @property
    def finished(self) -> bool:
        """Whether it has failed."""
        return self.failure is not None

    def stuck(self, error: ConstraintError) -> None:
        """Its rules have no way on."""
        self.failure = error

    def know(self, tokens: Sequence[int]) -> None:
        """Take notice of tokens, each of which the rules allow."""
        if self.constraint is not None:
            for token in tokens:
                assert self.constraint.try_advance(token), f"token {token} was drawn against the rules"


def rules(seed: int = 0) -> TokenConstraint:
    """Random rules with free places, and words of several tokens that may not come."""
    words = [[token, (token + step) % VOCABULARY] for token in range(0, VOCABULARY, 3) for step in range(40)]
    return AllConstraints([RandomRules(VOCABULARY, seed, 0.6, free=3), BadWords(words, VOCABULARY)])


def random_trees(generator: np.random.Generator, likely: Sequence[Sequence[int]], plan: DraftPlan) -> list[GivenTree]:
    """Trees of what follows each slot's last tokens in `likely`, of other tokens, and of what no rule allows."""
    trees = []
    for tokens in likely:
        count = int(generator.integers(0, plan.top_k + 1))
        chosen, parents, depths = [], [], []
        for node in range(count):
            above = [-1, *(place for place in range(node) if depths[place] < plan.steps)]
            goes_on = node and depths[-1] < plan.steps and generator.random() < 0.6
            parent = node - 1 if goes_on else int(generator.choice(above))
            depth = 0 if parent < 0 else depths[parent]
            follows = depth < len(tokens) and generator.random() < 0.8
            token = int(tokens[depth]) if follows else int(generator.integers(0, VOCABULARY))
            siblings = {other for above, other in zip(parents, chosen, strict=True) if above == parent}
            chosen.append(token if token not in siblings else min({*range(VOCABULARY)} - siblings))
            parents.append(parent)
            depths.append(depth + 1)
        trees.append(GivenTree(chosen, parents))
    return trees


def ruled_answers(
    runner: DecodingRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingValues],
    made: Sequence[TokenConstraint | None],
    plan: DraftPlan | None,
    expected: Sequence[Sequence[int]] = ((),) * 4,
) -> tuple[list[list[int]], int]:
    """The first tokens of each slot, whose rules `made` are, and how many steps they took; `expected` is what given
    trees have most of their tokens from."""
    sequences, found = [RuledSequence(each) for each in made], []
    for slot, (sampling, sequence) in enumerate(zip(samplings, sequences, strict=True)):
        step_rules = None if sequence.constraint is None else StepMasks([sequence])
        found.append(runner.start(slot, prompts[slot], 0, sampling, None, step_rules))
    found = [first.wait().tolist() for first in found]  # prompts follow each other, nothing is waited for
    for sequence, tokens in zip(sequences, found, strict=True):
        sequence.know(tokens)
    generator, steps = np.random.default_rng(1), 0
    while min(map(len, found)) < ANSWER_TOKENS:
        room = runner.limits.kv_capacity - max(
            len(prompt) + len(tokens) for prompt, tokens in zip(prompts, found, strict=False)
        )
        fitted = plan and fitting(plan, room)
        trees = None
        if fitted is not None and fitted.is_given:
            trees = random_trees(
                generator, [likely[len(tokens) :] for likely, tokens in zip(expected, found, strict=False)], fitted
            )
        step_rules = StepMasks(sequences) if any(each.constraint is not None for each in sequences) else None
        step = take_step(runner, len(sequences), fitted, step_rules, trees)
        for sequence, tokens, emitted in zip(sequences, found, step.wait(), strict=True):
            assert sequence.failure is None
            sequence.know(emitted)
            tokens.extend(emitted)
        steps += 1
    for slot in range(len(sequences)):
        runner.stop(slot)
    return [tokens[:ANSWER_TOKENS] for tokens in found], steps
