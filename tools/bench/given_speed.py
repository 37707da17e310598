"""Drafts without a model against plain decoding, in turns: what was said before, and tokens that a schema forces.

    python -m tools.bench.given_speed [--backend numpy] [--repeats 5] [--kinds edit action chat schema]
                                      [--prompts 8] [--output RESULTS.json]

Of the shipped model: `edit`, answers that say a text of the prompt again (the model does not edit: the prompt goes on
with the beginning of the edited text, and each round is asked to go on, see `following`); `action`, the 20th of 20
similar commands, the others earlier requests of the process; `chat`, its held-out prompts whose answers are no actions;
`schema`, actions of its JSON adapter, unconstrained and plain against constrained by the adapter's schema with forced
tokens and kind suffix. Each prompt is answered by both in turns, by another one first each time. The speeds are
tokens behind the first over the seconds for them, of all prompts; a ratio is of one repetition, the median of them
counts. Answers must be the same, or the ratio says nothing: how many are is told.
"""
