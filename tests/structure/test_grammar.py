"""Grammars on vocabularies: masks against single tokens tried, rollback, forced tokens, ends, errors and caches."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
import pytest
from byte_level_tokenizer import byte_level
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models

from edgellm.engines.speculation.constraints import allows, fill_tree_masks, mask_words
from edgellm.errors import ConstraintError, RequestError
from edgellm.structure import grammar as grammar_module
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary
from edgellm.text.tokenizer import Tokenizer

WIDTH = 401  # wider than the tokenizer, no multiple of 32
ROBOT = {
    "type": "object",
    "properties": {
        "action": {"enum": ["move", "grasp"]},
        "speed": {"type": "number", "minimum": 0, "maximum": 1},
        "pose": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["action", "speed", "pose"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def library():
    return byte_level()


@pytest.fixture(scope="module")
def ends(library):
    return library.token_to_id("<|im_end|>"), library.token_to_id("<|im_start|>")


@pytest.fixture
def vocabulary(library, ends):
    return GrammarVocabulary.of_tokenizer(Tokenizer(library), WIDTH, ends)


def begin(vocabulary, structure):
    return vocabulary.constraint_for(structure.grammar_text, structure.name)


def mask(constraint):
    row = np.full(mask_words(WIDTH), -1, np.int32)
    constraint.fill_mask(row)
    return row


def bits(row):
    return [token for token in range(32 * len(row)) if allows(row, token)]


def ids(library, text):
    return library.encode(text, add_special_tokens=False).ids


STRUCTURES = [
    Structure(json=ROBOT),
    Structure(json_object=True, whitespace="free"),
    Structure(regex="(ab|c)*d?"),
    Structure(choice=["yes", "yes please", "no"]),
    Structure(grammar='start: "<" start ">" | "x"'),
    Structure(json={"type": "string", "maxLength": 4}),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda each: each.name)
def test_a_mask_has_exactly_the_tokens_that_can_be_consumed(vocabulary, ends, structure):
    generator = random.Random(0)
    for _ in range(3):
        constraint = begin(vocabulary, structure)
        for _ in range(12):
            allowed = bits(mask(constraint))
            for token in range(-2, WIDTH + 70):
                consumed = constraint.try_advance(token)
                assert consumed == (token in allowed), token
                if consumed:
                    constraint.rollback(1)
            assert constraint.is_complete() == (ends[0] in allowed) == (ends[1] in allowed)
            assert constraint.is_stopped() == (set(allowed) == set(ends))
            assert bits(mask(constraint)) == allowed
            token = generator.choice(allowed)
            assert constraint.try_advance(token)
            if token in ends:
                break


def test_only_ends_follow_an_end_and_it_can_be_taken_back(vocabulary, library, ends):
    constraint = begin(vocabulary, Structure(choice=["yes", "yes please"]))
    assert not constraint.try_advance(ends[0])
    assert all(map(constraint.try_advance, ids(library, "yes")))
    assert constraint.is_complete() and not constraint.is_stopped()
    before = mask(constraint)
    assert constraint.try_advance(ends[1]) and constraint.try_advance(ends[0])
    assert constraint.is_stopped() and constraint.forced(4) == []
    assert sorted(bits(mask(constraint))) == sorted(ends)
    assert not constraint.try_advance(ids(library, " please")[0])
    constraint.rollback(2)
    assert np.array_equal(mask(constraint), before)
    constraint.rollback(len(ids(library, "yes")))
    assert all(map(constraint.try_advance, ids(library, "yes please"))) and constraint.is_stopped()


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_with_rollback_are_at_the_place_of_their_path(vocabulary, seed):
    generator, structure = random.Random(seed), STRUCTURES[seed % len(STRUCTURES)]
    constraint, path = begin(vocabulary, structure), []
    for _ in range(40):
        if path and generator.random() < 0.3:
            count = generator.randint(1, len(path))
            constraint.rollback(count)
            del path[len(path) - count :]
        else:
            token = generator.choice(bits(mask(constraint)))
            assert constraint.try_advance(token)
            path.append(token)
        fresh = begin(vocabulary, structure)
        assert all(map(fresh.try_advance, path))
        assert np.array_equal(mask(fresh), mask(constraint))
        assert (fresh.is_complete(), fresh.is_stopped()) == (constraint.is_complete(), constraint.is_stopped())
        assert fresh.forced(9) == constraint.forced(9)


def test_forced_tokens_spell_what_has_to_come_and_consume_nothing(vocabulary, library, ends):
    constraint = begin(vocabulary, Structure(json=ROBOT))
    before = mask(constraint)
    forced = constraint.forced(99)
    assert library.decode(forced) == '{"action": "' and constraint.forced(2) == forced[:2]
    assert np.array_equal(mask(constraint), before)
    for token in forced:
        assert allows(mask(constraint), token) and constraint.try_advance(token)
    assert constraint.forced(99) == []
    assert all(map(constraint.try_advance, ids(library, 'move", "speed": 0.5, "pose": [1, 2')))
    assert constraint.forced(99) == []  # another digit may come
    assert all(map(constraint.try_advance, ids(library, "]}")))
    assert constraint.is_stopped() and constraint.forced(99) == [ends[0]]


def test_the_end_is_forced_behind_the_last_forced_text(vocabulary, library, ends):
    constraint = begin(vocabulary, Structure(choice=["yes please"]))
    assert library.decode(constraint.forced(99)[:-1]) == "yes please" and constraint.forced(99)[-1] == ends[0]


def test_a_tree_has_the_masks_of_its_paths(vocabulary, library):
    constraint = begin(vocabulary, Structure(json=ROBOT))
    opening, word = ids(library, '{"'), ids(library, "action")
    path = [*opening, *word]
    tokens, parents = [-1, *path, opening[0], ids(library, "x")[0]], [-1, *range(len(path)), 0, 1]
    masks = np.zeros((len(tokens), mask_words(WIDTH)), np.int32)
    rows = fill_tree_masks(constraint, tokens, parents, masks)
    assert sorted(rows.tolist()) == list(range(-1, len(path) + 2)) and rows[-1] == -1
    fresh = begin(vocabulary, Structure(json=ROBOT))
    for node, token in enumerate(path, 1):
        assert fresh.try_advance(token)
        assert np.array_equal(mask(fresh), masks[rows[node]])
    assert np.array_equal(masks[rows[1]], masks[rows[len(path) + 1]])


def test_masks_are_kept_by_the_tokens_before_and_not_changed_through_them(vocabulary, monkeypatch):
    structure = Structure(json=ROBOT)
    compiled = vocabulary.compiled(structure.grammar_text)
    first = begin(vocabulary, structure)
    row = mask(first)
    row[:] = 0
    found, find = [], compiled.masks.find
    monkeypatch.setattr(compiled.masks, "find", lambda key: found.append(find(key)) or found[-1])
    assert bits(mask(begin(vocabulary, structure))) != [] and len(found) == 1 and found[0] is not None
    assert vocabulary.compiled(structure.grammar_text) is compiled


def test_memory_of_masks_and_grammars_is_bounded(vocabulary, monkeypatch):
    monkeypatch.setattr(grammar_module, "MASK_BYTES", 5 * 4 * mask_words(WIDTH))
    monkeypatch.setattr(vocabulary._grammars, "most", 3)
    structure = Structure(regex="[a-z]*")
    compiled, constraint = vocabulary.compiled(structure.grammar_text), begin(vocabulary, structure)
    for token in bits(mask(constraint))[:1] * 20:
        assert constraint.try_advance(token)
        mask(constraint)
    assert len(compiled.masks) == 5
    for number in range(5):
        vocabulary.compiled(Structure(choice=[str(number)]).grammar_text)
    assert len(vocabulary._grammars) == 3
    assert vocabulary.compiled(structure.grammar_text) is not compiled
    mask(constraint)  # who has it goes on with it


@pytest.fixture
def failing(vocabulary, library):
    """Four answers under a grammar that takes too much work behind z, the first of them there."""
    structure = Structure(regex="[wxy]|z(a{900}){900}")
    answers = [begin(vocabulary, structure) for _ in range(4)]
    mask(answers[1])
    z = ids(library, "z")[0]
    assert answers[0].try_advance(z) and answers[3].try_advance(ids(library, "y")[0])
    return answers, z


def test_a_grammar_that_fails_is_the_error_of_one_answer_which_stays_where_it_was(failing, library):
    answers, _ = failing
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"(cannot be followed behind 1 tokens|too much work).*a simpler one"):
            mask(answers[0])
    y = ids(library, "y")[0]
    for constraint in answers[:3]:
        constraint.rollback(constraint is answers[0])
        assert constraint.try_advance(y) and constraint.is_complete()
        constraint.rollback(1)
        assert y in bits(mask(constraint)) and not constraint.is_complete()
    assert answers[3].is_complete() and answers[3].is_stopped()


def test_nodes_that_cannot_be_followed_are_not_reached(failing, library):
    answers, z = failing
    a, y = (ids(library, letter)[0] for letter in "ay")
    masks = np.zeros((4, mask_words(WIDTH)), np.int32)
    rows = fill_tree_masks(answers[2], [-1, z, a, y], [-1, 0, 1, 0], masks)
    assert rows.tolist() == [0, -1, -1, 1]


def test_a_vocabulary_of_words_is_refused():
    words = {"yes": 0, "n": 1, "<end>": 2}
    library = LibraryTokenizer(models.WordLevel(words, unk_token="n"))
    with pytest.raises(RequestError, match=r"tokenizer.json cannot be used for structured answers"):
        GrammarVocabulary.of_tokenizer(Tokenizer(library), 3, (2,))


def test_tokenizers_that_cannot_be_read_are_named(library):
    metaspace = byte_level()
    metaspace.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    with pytest.raises(RequestError, match=r"cannot be used for structured answers \(it reads .* byte-level"):
        GrammarVocabulary.of_tokenizer(Tokenizer(metaspace), WIDTH, (2,))
    with pytest.raises(RequestError, match="names no end-of-sequence token"):
        GrammarVocabulary.of_tokenizer(Tokenizer(library), WIDTH, ())


def test_a_mask_of_another_width_is_refused(vocabulary):
    constraint = begin(vocabulary, Structure(choice=["a"]))
    with pytest.raises(ValueError, match=r"a mask has 14 words: expected 13"):
        constraint.fill_mask(np.zeros(14, np.int32))
    with pytest.raises(ValueError):
        constraint.fill_mask(np.zeros(26, np.int32)[::2])


def test_what_takes_too_long_to_compile_is_refused(vocabulary, monkeypatch):
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.0)
    with pytest.raises(RequestError, match=r"took .* seconds to compile, of 0"):
        begin(vocabulary, STRUCTURES[0])


def test_threads_may_share_a_vocabulary(vocabulary, library):
    failures = []

    def work(seed):
        generator = random.Random(seed)
        try:
            for _ in range(10):
                constraint = begin(vocabulary, STRUCTURES[seed % 2])
                for _ in range(20):
                    token = generator.choice(bits(mask(constraint)))
                    assert constraint.try_advance(token)
        except Exception as error:
            failures.append(error)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert not failures
