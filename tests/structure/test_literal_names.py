"""Literals that are names of added tokens: of tokens that are text, as Qwen3's `<think>`, and of special ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from byte_level_tokenizer import END, START, byte_level
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from edgellm import LLM, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.constraints import allows, mask_words
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarConstraint, GrammarVocabulary
from edgellm.text.tokenizer import Tokenizer

WIDTH = 401
NAMES = ("<think>", "</think>", "maybe")


def library_of(names: tuple[str, ...] = NAMES) -> LibraryTokenizer:
    library = byte_level()
    library.add_tokens([AddedToken(name, normalized=False) for name in names])
    return library


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(library_of())


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary.of_tokenizer(tokenizer, WIDTH, [tokenizer.token_to_id(END)])


def begun(vocabulary: GrammarVocabulary, structure: Structure) -> GrammarConstraint:
    return vocabulary.constraint_for(structure.grammar_text, structure.name)


def allowed(constraint: GrammarConstraint) -> list[int]:
    row = np.full(mask_words(WIDTH), -1, np.int32)
    constraint.fill_mask(row)
    return [token for token in range(WIDTH) if allows(row, token)]


def ways(constraint: GrammarConstraint, ends: tuple[int, ...]) -> list[list[int]]:
    """All sequences of tokens that masks let through, up to the end; each that is let through can be consumed."""
    found = []
    for token in allowed(constraint):
        if token in ends:
            assert constraint.is_complete()
            found.append([])
            continue
        assert constraint.try_advance(token), token
        found += [[token, *rest] for rest in ways(constraint, ends)]
        constraint.rollback(1)
    return found


@pytest.mark.parametrize(
    ("structure", "texts"),
    [
        (Structure(choice=["<think>", "no"]), ["<think>", "no"]),
        (Structure(choice=["<think>"]), ["<think>"]),
        (Structure(choice=["hello<think>you"]), ["hello<think>you"]),
        (Structure(choice=["maybe", "no", "</think>"]), ["maybe", "no", "</think>"]),
        (Structure(regex="<t(hink|ool_call)>"), ["<think>", "<tool_call>"]),
        (Structure(grammar='start: "<think>" WORD\nWORD: "a" | "you"'), ["<think>a", "<think>you"]),
        (Structure(json={"enum": ["<think>", "</think>"]}), ['"<think>"', '"</think>"']),
    ],
    ids=lambda value: value.grammar_text[:60] if isinstance(value, Structure) else "",
)
def test_masks_let_through_what_spells_the_text(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, structure: Structure, texts: list[str]
) -> None:
    """Nothing else, never into an end without a way on, and as the model's tokenizer spells it among others."""
    ends = (tokenizer.token_to_id(END),)
    found = ways(begun(vocabulary, structure), ends)
    assert {tokenizer.decode(tokens) for tokens in found} == set(texts)
    for text in texts:
        assert tokenizer.encode(text) in found
        assert structure.is_complete(text)


def test_what_is_forced_is_what_the_masks_let_through(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    structure = Structure(choice=["hello<think>you"])
    constraint, forced = begun(vocabulary, structure), begun(vocabulary, structure).forced(20)
    assert forced == [*tokenizer.encode("hello<think>you"), tokenizer.token_to_id(END)]
    for token in forced:
        assert token in allowed(constraint) and constraint.try_advance(token)
    assert constraint.is_stopped()


@pytest.mark.parametrize("names", [NAMES, ()], ids=["with names of text", "special names alone"])
@pytest.mark.parametrize("choice", [[START], [START, "no"], [END, "no"], [f"say {START}{START}"]])
def test_a_name_of_a_special_token_is_spelled_in_parts(names: tuple[str, ...], choice: list[str]) -> None:
    """Special tokens have no text."""
    tokenizer = Tokenizer(library_of(names))
    vocabulary = GrammarVocabulary.of_tokenizer(tokenizer, WIDTH, [tokenizer.token_to_id(END)])
    found = ways(begun(vocabulary, Structure(choice=choice)), (tokenizer.token_to_id(END),))
    assert {tokenizer.decode(tokens, skip_special_tokens=False) for tokens in found} == set(choice)
    assert all(tokenizer.special_token_ids.isdisjoint(tokens) for tokens in found)


def test_only_special_tokens_are_known_by_their_ids(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    ids = {name: tokenizer.token_to_id(name) for name in (START, END, "<tool_call>", *NAMES)}
    assert {name for name, token in ids.items() if vocabulary.tokenizer.is_special_token(token)} == {START, END}
    assert [vocabulary.tokenizer.decode_bytes([token]).decode() for token in ids.values()] == [*ids]


@pytest.mark.parametrize("choice", [["<box>"], ["<box>", "no"], ["a<box>b", "c"]])
def test_a_model_answers_with_such_a_text(choice: list[str], tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "tokenizer.json"
    library = LibraryTokenizer.from_file(str(file))
    library.add_tokens([AddedToken("<box>", normalized=False)])
    library.save(str(file))
    build_engine_directory(tmp_path / "checkpoint", tmp_path / "engines", EngineLimits(1, 16, 96), [])
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        for seed in range(6):
            params = SamplingParams(temperature=2.0, seed=seed, max_tokens=24, structure=Structure(choice=choice))
            answer = llm.generate("hello", params)
            assert answer.text in choice and answer.finish_reason == "stop"
