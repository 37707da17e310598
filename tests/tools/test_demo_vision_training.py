"""Training of the eyes: what is spared, what is merged, and that text rows stay what they are."""

import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tools.demo_model.documents import Material  # noqa: E402
from tools.demo_model.vision.documents import LENGTH, PLAIN_ROWS, plain_rows  # noqa: E402
from tools.demo_model.vision.kinds import COLOURS, KINDS  # noqa: E402
from tools.demo_model.vision.language import Language, merged  # noqa: E402
from tools.demo_model.vision.layout import token_tables  # noqa: E402
from tools.demo_model.vision.network import IGNORED  # noqa: E402
from tools.demo_model.vision.scenes import held_out_pair  # noqa: E402
from tools.demo_model.vision.sparing import Sparing  # noqa: E402
from tools.demo_model.vocabulary import load_vocabulary  # noqa: E402

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"


@pytest.fixture(scope="module")
def tokenizer():
    return load_vocabulary(SHIPPED)


@pytest.fixture(scope="module")
def sparing(tokenizer) -> Sparing:
    tables = token_tables(lambda text: tokenizer.encode(text).ids)
    words = torch.from_numpy(tables["colours"]).long(), torch.from_numpy(tables["kinds"]).long()
    return Sparing(4.0, words, tokenizer.get_vocab_size())


def test_only_scores_of_held_out_pairs_are_lowered(sparing: Sparing):
    colours, kinds = (torch.from_numpy(numbers) for numbers in np.indices((len(COLOURS), len(KINDS))).reshape(2, -1))
    by_kind, by_colour = sparing.cells(colours, kinds)
    for colour, colour_name in enumerate(COLOURS):
        for kind, kind_name in enumerate(KINDS):
            lowered = -4.0 if held_out_pair(colour_name, kind_name) else 0.0
            place = int(((colours == 0) & (kinds == kind)).nonzero())
            assert by_kind[place, colour] == lowered
            place = int(((colours == colour) & (kinds == 0)).nonzero())
            assert by_colour[place, kind] == lowered
    nothing = sparing.cells(torch.tensor([IGNORED, len(COLOURS)]), torch.tensor([IGNORED, len(KINDS)]))
    assert not nothing[0].any() and not nothing[1].any()


def test_words_of_answers_are_spared_beside_their_pair(sparing: Sparing, tokenizer):
    held = [(c, k) for c in COLOURS for k in KINDS if held_out_pair(c, k)]
    colour, kind = held[0]
    shown = next(c for c in COLOURS if not held_out_pair(c, kind))
    the, *ids = tokenizer.encode(f" the {shown} {kind}").ids
    wanted_colour, wanted_kind = ids
    zeros = torch.zeros(2, tokenizer.get_vocab_size())
    changed = sparing.answers(
        zeros,
        torch.tensor([the, wanted_colour]),
        torch.tensor([wanted_colour, wanted_kind]),
        torch.tensor([wanted_kind, the]),
    )
    lowered = {row: {tokenizer.decode([int(n)]).strip() for n in changed[row].nonzero()} for row in range(len(changed))}
    assert lowered[0] == {c for c, k in held if k == kind} and colour in lowered[0]
    assert lowered[1] == {k for c, k in held if c == shown}
    assert set(changed.unique().tolist()) == {-4.0, 0.0}


def test_changes_begin_at_nothing_and_are_merged_as_they_act(tmp_path: Path):
    from safetensors.torch import load_file

    from tools.demo_model.model import load_model

    language = Language(SHIPPED, 2, "cpu")
    tokens = torch.randint(5, 4000, (1, 24), generator=torch.Generator().manual_seed(3))
    weights = torch.ones(1, 24)
    with torch.no_grad():
        same = language.kept(tokens, weights, *language.model.with_features(tokens, (2, 4, 5)))
        assert all(abs(value.item()) < 1e-6 for value in same)
        for layer in language.adapted.values():
            layer.b.normal_(0, 0.02)
        found, states = language.model.with_features(tokens, (2, 4, 5))
        assert all(value.item() > 1e-6 for value in language.kept(tokens, weights, found, states))
    language.save(tmp_path / "changes.safetensors")
    tensors = {name: value.float() for name, value in load_file(SHIPPED / "model.safetensors").items()}
    plain = load_model(SHIPPED)
    plain.load_state_dict(merged(tensors, load_file(tmp_path / "changes.safetensors")))
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens), found, rtol=1e-3, atol=1e-3)


def test_plain_rows_are_full_of_text_without_pictures(tokenizer):
    material = Material(tokenizer, (), [], [], ["Once upon a time there was a fox."])
    tokens, answers = plain_rows(material, random.Random(4))
    assert tokens.shape == answers.shape == (PLAIN_ROWS, LENGTH)
    assert (tokens != tokenizer.token_to_id("<|image|>")).all() and (tokens[:, -1] != 0).all()
    assert 0.1 < answers.mean() < 0.6
