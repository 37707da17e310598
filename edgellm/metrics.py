"""What a model has done so far: as a dictionary, and in the text form that Prometheus reads."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from edgellm.requests import Response
from edgellm.snapshots.kept_on_host import KeptRows

#: Upper bounds of the histograms' buckets in seconds: 1, 2.5 and 5 in each decade from 0.5 ms on.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)

#: Values of one metric, by what follows its name.
Samples = Mapping[str, float]
_HISTOGRAMS = {
    "queue_seconds": "Time that a request waited for a free slot.",
    "time_to_first_token_seconds": "Time from a request's acceptance to its first token.",
    "step_gap_seconds": "Time between the steps that gave a request tokens.",
    "preempted_seconds": "Time that a request which gave way to others waited for them.",
    "request_seconds": "Time from a request's acceptance to its end.",
}
#: Counts of a stage; seconds of generation go from first token to last.
_Counts = dict[str, float]
_GENERATION: _Counts = {"requests": 0, "tokens": 0, "seconds": 0.0}
#: Besides, of answers that might be drafted, by a draft model, from what was said or what rules force.
_DRAFTED: _Counts = {"rounds": 0, "plain_steps": 0, "drafted_tokens": 0, "accepted_tokens": 0}


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The least bucket bound (math.inf: beyond the last) that `share` of the values do not exceed; None: none."""
        counted = zip((*self.bounds, math.inf), self.counts, accumulate(self.counts), strict=True)
        return next((bound for bound, count, seen in counted if count and seen >= share * self.count), None)

    def samples(self) -> Samples:
        """As Prometheus reads it: how many values each bound is not exceeded by, their sum and their number."""
        bounds, totals = (*self.bounds, math.inf), accumulate(self.counts)
        buckets = {f'_bucket{{le="{_number(bound)}"}}': total for bound, total in zip(bounds, totals, strict=True)}
        return {**buckets, "_sum": self.total, "_count": self.count}

    def snapshot(self) -> dict[str, Any]:
        """Count, sum, mean, and the bounds below which half, 95 % and 99 % of the values lie."""
        count = self.count
        mean = self.total / count if count else None
        shares = {f"p{round(share * 100)}": self.quantile(share) for share in (0.5, 0.95, 0.99)}
        return {"count": count, "sum": self.total, "mean": mean, **shares}


class Metrics:
    """Counts since the model was opened; any thread may count and read.

    Those of the stages are over the requests that got tokens.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may cancel a request, and count that, in the midst of it
        self._requests = {"accepted": 0, "refused": 0, "failed": 0}
        self._finished: dict[str, int] = {}
        self._counts = {"rounds": 0, "steps": 0, "tokens": 0}
        self._preemptions = {"kept": 0, "recomputed": 0, "kept_rows": 0, "kept_bytes": 0, "by_equals": 0}
        self._stages: dict[str, _Counts] = {
            # Of all prompts' tokens some are reused from KV rows; the seconds are those of the rest.
            "prefill": {"prompt_tokens": 0, "reused_tokens": 0, "seconds": 0.0},
            "vanilla_generation": {**_GENERATION},
            "eagle_generation": _GENERATION | _DRAFTED,
            # Images of a history count again with each turn; those that had been encoded before are reused.
            "multimodal": {"images": 0, "image_tokens": 0, "seconds": 0.0, "reused_images": 0},
            "speech": {"sounds": 0, "audio_tokens": 0, "seconds": 0.0, "reused_sounds": 0},
            "embedding": {"texts": 0, "tokens": 0, "seconds": 0.0},
        }
        self._adapters: dict[str, _Counts] = {}
        self._histograms = {name: Histogram() for name in _HISTOGRAMS}

    def accepted(self) -> None:
        """A request has joined the queue."""
        with self._lock:
            self._requests["accepted"] += 1

    def refused(self) -> None:
        """A request was turned away."""
        with self._lock:
            self._requests["refused"] += 1

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count what is raised as a request that was turned away."""
        try:
            yield
        except Exception:
            self.refused()
            raise

    def round(self) -> None:
        """The engine has computed a round."""
        with self._lock:
            self._counts["rounds"] += 1

    def stepped(self, requests: int, tokens: int) -> None:
        """So many requests have got so many tokens together, of a round or before one."""
        with self._lock:
            self._counts["steps"] += requests
            self._counts["tokens"] += tokens

    def preempted(self, kept: KeptRows | None, by_equal: bool) -> None:
        """A request gave way to another one, of another client where that is an equal; its rows are kept, or will be
        computed again (None)."""
        with self._lock:
            self._preemptions["by_equals"] += by_equal
            self._preemptions["recomputed" if kept is None else "kept"] += 1
            if kept is not None:
                self._preemptions["kept_rows"] += kept.rows
                self._preemptions["kept_bytes"] += kept.memory.nbytes

    def staged(self, stage: str, **counts: float) -> None:
        """So much more was done in a stage, by the names that its counts have."""
        with self._lock:
            _add(self._stages[stage], counts)

    def ended(self, response: Response | None, adapter: str | None = None) -> None:
        """A request, which was asked of a LoRA adapter (None: of none), has ended with a response, or failed."""
        with self._lock:
            if response is None:
                self._requests["failed"] += 1
                return
            reason = response.finish_reason
            self._finished[reason] = self._finished.get(reason, 0) + 1
            if response.usage.completion_tokens:
                self._count(response, adapter)
            self._histograms["request_seconds"].add(response.timings.total_seconds)

    def _count(self, response: Response, adapter: str | None) -> None:
        usage, timings, stages = response.usage, response.timings, self._stages
        prompt = {"prompt_tokens": usage.prompt_tokens, "reused_tokens": usage.reused_tokens}
        _add(stages["prefill"], prompt | {"seconds": timings.prefill_seconds})
        answer: _Counts = {"requests": 1, "tokens": usage.completion_tokens, "seconds": timings.decode_seconds}
        if response.drafting is not None:
            answer |= {name: getattr(response.drafting, name) for name in _DRAFTED}
        _add(stages["vanilla_generation" if response.drafting is None else "eagle_generation"], answer)
        if adapter is not None:
            _add(self._adapters.setdefault(adapter, _GENERATION | _DRAFTED), answer)
        self._histograms["queue_seconds"].add(timings.queue_seconds)
        self._histograms["time_to_first_token_seconds"].add(timings.time_to_first_token)
        if timings.preemptions:
            self._histograms["preempted_seconds"].add(timings.preempted_seconds)
        for gap in timings.step_gaps:
            self._histograms["step_gap_seconds"].add(gap)

    def snapshot(self) -> dict[str, Any]:
        """All counts: requests, rounds, the stages, generation under each LoRA adapter, and times."""
        with self._lock:
            return {
                "requests": {**self._requests, "finished": dict(self._finished)},
                **self._counts,
                "preemptions": {**self._preemptions},
                **{name: dict(counts) for name, counts in self._stages.items()},
                "adapters": {name: dict(counts) for name, counts in sorted(self._adapters.items())},
                **{name: histogram.snapshot() for name, histogram in self._histograms.items()},
            }

    def prometheus(self, gauges: Mapping[str, tuple[str, float]] | None = None) -> str:
        """The counts in Prometheus's text exposition format 0.0.4; `gauges` are more values: name to (help, value)."""
        with self._lock:
            families = [(f"{name}_total", "counter", text, samples) for name, text, samples in self._counters()]
            for name, histogram in self._histograms.items():
                families.append((name, "histogram", _HISTOGRAMS[name], histogram.samples()))
        families += [(name, "gauge", text, {"": value}) for name, (text, value) in (gauges or {}).items()]
        return "".join(f"{line}\n" for each in families for line in family(*each))

    def _counters(self) -> Iterator[tuple[str, str, Samples]]:
        """Name, help and samples of each counter."""
        requests = self._requests
        ends = {f'{{outcome="{reason}"}}': count for reason, count in sorted(self._finished.items())}
        yield "requests", "Requests accepted into the queue.", {"": requests["accepted"]}
        yield "requests_refused", "Requests turned away.", {"": requests["refused"]}
        yield "requests_ended", "Requests ended, by outcome.", {**ends, '{outcome="failed"}': requests["failed"]}
        yield "rounds", "Rounds computed, for one or more requests.", {"": self._counts["rounds"]}
        yield "steps", "Times that a request got tokens.", {"": self._counts["steps"]}
        yield "tokens", "Tokens that requests got, as they came.", {"": self._counts["tokens"]}
        gave_way = {f'{{rows="{kind}"}}': self._preemptions[kind] for kind in ("kept", "recomputed")}
        yield "preemptions", "Times that a request gave way to another one.", gave_way
        text = "Times that it did so to another client's of its priority."
        yield "preemptions_by_equals", text, {"": self._preemptions["by_equals"]}
        for name in ("rows", "bytes"):
            text = f"{name.capitalize()} of requests that gave way, kept on the host."
            yield f"preempted_{name}_kept", text, {"": self._preemptions[f"kept_{name}"]}
        for stage, counts in self._stages.items():
            group = stage.removesuffix("_generation")
            for name, value in counts.items():
                text = f"{name.replace('_', ' ').capitalize()} of {group}, over the requests that got tokens."
                yield f"{group}_{name}", text, {"": value}
        adapters = {f'{{adapter="{_escaped(name)}"}}': counts for name, counts in sorted(self._adapters.items())}
        for name in _GENERATION | _DRAFTED if adapters else ():
            text = f"{name.replace('_', ' ').capitalize()} of generation under a LoRA adapter."
            yield f"adapter_{name}", text, {key: counts[name] for key, counts in adapters.items()}


def family(name: str, kind: str, text: str, samples: Samples) -> list[str]:
    """The lines of one metric."""
    lines = [f"# HELP edgellm_{name} {text}", f"# TYPE edgellm_{name} {kind}"]
    return lines + [f"edgellm_{name}{rest} {_number(value)}" for rest, value in samples.items()]


def _add(counts: _Counts, more: Mapping[str, float]) -> None:
    for name, count in more.items():
        counts[name] += count


def _escaped(value: str) -> str:
    """A value as it stands between quotes in a label."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value)
