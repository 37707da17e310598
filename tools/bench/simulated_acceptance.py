"""Acceptance of given lengths, for measuring rounds with random weights: all stages run, the acceptance kernel too.

Between verification and acceptance a kernel raises the logits along one path of the tree, as long as a schedule says;
the real acceptance kernel then finds these tokens to be the likeliest and accepts the path.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edgellm.drafting.acceptance import tree_gain
from edgellm.engines.speculation.draft_plan import DraftPlan

#: Rounds after which a schedule begins anew.
SCHEDULE_ROUNDS = 100

_THREADS = 64
_SOURCE = r"""
extern "C" __global__ void force_acceptance(float* logits, const int* tokens, const int* parents, const int* depths,
                                            const int* schedule, const int* bonus, int* round, int nodes,
                                            int vocabulary, int rounds) {
  __shared__ int deepest;
  if (threadIdx.x == 0) deepest = 0;
  __syncthreads();
  const int wanted = schedule[*round % rounds] - 1;
  for (int node = threadIdx.x; node < nodes; node += blockDim.x)
    if (tokens[node] >= 0 && depths[node] <= wanted) atomicMax(&deepest, depths[node] * 1024 + 1023 - node);
  __syncthreads();
  if (threadIdx.x != 0) return;
  int node = deepest == 0 ? 0 : 1023 - deepest % 1024;
  const int last = bonus[*round % rounds];
  if (last >= 0) logits[(long long)node * vocabulary + last] = 1e30f;
  *round += 1;
  while (node > 0) {
    logits[(long long)parents[node] * vocabulary + tokens[node]] = 1e30f;
    node = parents[node];
  }
}
"""


class ForcedAcceptance:
    """A hook for `TreeVerification.before_acceptance` that fixes the accepted length of each round (batch 1), and the
    token behind what is accepted where one is prescribed. On NumPy it computes at once."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._on_host = backend, backend.name == "numpy"
        if not self._on_host:
            module = compiled(_SOURCE, b"force_acceptance.cu", backend.gpu.compute_capability)
            self._function = module.get_function("force_acceptance")
            self._function.prepare("PPPPPPPiii")
        self._schedule, self._bonus = (backend.zeros((SCHEDULE_ROUNDS,), "int32") for _ in range(2))
        self._round = backend.zeros((1,), "int32")

    def use(self, lengths: np.ndarray, bonus: np.ndarray | None = None) -> None:
        """Begin a schedule of `lengths` [SCHEDULE_ROUNDS]: the tokens of each round, the bonus token included, which
        is that of `bonus` [SCHEDULE_ROUNDS] where it is not -1."""
        self._backend.upload(self._schedule, lengths.astype(np.int32))
        last = np.full(SCHEDULE_ROUNDS, -1) if bonus is None else bonus
        self._backend.upload(self._bonus, last.astype(np.int32))
        self._backend.upload(self._round, np.zeros(1, np.int32))

    def __call__(self, tree: Any) -> None:
        """Launch the kernel on a `VerifiedTree`."""
        logits, nodes = tree.logits.logits, tree.nodes
        if self._on_host:
            self._force(logits[0], nodes)
            return
        arrays = (logits, nodes.tokens, nodes.parents, nodes.depths, self._schedule, self._bonus, self._round)
        sizes = (nodes.tokens.shape[1], logits.shape[2], SCHEDULE_ROUNDS)
        pointers = [array.pointer for array in arrays]
        self._function.prepared_async_call((1, 1), (_THREADS, 1, 1), self._backend.stream, *pointers, *sizes)

    def _force(self, logits: np.ndarray, nodes: Any) -> None:
        """As the kernel does."""
        tokens, parents, depths = (each[0] for each in (nodes.tokens, nodes.parents, nodes.depths))
        number = int(self._round[0]) % SCHEDULE_ROUNDS
        reached = [node for node in range(len(tokens)) if tokens[node] >= 0 and depths[node] < self._schedule[number]]
        node = max(reached, key=lambda each: (depths[each], -each), default=0)
        if self._bonus[number] >= 0:
            logits[node, self._bonus[number]] = 1e30
        while node > 0:
            logits[parents[node], tokens[node]] = 1e30
            node = parents[node]
        self._round[0] += 1


def expected_length(acceptance: float, steps: int) -> float:
    """Tokens a round where each depth is accepted with this probability once the one before was."""
    return sum(acceptance**depth for depth in range(steps + 1))


def depth_acceptance(mean: float, steps: int) -> float:
    """The inverse of `expected_length`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, steps) < mean else (low, middle)
    return low


def simulated_mean(plan: DraftPlan, reference: DraftPlan, mean: float) -> float:
    """The mean length to simulate for a plan where `reference`, a tree, has `mean`.

    The same draft seen through a smaller tree or a chain: 1 - a = (1 - a_chain)^gain with the gains by which the
    controller transfers acceptance (`edgellm.drafting.acceptance.tree_gain`). An assumption, for comparing shapes only.
    """
    chain_miss = (1.0 - depth_acceptance(mean, reference.steps)) ** (1.0 / _gain(reference))
    return expected_length(1.0 - chain_miss ** _gain(plan), plan.steps)


def schedule(mean: float, steps: int, seed: int = 0) -> np.ndarray:
    """SCHEDULE_ROUNDS lengths of 1 .. steps + 1 with this mean (to 1 / SCHEDULE_ROUNDS), spread as acceptance is."""
    acceptance = depth_acceptance(mean, steps)
    quantiles = (np.arange(SCHEDULE_ROUNDS) + 0.5) / SCHEDULE_ROUNDS
    tails = acceptance ** np.arange(1, steps + 1)  # how likely at least d drafted tokens are accepted
    lengths = 1 + (quantiles[:, None] < tails).sum(axis=1)
    missing = round(mean * SCHEDULE_ROUNDS) - int(lengths.sum())
    order = np.argsort(lengths, kind="stable") if missing > 0 else np.argsort(-lengths, kind="stable")
    changeable = [i for i in order if 1 <= lengths[i] + math.copysign(1, missing) <= steps + 1]
    lengths[changeable[: abs(missing)]] += int(math.copysign(1, missing)) if missing else 0
    return np.random.default_rng(seed).permutation(lengths)


def _gain(plan: DraftPlan) -> float:
    return 1.0 if plan.kind == "chain" else tree_gain(plan.tree_size - 1, plan.steps)


def compiled(source: str, name: bytes, compute_capability: str) -> Any:
    """A pycuda module of the kernels in `source`, compiled by NVRTC."""
    import pycuda.driver as cuda
    from cuda.bindings import nvrtc

    def checked(result: tuple) -> Any:
        status, *values = result
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise SystemExit(f"compiling the benchmark's kernel failed: {status}")
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name, 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={compute_capability}".encode()]))
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cuda.module_from_buffer(cubin)
