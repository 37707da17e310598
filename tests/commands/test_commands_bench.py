"""`edgellm bench` on a tiny model with a random draft head: figures that can be checked, not speeds."""

from __future__ import annotations

import json
import os
from xml.etree import ElementTree

import pytest

from edgellm import LLM, SamplingParams
from edgellm.benchmark.comparing import (
    BenchRun,
    default_configurations,
    default_prompts,
    load_prompts,
    parse_configurations,
    run_benchmark,
    summarize,
)
from edgellm.benchmark.report import report_lines, speed_plot
from edgellm.drafting.report import DraftingStatistics
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import RequestError

LIMITS = EngineLimits(draft_top_k=10, draft_steps=6, verify_tree_size=60)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "task": "count"}\nplain words\n{"turns": ["two", "no"], "category": "count"}\n')
    return path


def test_figures_table_and_plot(edgellm, tiny_draft_engines, prompts, tmp_path):
    options = ["--prompts", prompts, "--repeat", 2, "--max-tokens", 12]
    options += ["--configurations", "tree:4/3/12, chain:2,adaptive", "--output", tmp_path / "r.json"]
    code, out, err = edgellm("bench", tiny_draft_engines, *options, "--plot", tmp_path / "r.svg")
    assert code == 0, err
    results = json.loads((tmp_path / "r.json").read_text())
    found = {values["name"]: values for values in results["configurations"]}
    assert list(found) == ["plain", "tree:4/3/12", "chain:2", "adaptive"]
    assert (results["prompts"], results["repeat"], results["sampling"]["max_tokens"]) == (3, 2, 12)
    assert results["backend"] == "numpy" and "cores, NumPy " in results["machine"]
    for values in found.values():
        assert values["outputs"] == {"compared": 6, "equal": 6, "differences": []}
        assert values["tokens"] == 72 and values["tokens_per_second"] > 0 and len(values["ratio_by_repeat"]) == 2
        assert set(values["tasks"]) == {"all", "count"}
    assert found["plain"]["ratio"] == 1.0 and "rounds" not in found["plain"]
    assert found["tree:4/3/12"]["plain_steps"] <= 6 and "tree 4/3/12" in found["tree:4/3/12"]["plans"]
    assert found["chain:2"]["rounds"] == sum(found["chain:2"]["plans"].values())
    assert found["adaptive"]["controller"]["reason"] and found["chain:2"]["controller"] is None
    assert out.startswith("tiny_draft on the numpy backend: 3 prompts, each answered 2 times with up to 12 tokens")
    assert "chain:2: all 6 answers equal plain's, token for token" in out and "DIFFER" not in out
    assert "adaptive chose " in out and "speed against plain, and tokens a round, by task" in out
    plot = ElementTree.parse(tmp_path / "r.svg")
    texts = [element.text for element in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert {"plain", "tree:4/3/12", "chain:2", "adaptive"} <= set(texts)
    assert "Decoding speed of tiny_draft" in texts
    assert f"{results['machine']}, numpy backend, {results['date']}" in texts
    assert "3 prompts, each answered 2 times with up to 12 tokens, temperature 0" in texts
    assert "tokens per second (in brackets: against plain)" in texts
    assert plot.getroot()[0].tag.endswith("title")


def test_without_a_draft_plain_decoding_is_measured_alone(edgellm, tiny_engines, prompts):
    code, out, _ = edgellm("bench", tiny_engines, "--prompts", prompts, "--repeat", 1, "--max-tokens", 4)
    assert code == 0 and "\nplain" in out and "chain" not in out
    code, _, err = edgellm("bench", tiny_engines, "--configurations", "chain:2")
    assert code == 1 and "'chain:2' drafts, but the engine directory has no draft model" in err


def test_one_prompt_is_no_plural(edgellm, tiny_draft_engines, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "one"}\n')
    options = ("--prompts", tmp_path / "one.jsonl", "--repeat", 1, "--max-tokens", 4, "--configurations", "chain:2")
    code, out, _ = edgellm("bench", tiny_draft_engines, *options)
    assert code == 0 and ": 1 prompt, each answered once" in out and "chain:2: 1 of 1 answers equal plain's" in out


def test_sampled_answers_are_compared_with_one_seed(edgellm, tiny_draft_engines, prompts):
    options = ("--prompts", prompts, "--repeat", 1, "--max-tokens", 8, "--temperature", 1, "--top-p", 0.9)
    code, out, _ = edgellm("bench", tiny_draft_engines, *options, "--configurations", "chain:3,chain:3:sampled")
    assert code == 0 and "chain:3: all 3 answers equal plain's, token for token" in out
    assert "chain:3:sampled" in out and "DIFFER" not in out


def test_a_result_that_the_disk_has_no_room_for_leaves_the_last_one(
    edgellm, tiny_engines, prompts, tmp_path, monkeypatch
):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    (tmp_path / "results.json").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    options = ("--prompts", prompts, "--repeat", 1, "--max-tokens", 2, "--output", tmp_path / "results.json")
    code, _, err = edgellm("bench", tiny_engines, *options)
    assert code == 1 and "results.json cannot be written: No space left on device" in err
    assert (tmp_path / "results.json").read_text() == "before"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ("--configurations", "bush:3"),
            1,
            "the configuration 'bush:3' is unknown: expected plain, suffix, chain:STEPS, tree:",
        ),
        (("--configurations", "tree:4/3"), 1, "the configuration 'tree:4/3' is unknown"),
        (("--configurations", "chain:x"), 1, "the configuration 'chain:x' is unknown"),
        (("--configurations", "chain:4"), 1, "'chain:4': draft_steps is 4 for a chain: the engines were built for"),
        (("--configurations", "chain:0"), 1, "'chain:0': draft_steps is 0: expected a whole number from 1 to 32"),
        (("--configurations", "tree:4/3/12:sampled"), 1, "only a chain can be sampled"),
        (("--configurations", "choices:nowhere"), 1, "the choices file nowhere cannot be read"),
        (("--prompts", "nowhere.txt"), 1, "the prompts file nowhere.txt cannot be read"),
        (("--plot", "figure.png"), 2, "figure.png is no SVG file"),
        (("--repeat", 0), 2, "--repeat"),
        (("--output", "/no/such/folder/r.json", "--configurations", "plain", "--repeat", 1), 1, "cannot be written"),
    ],
)
def test_wrong_options_are_named(edgellm, tiny_draft_engines, options, code, message):
    found, _, err = edgellm("bench", tiny_draft_engines, "--max-tokens", 2, *options)
    assert found == code
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: expected a prompt on each line"),
        ("fine\n{bad json", "line 2 is not valid JSON"),
        ('{"task": "x"}', "line 1: expected one of the keys prompt, messages and turns, found none"),
        ('{"prompt": "a", "turns": ["b"]}', r"found \['prompt', 'turns'\]"),
        ('{"prompt": 3}', "line 1: the prompt hold no text"),
        ('{"turns": []}', "line 1: the turns hold no text"),
        ('{"prompt": "a", "task": 7}', "line 1: the task is 7: expected text"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 1: message 1 has the role 'judge'"),
    ],
)
def test_wrong_prompts_are_named(tmp_path, text, message):
    (tmp_path / "prompts.txt").write_text(text)
    with pytest.raises(RequestError, match=message):
        load_prompts(tmp_path / "prompts.txt")


def test_prompts_of_all_forms(tmp_path, prompts):
    found = load_prompts(prompts)
    assert [(prompt.messages[0]["content"], prompt.task) for prompt in found] == [
        ("one", "count"),
        ("plain words", "all"),
        ("two", "count"),
    ]
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (tmp_path / "m.jsonl").write_text(json.dumps({"messages": conversation}))
    assert list(load_prompts(tmp_path / "m.jsonl")[0].messages) == conversation
    shipped = default_prompts()
    assert len(shipped) >= 10 and len({prompt.task for prompt in shipped}) >= 3


def test_configurations_as_written():
    names = "chain:3,plain,tree:10/2/20,choices:eagle_25,adaptive,adaptive:4/2/9,chain:2:sampled,tree:10/6/60:typical"
    found = parse_configurations(names, LIMITS, "numpy", {"posterior_threshold": 0.2, "acceptance": "exact"})
    plans = [each.drafting and each.drafting.plan(LIMITS).name for each in found]
    assert plans[0] is None and [each.name for each in found].count("plain") == 1
    assert plans[1:] == [
        "chain 3",
        "tree 10/2/20",
        "choices 4/5/26",
        "chain 5",
        "tree 4/2/9",
        "chain 2 sampled",
        "tree 10/6/60 typical",
    ]
    assert [each.drafting.adaptive for each in found[1:]] == [False, False, False, True, True, False, False]
    assert [each.name for each in found if not each.is_lossless] == ["chain:2:sampled", "tree:10/6/60:typical"]
    assert found[-1].drafting.posterior_threshold == 0.2
    assert default_configurations(LIMITS) == ["plain", "chain:2", "chain:3", "chain:5", "tree:10/6/60", "adaptive"]


def answer_of(name: str, prompt: int, tokens: tuple[int, ...], seconds: float, lengths=None) -> BenchRun:
    drafting = None
    if lengths is not None:
        rounds = sum(lengths)
        drafting = DraftingStatistics(rounds, 1, 9, 3, lengths, {"chain 2": rounds}, seconds, 0.25, 0.5)
    return BenchRun(name, "even" if prompt % 2 == 0 else "odd", prompt, 0, tokens, seconds, drafting)


def test_figures_add_up():
    configurations = parse_configurations("chain:2", LIMITS, "numpy", {})
    runs = [
        answer_of("plain", 0, (1, 2, 3, 4, 5), 2.0),
        answer_of("plain", 1, (1, 2, 3), 2.0),
        answer_of("chain:2", 0, (1, 2, 3, 4, 5), 1.0, (0, 1, 0, 1)),
        answer_of("chain:2", 1, (1, 9, 3), 0.5, (0, 0, 1)),
    ]
    plain, drafted = summarize(runs, {}, configurations)
    assert (plain["tokens_per_second"], plain["ratio"]) == (1.5, 1.0)
    assert (drafted["tokens_per_second"], drafted["ratio"]) == (4.0, 4.0 / 1.5)
    assert drafted["mean_acceptance_length"] == 2.0 and drafted["acceptance_by_position"] == [2 / 3, 1 / 3]
    assert (drafted["rounds"], drafted["plain_steps"], drafted["plans"]) == (3, 2, {"chain 2": 3})
    assert (drafted["draft_seconds"], drafted["verify_seconds"]) == (0.5, 1.0)
    assert drafted["tasks"]["even"]["ratio"] == 2.0 and drafted["tasks"]["odd"]["ratio"] == 4.0
    assert drafted["outputs"]["differences"] == [{"prompt": 1, "repeat": 0, "token": 1}]
    results = {"model": "m", "backend": "b", "gpus": 1, "prompts": 2, "repeat": 1, "configurations": [plain, drafted]}
    lines = list(report_lines(results | {"sampling": {"max_tokens": 5, "temperature": 0.0}}))
    assert lines[-2] == "chain:2: 1 of 2 answers DIFFER from those of plain, the first (prompt 2) at token 2"
    assert lines[-1].startswith("Also plain may differ from itself: what of a prompt is not in the KV cache yet")


def test_each_configuration_answers_each_prompt_before_it_counts(tiny_draft_engines, monkeypatch):
    """What was said then proposes nothing: the first answers that count are as new as they would have been."""
    prompts, chosen = default_prompts()[:2], parse_configurations("suffix", LIMITS, "numpy", {})
    params, asked, progress = SamplingParams(max_tokens=12, ignore_eos=True), [], []
    with LLM(tiny_draft_engines, backend="numpy", drafting=chosen[1].drafting) as llm:
        chat, index = llm.chat, llm.call(lambda runtime: runtime._drafters.index).result()
        clear = index.clear
        monkeypatch.setattr(llm, "chat", lambda *each: (asked.append((llm.drafting, str(each[0]))), chat(*each))[1])
        monkeypatch.setattr(index, "clear", lambda: (asked.append("cleared"), clear()))
        runs, _ = run_benchmark(llm, llm, prompts, chosen, params, 1, lambda *each: progress.append(each))
    every = {(each.drafting, str(prompt.messages)) for each in chosen for prompt in prompts}
    assert set(asked[:4]) == every == set(asked[5:]) and asked[4] == "cleared" and len(asked) == 9
    assert [run.repeat for run in runs] == [0] * 4 and progress[-1] == (8, 8)


@pytest.mark.parametrize("fastest", [0.003, 0.9, 1.0, 4.99, 5.0, 73.2, 104.2, 99_999.0])
def test_an_axis_has_few_round_marks(fastest):
    configuration = {"name": "plain", "tokens_per_second": fastest, "ratio": 1.0}
    sampling = {"max_tokens": 1, "temperature": 0.0}
    plot = speed_plot(
        {
            "model": "m",
            "machine": "c",
            "backend": "b",
            "gpus": 1,
            "date": "d",
            "prompts": 1,
            "repeat": 1,
            "sampling": sampling,
        }
        | {"configurations": [configuration]}
    )
    texts = [element.text for element in ElementTree.fromstring(plot) if element.get("text-anchor") == "middle"]
    marks = [float(text) for text in texts if text and text[0].isdigit()]
    assert 3 <= len(marks) <= 6 and marks[0] == 0
    assert 0 <= fastest - marks[-1] < marks[1]


def test_the_chart_of_acceptance_names_its_axes():
    plain = {"name": "plain", "tokens_per_second": 10.0, "ratio": 1.0}
    drafted = plain | {"name": "chain:<2>", "acceptance_by_position": [0.75, 0.5]}
    facts = {"model": "m & m", "machine": "c", "backend": "b", "gpus": 1, "date": "d", "prompts": 1, "repeat": 1}
    sampling = {"max_tokens": 1, "temperature": 0.0}
    attached_image = ElementTree.fromstring(
        speed_plot(facts | {"sampling": sampling, "configurations": [plain, drafted]})
    )
    texts = [element.text for element in attached_image.iter("{http://www.w3.org/2000/svg}text")]
    wanted = {"Acceptance by position of the draft", "position in the draft", "share of rounds", "chain:<2>", "100%"}
    assert wanted <= set(texts) and "Decoding speed of m & m" in texts
    heights = [float(element.get("y")) for element in attached_image.iter() if element.get("y")]
    assert min(heights) >= 0 and max(heights) <= float(attached_image.get("height"))
