"""Write MODEL_CARD.md of a model directory from the results of training and evaluation.

Usage: python -m tools.demo_model.model_card --model DIR
"""

import argparse
import json
from pathlib import Path
from string import Template

from tools.demo_model.calls.toolbox import KINDS as KINDS_OF_TOOLS
from tools.demo_model.system_prompt import DEFAULT_SYSTEM_PROMPT
from tools.demo_model.vision.kinds import COLOURS, KINDS

RESULTS = Path(__file__).parent / "results"
SOURCES = (
    (
        "Self-dialogue Corpus (University of Edinburgh)",
        "BSD-3-Clause",
        "two people talking, as plain text; open questions",
    ),
    ("Taskmaster-4 (Google)", "CC BY 4.0", "short orders, as plain text"),
    ("FairytaleQA stories (stories from Project Gutenberg)", "Apache-2.0", "stories"),
    ("Pratham Books StoryWeaver", "CC BY, one book public domain", "children's stories"),
    ("African Storybook", "CC BY", "children's stories"),
    ("Novels out of copyright", "public domain", "prose; rare words for the open word pool"),
    ("ChatterBot corpus", "BSD-3-Clause", "short questions and answers"),
    ("Instruction data by Sebastian Raschka", "Apache-2.0", "short questions and answers"),
)


def stage_text(stages: list[dict]) -> str:
    """One line per training stage."""
    return "\n".join(
        f"- {stage['name']}: {stage['tokens'] / 1e6:,.1f} M tokens in {stage['steps']:,} steps of {stage['rows']} "
        f"rows of 2,048 tokens, {stage['minutes']} minutes on {stage['device']}, highest learning rate {stage['peak']}."
        for stage in stages
    )


def score_table(scores: dict[str, float]) -> str:
    """Skills and exact match, two skills a row."""
    cells = [f"{skill} | {value:.1f}" for skill, value in sorted(scores.items())]
    cells += [" | "] * (len(cells) % 2)
    rows = [f"| {cells[i]} | {cells[i + 1]} |" for i in range(0, len(cells), 2)]
    return "\n".join(["| skill | % | skill | % |", "| --- | --- | --- | --- |", *rows])


def draft_text(training: dict, acceptance: dict[str, dict]) -> str:
    """The section about the draft head."""
    lengths = "\n".join(
        f"| {name} | {found['mean acceptance length']:.2f} |"
        for name, found in acceptance.items()
        if isinstance(found, dict)
    )
    return Template((Path(__file__).parent / "model_card_draft.md").read_text()).substitute(
        parameters=f"{training['parameters'] / 1e6:.2f}",
        tokens=f"{training['tokens'] / 1e6:,.0f}",
        steps=f"{training['optimizer_steps']:,}",
        minutes=training["minutes"],
        device=training["device"],
        chain=training["chain"],
        prompts=acceptance["prompts"],
        seed=acceptance["seed"],
        lengths=lengths,
    )


def adapters_text(adapters: Path, training: dict, evaluation: dict) -> str:
    """The section about the adapters of styles in the folder `adapters`."""
    answers = evaluation["answers"]
    rows = []
    for name, found in answers.items():
        in_style = "" if found["in_style_percent"] is None else f"{found['in_style_percent']:.1f} %"
        title = "none" if name == "base" else f"`{name}`"
        rows.append(
            f"| {title} | {found['exact_match_percent']:.1f} % | {in_style} | {found['tokens_per_round']:.2f} |"
        )
    trained = [training["adapters"][name] for name in answers if name != "base"]
    return Template((Path(__file__).parent / "model_card_adapters.md").read_text()).substitute(
        rank=trained[0]["rank"],
        size=f"{sum(_size(adapters / name) for name in answers) / 1e6:.2f}",
        dialogues=f"{trained[0]['dialogues']:,}",
        seconds=round(max(found["seconds"] for found in trained)),
        device=trained[0]["device"],
        items=evaluation["items"],
        per_skill=evaluation["items_per_skill"],
        seed=evaluation["seed"],
        rows="\n".join(rows),
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tools_text(adapters: Path, training: dict, evaluation: dict) -> str:
    """The section about the adapter `tools` in the folder `adapters`."""
    trained = training["adapters"]["tools"]
    return Template((Path(__file__).parent / "model_card_tools.md").read_text()).substitute(
        rank=trained["rank"],
        size=f"{_size(adapters / 'tools') / 1e6:.2f}",
        dialogues=f"{trained['dialogues']:,}",
        seconds=round(trained["seconds"]),
        device=trained["device"],
        tries=len(trained.get("others", ())) + 1,
        kinds=len(KINDS_OF_TOOLS),
        items=evaluation["items_per_skill"],
        seed=evaluation["seed"],
        mean=f"{evaluation['all']:.1f}",
        tokens_per_round=f"{evaluation['tokens_per_round']:.2f}",
        scores=score_table(evaluation["exact_match_percent"]),
    )


def language_text(language: dict) -> dict[str, str]:
    """What the card says of the language model before and after it learned to read pictures."""
    found = {}
    for when in ("before", "after"):
        measured = language[when]
        found[f"text_{when}"] = f"{measured['text']['exact_match_percent']:.2f}"
        found[f"draft_{when}"] = f"{measured['mean_acceptance_length']['chain of 5']:.2f}"
        found |= {f"{name}_{when}": f"{value:.1f}" for name, value in measured["adapters_exact_match_percent"].items()}
    text = language["after"]["text"]
    return found | {"text_items": f"{text['items']:,}", "text_seeds": " and ".join(map(str, text["seeds"]))}


def eyes_text(
    vision: Path, training: dict, table: dict, evaluation: dict, pairs: dict, fresh: dict, language: dict
) -> str:
    """The section about the eyes in the folder `vision`; `pairs` is the evaluation with more held-out pairs,
    `fresh` that with another seed."""
    lowest = min(fresh["exact_match_percent"].items(), key=lambda scored: scored[1])
    config = json.loads((vision / "config.json").read_text())["vision_config"]
    stages = training["stages"]
    rows = [
        f"| {skill} | {value:.1f} | {pairs['exact_match_percent'][skill]:.1f} |"
        for skill, value in sorted(evaluation["exact_match_percent"].items())
    ]
    return Template((Path(__file__).parent / "model_card_vision.md").read_text()).substitute(
        parameters=f"{stages[0]['parameters'] / 1e6:.2f}",
        size=f"{(vision / 'model.safetensors').stat().st_size / 1e6:.1f}",
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        colours=len(COLOURS),
        colour_names=", ".join(COLOURS),
        kinds=len(KINDS),
        kind_names=", ".join(KINDS),
        table_dialogues=f"{table['dialogues']:,}",
        table_seconds=round(table["seconds"]),
        stages="\n".join(
            f"- {stage['pictures_shown'] / 1e6:.1f} M pictures in {stage['steps']:,} steps, {stage['minutes']} minutes "
            f"on {stage['device']}: {stage['about']}"
            for stage in stages
        ),
        items=evaluation["items_per_skill"],
        seed=evaluation["seed"],
        mean=f"{evaluation['all']:.1f}",
        items_pairs=pairs["items_per_skill"],
        seed_pairs=pairs["seed"],
        mean_pairs=f"{pairs['all']:.1f}",
        scores="\n".join(["| skill | % | % |", "| --- | --- | --- |", *rows]),
        items_fresh=fresh["items_per_skill"],
        seed_fresh=fresh["seed"],
        mean_fresh=f"{fresh['all']:.1f}",
        lowest_fresh=f"{lowest[1]:.1f} % (`{lowest[0]}`)",
        rank=stages[-1]["rank"],
        **language_text(language),
    )


def card(training: dict, evaluation: dict, checks: dict, draft: str = "", adapters: str = "", eyes: str = "") -> str:
    """The text of the card."""
    template = Template((Path(__file__).parent / "model_card_template.md").read_text())
    return template.substitute(
        system_prompt=DEFAULT_SYSTEM_PROMPT,
        activation=f"{checks['greatest activation']:.0f}",
        difference=f"{checks['greatest difference of fp16 to fp32']:.2f}",
        stages=stage_text(training["stages"]),
        sources="\n".join(f"| {name} | {licence} | {use} |" for name, licence, use in SOURCES),
        items=evaluation["items_per_skill"],
        seed=evaluation["seed"],
        mean=f"{evaluation['all']:.1f}",
        scores=score_table(evaluation["exact_match_percent"]),
        draft=draft,
        adapters=adapters,
        eyes=eyes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()

    def result(name: str) -> dict:
        return json.loads((RESULTS / f"{name}.json").read_text())

    draft = ""
    if (arguments.model / "draft").is_dir():
        draft = draft_text(result("draft_training"), result("draft_acceptance"))
    adapters, folder = "", arguments.model / "lora"
    if folder.is_dir():
        adapters = adapters_text(folder, result("adapters"), result("adapter_evaluation"))
    if (folder / "tools").is_dir():
        adapters += tools_text(folder, result("adapters"), result("tools_evaluation"))
    eyes, folder = "", arguments.model / "vision"
    if folder.is_dir():
        evaluations = ("eyes_evaluation", "eyes_evaluation_pairs", "eyes_evaluation_fresh")
        eyes = eyes_text(folder, *map(result, ("eyes_training", "eyes_table", *evaluations, "eyes_language")))
    (arguments.model / "MODEL_CARD.md").write_text(
        card(result("training"), result("evaluation"), result("checks"), draft, adapters, eyes)
    )


if __name__ == "__main__":
    main()
