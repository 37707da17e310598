"""Rules that begin behind a model's reasoning, wherever its mark comes: drafted, in a tree, taken back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from byte_level_tokenizer import byte_level

from edgellm.engines.speculation.constraints import AllConstraints, BadWords, allows, fill_tree_masks, mask_words
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary
from edgellm.structure.reasoning import AfterReasoning, ReasoningMarks, reasoning_marks, reasoning_state
from edgellm.text.tokenizer import Tokenizer

WIDTH = 401


@pytest.fixture(scope="module")
def library():
    made = byte_level()
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.fixture(scope="module")
def tokenizer(library):
    return Tokenizer(library)


@pytest.fixture(scope="module")
def marks(tokenizer):
    return reasoning_marks(tokenizer)


@pytest.fixture(scope="module")
def vocabulary(library):
    return GrammarVocabulary.of_tokenizer(Tokenizer(library), WIDTH, (library.token_to_id("<|im_end|>"),))


def rules(vocabulary):
    return vocabulary.constraint_for(Structure(choice=["yes", "no"]).grammar_text)


def bits(constraint):
    row = np.full(mask_words(WIDTH), 7, np.uint32)
    constraint.fill_mask(row)
    return [token for token in range(32 * len(row)) if allows(row, token)]


def test_marks_are_tokens_of_the_vocabulary(tokenizer, marks, library):
    assert marks == ReasoningMarks(library.token_to_id("<think>"), library.token_to_id("</think>"))
    assert reasoning_marks(Tokenizer(byte_level())) is None


@pytest.mark.parametrize(
    ("prompt", "continued", "state"),
    [
        ("user: hello\nassistant: ", None, "undecided"),
        ("assistant: <think>\n", None, "open"),
        ("assistant: <think>\n\n</think>\n\n", None, "closed"),
        ("assistant: <think>so</think>yes\nuser: why?\nassistant: ", None, "undecided"),
        ("user: what is <think> for?\nassistant: ", None, "undecided"),
        ("user: </think> <think>\nassistant: <think>", None, "open"),
        ("", None, "undecided"),
        ("assistant: <think>I should", "<think>I should", "open"),
        ("assistant: <think>I should</think> go", "<think>I should</think> go", "closed"),
        ("assistant: I go", "I go", "undecided"),
    ],
)
def test_the_prompt_says_how_reasoning_stands(tokenizer, marks, prompt, continued, state):
    assert reasoning_state(tokenizer, marks, tokenizer.encode(prompt), continued) == state


def test_everything_is_free_until_the_end_mark(vocabulary, marks, library):
    constraint = AfterReasoning(rules(vocabulary), [marks.end], WIDTH)
    assert constraint.is_free() and constraint.forced(3) == [] and constraint.answer_start is None
    assert bits(constraint) == list(range(WIDTH))
    assert not constraint.is_complete() and not constraint.is_stopped()
    for token in (5, WIDTH - 1, library.token_to_id("<|im_end|>"), marks.begin):
        assert constraint.try_advance(token) and constraint.is_free()
    assert not constraint.try_advance(WIDTH) and not constraint.try_advance(-1)
    assert constraint.try_advance(marks.end) and not constraint.is_free()
    assert constraint.answer_start == 5 and bits(constraint) == bits(rules(vocabulary))
    assert not constraint.try_advance(5)
    yes = library.encode("yes").ids
    assert all(map(constraint.try_advance, yes)) and constraint.is_complete() and constraint.is_stopped()
    constraint.rollback(len(yes) + 1)
    assert constraint.is_free() and constraint.answer_start is None
    assert constraint.try_advance(marks.end) and bits(constraint) == bits(rules(vocabulary))


def test_an_undecided_model_may_think_or_answer_but_not_both_ways(vocabulary, marks, library):
    constraint = AfterReasoning(rules(vocabulary), [marks.end], WIDTH, marks.begin)
    assert set(bits(constraint)) == {*bits(rules(vocabulary)), marks.begin}
    assert not constraint.is_free() and constraint.forced(4) == [] and constraint.answer_start == 0
    no = library.encode("no").ids
    assert constraint.try_advance(no[0]) and not constraint.try_advance(marks.begin)
    constraint.rollback(1)
    assert constraint.try_advance(marks.begin) and constraint.is_free()
    assert constraint.try_advance(marks.end) and constraint.answer_start == 2
    assert not constraint.try_advance(marks.begin) and constraint.try_advance(no[0])
    constraint.rollback(3)
    assert set(bits(constraint)) == {*bits(rules(vocabulary)), marks.begin}


def test_an_end_of_several_tokens(vocabulary, library):
    end = library.encode("system</").ids
    assert len(end) > 2
    constraint = AfterReasoning(rules(vocabulary), end, WIDTH)
    for token in [*end[:-1], end[0], *end[:-1]]:
        assert constraint.try_advance(token) and constraint.is_free()
    assert constraint.try_advance(end[-1]) and not constraint.is_free()
    constraint.rollback(1)
    assert constraint.is_free()


@pytest.mark.parametrize("seed", range(20))
def test_the_mark_may_come_anywhere_in_a_drafted_tree(vocabulary, marks, library, seed):
    generator = random.Random(seed)
    begin = marks.begin if seed % 2 else None

    def make():
        words = BadWords([[marks.end, library.encode("no").ids[0]]], WIDTH)
        return AllConstraints([AfterReasoning(rules(vocabulary), [marks.end], WIDTH, begin), words])

    tokens, parents = [0], [-1]
    for node in range(1, 40):
        tokens.append(generator.choice([marks.begin, marks.end, marks.end, 5, *library.encode("yes no").ids, 312]))
        parents.append(generator.randrange(node))
    masks, constraint = np.zeros((40, mask_words(WIDTH)), np.uint32), make()
    before = bits(constraint)
    rows = fill_tree_masks(constraint, tokens, parents, masks)
    assert bits(constraint) == before
    kinds = set()
    for node in range(40):
        path, at = [], node
        while at:
            path.append(tokens[at])
            at = parents[at]
        fresh = make()
        reached = all(map(fresh.try_advance, reversed(path)))
        assert (rows[node] >= 0) == (reached and not fresh.is_free())
        if rows[node] >= 0:
            assert bits(fresh) == [token for token in range(32 * masks.shape[1]) if allows(masks[rows[node]], token)]
        kinds.add((reached, fresh.is_free()))
    assert len(kinds) > 1
