"""What a change of a model costs, as quantizing does: what `edgellm eval` measures, for programs."""

from edgellm.evaluation.inputs import Example, Window, answer_windows, bos_token, load_examples, text_windows
from edgellm.evaluation.measures import (
    Difference,
    Divergence,
    Perplexity,
    RecordedLogits,
    answers,
    divergence,
    exact_match,
    perplexity,
    record_logits,
    rouge,
)

__all__ = [
    "Difference",
    "Divergence",
    "Example",
    "Perplexity",
    "RecordedLogits",
    "Window",
    "answer_windows",
    "answers",
    "bos_token",
    "divergence",
    "exact_match",
    "load_examples",
    "perplexity",
    "record_logits",
    "rouge",
    "text_windows",
]
