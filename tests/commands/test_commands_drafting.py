"""The drafting options of `edgellm generate` and `edgellm chat`, on a tiny model with a random draft head."""

from __future__ import annotations

import json

import pytest

from edgellm.commands.console import drafting_in_words
from edgellm.drafting.report import DraftingStatistics


@pytest.fixture
def answer(edgellm, tiny_draft_engines):
    """The JSON object of `edgellm generate` with these options."""

    def call(*options: object) -> dict:
        arguments = ("generate", "hello", "--json", "--model", tiny_draft_engines, "--max-tokens", 30, *options)
        code, out, err = edgellm(*arguments)
        assert code == 0, err
        return json.loads(out)

    return call


FIXED = ("--draft-steps", 2, "--draft-top-k", 3, "--verify-tree-size", 8, "--no-adaptive")


@pytest.mark.parametrize(("options", "plan"), [(FIXED, "tree 3/2/8"), (("--draft", "--no-adaptive"), "chain 3")])
def test_the_options_say_what_is_drafted(answer, options, plan):
    plain, drafted = answer("--no-draft"), answer(*options)
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["drafting"] is None
    figures = drafted["drafting"]
    assert max(figures["plans"], key=figures["plans"].get) == plan
    assert figures["rounds"] == sum(figures["plans"].values()) == sum(figures["lengths"]) > 0
    tokens = sum(length * count for length, count in enumerate(figures["lengths"]))
    assert tokens + figures["plain_steps"] == 29  # all but the prompt's own
    assert figures["mean_acceptance_length"] == tokens / figures["rounds"]
    assert figures["draft_seconds"] > 0 and figures["verify_seconds"] > 0
    assert figures["controller"] is None


def test_adaptive_is_the_default_and_says_what_it_chose(answer):
    figures = answer()["drafting"]
    report = figures["controller"]
    assert report["chosen"] in {"plain", "chain 2", "chain 3"}
    assert report["reason"].startswith(f"{report['chosen']}: ")
    assert sum(report["rounds"].values()) >= figures["rounds"] + figures["plain_steps"] - 1
    assert [forecast["name"] for forecast in report["forecasts"]].count("plain") == 1


def test_a_tree_of_choices_from_a_file(answer, edgellm, tiny_draft_engines, tmp_path):
    (tmp_path / "tree.yaml").write_text("- [0]\n- [1]\n- [0, 0]\n")
    figures = answer("--choices", tmp_path / "tree.yaml", "--no-adaptive")["drafting"]
    assert "choices 2/2/4" in figures["plans"]
    (tmp_path / "gaps.yaml").write_text("- [0]\n- [0, 1]\n")
    code, _, err = edgellm("generate", "x", "--model", tiny_draft_engines, "--choices", tmp_path / "gaps.yaml")
    assert code == 2 and "gaps.yaml: there is a gap before the choice [0, 1]" in " ".join(err.split())


def test_typical_acceptance_is_said_to_be_lossy(edgellm, tiny_draft_engines):
    options = ("--model", tiny_draft_engines, "--max-tokens", 8, "--temperature", 0.8, "--seed", 1)
    code, out, err = edgellm("generate", "hello", *options, "--acceptance", "typical", "--posterior-threshold", 0.2)
    assert (code, err) == (0, "Typical acceptance is lossy: answers may be others than without a draft.\n")
    assert out.strip()


def test_settings_come_from_a_file_and_options_win(answer, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("drafting: {kind: chain, draft_steps: 2, adaptive: false}\n")
    assert set(answer("--config", path)["drafting"]["plans"]) <= {"chain 2", "chain 1"}
    assert "chain 3" in answer("--config", path, "--draft-steps", 3)["drafting"]["plans"]
    assert answer("--config", path, "--no-draft")["drafting"] is None
    path.write_text("drafting: {draft: false}\n")
    assert answer("--config", path)["drafting"] is None
    assert answer("--config", path, "--draft")["drafting"] is not None


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--no-draft", "--draft-steps", 2), 2, "--draft-steps is given, and so is --no-draft: expected only one"),
        (("--choices", "eagle_25", "--draft-top-k", 4), 2, "--draft-top-k is given beside choices"),
        (("--draft", "suffix", "--draft-steps", 2), 2, "--draft-steps is given beside kind suffix"),
        (("--posterior-alpha", 0.2), 2, "--posterior-alpha is given, but --acceptance is exact"),
        (("--acceptance", "lenient"), 2, "--acceptance is 'lenient': expected one of exact, typical"),
        (("--draft-steps", 0), 2, "--draft-steps is 0: expected a whole number from 1 to 32"),
        (("--draft-top-k", -3), 2, "--draft-top-k is -3: expected a whole number from 1 to 64"),
        (("--choices", "nowhere.yaml"), 2, "the choices file nowhere.yaml cannot be read"),
        (("--draft-steps", 9), 1, "draft_steps is 9 for a chain: the engines were built for at most 3"),
        (("--verify-tree-size", 30), 1, "verify_tree_size is 30 for a tree: the engines were built for at most 16"),
        (("--choices", "eagle_25"), 1, "for a tree of 25 choices: the engines were built for at most"),
    ],
)
def test_wrong_options_are_named(edgellm, tiny_draft_engines, options, code, message):
    found, out, err = edgellm("generate", "hello", "--model", tiny_draft_engines, *options)
    assert (found, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())


def test_asking_for_a_draft_where_there_is_none(edgellm, tiny_engines):
    code, _, err = edgellm("generate", "hello", "--model", tiny_engines, "--draft-steps", 2)
    assert code == 1 and "has no draft model: build one with it (edgellm build CHECKPOINT" in err
    code, _, err = edgellm("generate", "hello", "--model", tiny_engines, "--max-tokens", 2, "--no-draft")
    assert (code, err) == (0, "")


def test_settings_of_a_draft_do_no_harm_where_there_is_none(edgellm, tiny_engines, tmp_path):
    (tmp_path / "settings.yaml").write_text("drafting: {draft_steps: 2}\n")
    options = ("--model", tiny_engines, "--max-tokens", 2, "--config", tmp_path / "settings.yaml")
    assert edgellm("generate", "hello", *options)[0] == 0


def test_chat_shows_rounds_and_reasons(edgellm, tiny_draft_engines):
    options = ("--max-tokens", 12, "--stats")
    code, fixed, err = edgellm("chat", tiny_draft_engines, *options, *FIXED, stdin="hello\n/stats\n")
    assert code == 0
    line = next(line for line in err.splitlines() if line.startswith("drafting: "))
    assert "draft 1." in line and " rounds" in line and "tree 3/2/8, drafting 0." in line and "verifying 0." in line
    assert "\ndraft: rounds tree 3/2/8 " in err and "draft chosen" not in err
    code, adaptive, err = edgellm("chat", tiny_draft_engines, *options, stdin="hello\n/stats\n")
    assert code == 0 and "\ndraft chosen: " in err and "tokens/s; " in err
    assert "session: 1 answer, 12 tokens" in err
    code, plain, err = edgellm("chat", tiny_draft_engines, *options, "--no-draft", stdin="hello\n/stats\n")
    assert code == 0 and "\ndraft" not in err
    assert fixed == adaptive == plain


def test_statistics_in_words():
    plain = DraftingStatistics(0, 5, 0, 0, (0,), {}, 0.1, 0.0, 0.0)
    assert drafting_in_words(plain) == "no draft"
    one = DraftingStatistics(1, 2, 3, 2, (0, 0, 0, 1), {"chain 3": 1}, 0.1, None, None)
    assert drafting_in_words(one) == "draft 3.00 tokens/round, 1 round and 2 plain, chain 3"


SUFFIX_LINE = "again and again and again and"


@pytest.mark.parametrize("model", ["tiny_engines", "tiny_draft_engines"])
def test_drafting_from_what_was_said_needs_no_draft_model(edgellm, request, model):
    options = ("generate", SUFFIX_LINE, "--json", "--model", request.getfixturevalue(model), "--max-tokens", 30)
    answers = {}
    for kind in (("--draft", "suffix"), ("--no-draft",)):
        code, out, err = edgellm(*options, *kind)
        assert code == 0, err
        answers[kind[-1]] = json.loads(out)
    assert answers["suffix"]["token_ids"] == answers["--no-draft"]["token_ids"]
    figures = answers["suffix"]["drafting"]
    assert answers["--no-draft"]["drafting"] is None
    assert set(figures["plans"]) == set(figures["tokens"]) and all(
        name.startswith("given") for name in figures["plans"]
    )
    assert figures["controller"]["rounds"].get("plain", 0) >= 1


def test_suffix_decoding_beside_a_draft_and_alone(answer, edgellm, tiny_engines, tmp_path):
    plain = answer("--no-draft")
    assert answer("--suffix-decoding")["token_ids"] == plain["token_ids"]
    assert answer("--suffix-decoding", "--no-adaptive", "--draft-steps", 2)["drafting"]["controller"] is None
    path = tmp_path / "settings.yaml"
    path.write_text("drafting: {suffix_decoding: true, draft_steps: 2}\n")
    options = ("generate", "hello", "--json", "--max-tokens", 4, "--config", path, "--model", tiny_engines)
    code, out, err = edgellm(*options)  # a model without a draft model drafts from what was said alone
    assert code == 0 and json.loads(out)["drafting"]["controller"] is not None, err
    path.write_text("drafting: {kind: suffix}\n")
    assert json.loads(edgellm(*options)[1])["drafting"] is not None
    assert "chain 2" in answer("--config", path, "--draft-steps", 2, "--no-adaptive")["drafting"]["plans"]
    assert (
        "tree 4/3/12"
        in answer("--config", path, "--draft", "tree", "--draft-top-k", 4, "--no-adaptive")["drafting"]["plans"]
    )


def test_draft_may_stand_alone_before_another_argument(edgellm, tiny_draft_engines):
    code, out, err = edgellm("chat", "--draft", tiny_draft_engines, "--max-tokens", 2, stdin="hello\n")
    assert code == 0 and out, err
    code, out, err = edgellm("chat", "--draft", "suffix", tiny_draft_engines, "--max-tokens", 2, stdin="hello\n")
    assert code == 0 and out, err


def test_bench_takes_suffix_drafts(edgellm, tiny_engines, tiny_draft_engines, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"{SUFFIX_LINE}\n")
    for model, names in ((tiny_engines, "suffix"), (tiny_draft_engines, "suffix,chain:2:suffix,adaptive:suffix")):
        options = ("--prompts", tmp_path / "prompts.txt", "--repeat", 1, "--max-tokens", 6)
        code, out, err = edgellm("bench", model, *options, "--configurations", names)
        assert code == 0, err
        assert all(name in out for name in names.split(","))


def test_drafting_is_changed_in_a_chat(edgellm, tiny_engines, tiny_draft_engines):
    lines = '/draft\n/draft suffix\nhello\n/draft ""\nhello\n/draft chain\n/draft fast\n'
    code, _, err = edgellm("chat", tiny_engines, "--max-tokens", 4, stdin=lines)
    said = " ".join(err.split())
    assert code == 1  # of the commands that were refused
    assert said.index("Nothing is drafted.") < said.index("Drafts are what followed the same tokens before")
    assert said.count("Nothing is drafted.") == 2
    assert "the engine directory has no draft model" in said
    assert "kind is 'fast': expected one of tree, chain, choices, suffix" in said
    lines = "/draft\n/draft suffix\n/draft chain\n"
    code, _, err = edgellm("chat", tiny_draft_engines, "--suffix-decoding", stdin=lines)
    said = " ".join(err.split())
    assert code == 0
    assert "Drafts are those of the draft model, or what followed the same tokens before, where" in said
    assert "Drafts are those of the draft model, where that should be faster." in said
