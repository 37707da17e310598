"""The measures of an evaluation, each a function: perplexity, distance to a reference, exact match, ROUGE.

Perplexity and divergence give a model the tokens of windows (`edgellm.evaluation.inputs`), as in teacher forcing;
`answers` lets it write. A reference and the model that is compared with it need not be open at the same time, for which
a device may have no room: `record_logits` keeps the reference's whole distributions in a temporary file.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.engines.closing import Closing
from edgellm.engines.errors import at_place
from edgellm.errors import EngineError, MissingDependencyError, RequestError
from edgellm.evaluation.inputs import Example, Window
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.requests import Response
    from edgellm.sampling_params import SamplingParams
    from edgellm.text.tokenizer import Tokenizer

#: Gets how much is done, and how much there is.
Progress = Callable[[int, int], None]
#: The scores of `rouge`, as rouge-score names them.
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
_FLOAT32 = np.dtype(np.float32)
#: So many logits are looked at at a time: what processors keep near them.
_MOST_VALUES = 1 << 20


@dataclass(frozen=True)
class Perplexity:
    """The mean negative log-likelihood of `tokens` tokens, in nats."""

    tokens: int
    mean_negative_log_likelihood: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(min(self.mean_negative_log_likelihood, 709.0))

    @classmethod
    def of(cls, losses: np.ndarray) -> Perplexity:
        """The perplexity of the negative log-likelihoods of tokens."""
        return cls(len(losses), float(losses.mean()))


def perplexity(
    llm: LLM, windows: Sequence[Window], adapter: str | None = None, progress: Progress | None = None
) -> Perplexity:
    """How well a model predicts the tokens that count, with the LoRA adapter `adapter` (None: without one)."""
    losses: list[np.ndarray] = []
    _score(llm, windows, lambda logits, tokens: losses.append(_losses(logits, tokens)), adapter, progress)
    return Perplexity.of(np.concatenate(losses))


class RecordedLogits(Closing):
    """A reference's logits at the tokens of `windows` that count, in a temporary file of 4 bytes for each token and
    each entry of the vocabulary; close it, or use it as a context manager. `vocabulary` are the texts of all ids."""

    def __init__(self, windows: Sequence[Window], vocabulary: Sequence[str | None]) -> None:
        """Raises RequestError where the folder for temporary files has no room."""
        self.windows, self.vocabulary = list(windows), list(vocabulary)
        tokens, folder = sum(len(window.counted) for window in windows), tempfile.gettempdir()
        needed = tokens * len(vocabulary) * _FLOAT32.itemsize
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise RequestError(
                f"the reference's logits take {needed >> 20} MiB, {free >> 20} MiB are free in {folder}: name another "
                "folder with TMPDIR, or take fewer tokens"
            )
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`

    def append(self, logits: np.ndarray) -> None:
        """Keep the logits [n, V] float32 that the next tokens are drawn from."""
        self._file.write(logits.tobytes())

    def rewind(self) -> None:
        """Let `read` begin with the first token again."""
        self._file.seek(0)

    def read(self, count: int) -> np.ndarray:
        """The next logits [count, V] float32."""
        size = len(self.vocabulary)
        data = self._file.read(count * size * _FLOAT32.itemsize)
        return np.frombuffer(data, _FLOAT32).reshape(count, size)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


def vocabulary_of(tokenizer: Tokenizer, size: int) -> list[str | None]:
    """The text of each id of a model with so many logits; None for one that the tokenizer has not."""
    return [tokenizer.id_to_token(token_id) for token_id in range(size)]


def check_same_vocabulary(reference: Sequence[str | None], found: Sequence[str | None]) -> None:
    """Raise RequestError where two models do not have the same tokens for the same ids."""
    difference = ""
    if len(reference) != len(found):
        difference = f"the reference has {len(reference)} tokens, the model {len(found)}"
    elif reference != found:
        token_id = next(index for index, text in enumerate(reference) if text != found[index])
        one, other = reference[token_id], found[token_id]
        difference = f"token {token_id} is {one!r} in the reference and {other!r} in the model"
    if difference:
        raise RequestError(f"the vocabularies differ: {difference}; expected an engine directory of the same model")


def record_logits(
    llm: LLM, windows: Sequence[Window], adapter: str | None = None, progress: Progress | None = None
) -> RecordedLogits:
    """The logits of a reference, for `divergence`."""
    recorded = RecordedLogits(windows, vocabulary_of(llm.tokenizer, llm.directory.config.vocab_size))
    try:
        _score(llm, windows, lambda logits, tokens: recorded.append(logits), adapter, progress)
    except BaseException:
        recorded.close()
        raise
    return recorded


@dataclass(frozen=True)
class Difference:
    """A place where two models' likeliest tokens differ: token `position` of window number `window`, and by how much
    the reference's best logit exceeds its second best."""

    window: int
    position: int
    reference_token: int
    token: int
    margin: float


@dataclass(frozen=True)
class Divergence:
    """How far a model's next-token distributions are from a reference's, over `tokens` tokens.

    Mean, 99th percentile and maximum of KL(reference || model), in nats; the share of tokens where both have the same
    likeliest token (of equal logits the lowest id), and all `differences`; both perplexities.
    """

    tokens: int
    mean: float
    percentile_99: float
    maximum: float
    equal_share: float
    reference: Perplexity
    model: Perplexity
    differences: tuple[Difference, ...] = field(repr=False)


def divergence(
    llm: LLM, recorded: RecordedLogits, adapter: str | None = None, progress: Progress | None = None
) -> Divergence:
    """Compare a model with a reference, whose logits are `recorded`, over the same tokens.

    Raises RequestError where the vocabularies differ.
    """
    check_same_vocabulary(recorded.vocabulary, vocabulary_of(llm.tokenizer, llm.directory.config.vocab_size))
    recorded.rewind()
    losses: list[np.ndarray] = []
    expected: list[np.ndarray] = []
    divergences: list[np.ndarray] = []
    differences: list[Difference] = []
    places = ((n, i) for n, window in enumerate(recorded.windows) for i in range(window.first, len(window.token_ids)))

    def take(logits: np.ndarray, tokens: np.ndarray) -> None:
        reference = recorded.read(len(logits))
        expected.append(_losses(reference, tokens))
        losses.append(_losses(logits, tokens))
        divergences.append(_divergences(reference, logits))
        best, found = reference.argmax(1), logits.argmax(1)
        for row, place in zip(range(len(logits)), places, strict=False):
            if best[row] != found[row]:
                second, first = np.partition(reference[row], -2)[-2:]
                pair = int(best[row]), int(found[row])
                differences.append(Difference(*place, *pair, float(first) - float(second)))

    _score(llm, recorded.windows, take, adapter, progress)
    values = np.concatenate(divergences)
    return Divergence(
        len(values),
        float(values.mean()),
        float(np.percentile(values, 99)),
        float(values.max()),
        1 - len(differences) / len(values),
        Perplexity.of(np.concatenate(expected)),
        Perplexity.of(np.concatenate(losses)),
        tuple(differences),
    )


def answers(
    llm: LLM,
    examples: Sequence[Example],
    params: SamplingParams,
    adapter: str | None = None,
    progress: Progress | None = None,
) -> list[Response]:
    """A model's own answers, as many computed at a time as its engines hold. Raises RequestError that names the
    example for one that it cannot take."""
    found: list[Response] = []
    running: deque[Any] = deque()

    def finish() -> None:
        found.append(running.popleft().result())
        if progress is not None:
            progress(len(found), len(examples))

    try:
        for example in examples:
            with at_place(example.place, RequestError):
                running.append(llm.submit(Request(messages=list(example.messages), params=params, adapter=adapter)))
            if len(running) > llm.directory.limits.max_batch:
                finish()
        while running:
            finish()
    finally:
        for generation in running:
            generation.cancel()
    return found


def exact_match(texts: Sequence[str], expected: Sequence[str]) -> list[bool]:
    """Whether each text is the expected one; spaces and line ends around both are left out."""
    return [text.strip() == other.strip() for text, other in zip(texts, expected, strict=True)]


def rouge(texts: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """The mean F-measure of ROUGE-1, -2 and -L (`ROUGE_TYPES`), with Porter's stemmer; raises MissingDependencyError
    where rouge-score is not installed."""
    scorer = rouge_scorer()
    scores = [scorer.score(other, text) for text, other in zip(texts, expected, strict=True)]
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in ROUGE_TYPES}


def rouge_scorer() -> Any:
    """The scorer of `rouge`."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingDependencyError(
            f"ROUGE needs rouge-score, which does not load ({error}). Install it with pip install '.[eval]' in "
            "EdgeLLM's checkout, or with pip install 'rouge-score>=0.1.2'"
        ) from error
    return RougeScorer(list(ROUGE_TYPES), use_stemmer=True)


def _score(
    llm: LLM,
    windows: Sequence[Window],
    take: Callable[[np.ndarray, np.ndarray], None],
    adapter: str | None,
    progress: Progress | None,
) -> None:
    """Let `take` see, in the order of the tokens that count, some logits [n, V] and the tokens [n] drawn from them."""
    if not windows:
        raise RequestError("there are no windows: expected at least one, as text_windows makes them of a text")
    counted = np.asarray([token_id for window in windows for token_id in window.counted])
    done, left = 0, False

    def take_block(block: np.ndarray) -> None:
        nonlocal done
        if left:
            raise RequestError("nobody waits for the logits any more")
        if not np.isfinite(block).all():
            raise EngineError(
                f"{llm.directory.path}: logits are not finite: its weights, or what quantized them, are at fault, or "
                "its activations are too large for its dtype"
            )
        rows = max(1, _MOST_VALUES // block.shape[1])
        for row in range(0, len(block), rows):
            logits = block[row : row + rows]
            take(logits, counted[done : done + len(logits)])
            done += len(logits)
        if progress is not None:
            progress(done, len(counted))

    following = SpecDecodeRuntime.following_logits
    try:
        for window in windows:  # a call for each: what is asked of the model meanwhile comes between
            ids, first = window.token_ids, window.first
            llm.call(partial(following, token_ids=ids, first=first, take=take_block, adapter=adapter)).result()
    finally:
        left = True  # an interrupt ends what is under way, too


def _losses(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The negative log-likelihoods [n] float64 of `tokens` [n]."""
    shifted, _, sums = _exponentials(logits)
    return np.log(sums) - shifted[np.arange(len(tokens)), tokens]


def _divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || model) [n] float64 of logits [n, V]: of equal logits exactly 0."""
    expected, weights, sums = _exponentials(reference)
    found, _, found_sums = _exponentials(logits)
    means = (weights * (expected - found)).sum(1, dtype=np.float64) / sums
    return np.maximum(means - np.log(sums) + np.log(found_sums), 0.0)


def _exponentials(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [n, V] float32 less the largest of their row, their exponentials, and the sums [n] float64 of these: the
    largest have the smallest errors."""
    shifted = logits - logits.max(1, keepdims=True)
    weights = np.exp(shifted)
    return shifted, weights, weights.sum(1, dtype=np.float64)
