"""The draft tree's kernels on the GPU.

Each kernel may start while the one before it in the stream still runs, and waits for it before it reads anything.
"""

from __future__ import annotations

from functools import lru_cache

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import cuda_header
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule
from edgellm.kernels.launcher import CUDA_TYPES, Launcher, check_workspace
from edgellm.kernels.sampling.contract import ModelTables, StepInputs
from edgellm.kernels.sampling.launcher import EmbeddingTable, split_tables
from edgellm.kernels.tree import contract
from edgellm.kernels.tree.contract import Block, Candidates, Expansion, Level, TreeKernels
from edgellm.kernels.tree.log_softmax import CHUNK

_KEY_BYTES = 8
_THREADS, _EXPAND_THREADS = 512, 1024
#: Threads that share one maximum in `draft_expand`, for few and for many of the best keys.
_LANES_OF_FEW, _LANES_OF_MANY, _FEW = 32, 4, 16
#: Shared memory for the lists that warps merge.
_LIST_BYTES = 32 << 10
#: Up to so many candidates, `draft_verification` keeps their keys, tokens and parents in shared memory.
_KEPT_CANDIDATES, _KEPT_BYTES = 2048, 12


@lru_cache
def tree_source(dtype: str, embedding: EmbeddingTable | None = None) -> ModuleSource:
    """What drafting needs for a model of `dtype`, which may have an embedding that is packed or in pieces."""
    compute = CUDA_TYPES[dtype]
    verifications = (f"draft_verification<{compute}, {kept}>" for kept in ("true", "false"))
    expansion = ("draft_expand", "draft_block_tree") if embedding is None else ()
    return ModuleSource(
        f"tree_{dtype}{'' if embedding is None else embedding.name}",
        (*(("tree/expand.cu",) if expansion else ()), "tree/block.cu", "tree/proposal.cu", "tree/verification.cu"),
        (*expansion, f"draft_block<{compute}>", f"draft_proposal<{compute}>", *verifications),
        (
            ("CHUNK", CHUNK),
            ("EXPAND_THREADS", _EXPAND_THREADS),
            ("TREE_THREADS", _THREADS),
            ("MAXIMUM_TOP_K", contract.MAXIMUM_TOP_K),
            ("MAXIMUM_TREE_TOKENS", contract.MAXIMUM_TREE_TOKENS),
            *(() if embedding is None else embedding.macros),
        ),
        (("tree/arguments.cuh", cuda_header(TreeKernels)),),
    )


class CudaTree(Launcher):
    """See `edgellm.kernels.tree.contract.TreeKernels`; arrays are `DeviceArray`."""

    def __init__(self, module: KernelModule, dtype: str) -> None:
        """Prepares the kernels for a model of `dtype`."""
        super().__init__(module, TreeKernels)
        self._dtype = dtype

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int, block_rows: int = 0) -> int:
        """Bytes of workspace for `expand_frontier`, or `expand_block`; see the contract."""
        if not 1 <= top_k <= contract.MAXIMUM_TOP_K or draft_vocab_size > contract.MAXIMUM_DRAFT_VOCABULARY:
            raise KernelError(
                f"expand_workspace_size: K = {top_k} (draft top-k), draft vocabulary U = {draft_vocab_size}; expected "
                f"1 to {contract.MAXIMUM_TOP_K} and at most {contract.MAXIMUM_DRAFT_VOCABULARY}"
            )
        return _workspace_bytes(batch * max(top_k, block_rows), draft_vocab_size, top_k)

    def expand_frontier(self, level: Level, logits: DeviceArray, candidates: Candidates, expansion: Expansion) -> None:
        arguments = (level, logits, candidates, expansion)
        sizes = self._check("expand_frontier", *arguments)
        _check_workspace("expand_frontier", sizes, expansion)
        self._expand_rows(arguments, sizes)

    def expand_block(self, level: Level, logits: DeviceArray, candidates: Candidates, expansion: Expansion) -> None:
        arguments = (level, logits, candidates, expansion)
        sizes, packed = self._packed("expand_block", *arguments)
        top_k, levels = sizes["K"], level.number
        mergers, list_bytes = _mergers("expand_block", sizes, expansion, levels, sizes["B"] * sizes["n"])
        self._expand_rows(arguments, sizes)
        shared_bytes = (_KEY_BYTES + 4) * levels * top_k + max(list_bytes, _KEY_BYTES * top_k * top_k)
        kernel = Kernel(tree_source(self._dtype), "draft_block_tree")
        self._launch(kernel, (1, sizes["B"]), _THREADS, (packed, mergers), shared_bytes)

    def _expand_rows(self, arguments: tuple, sizes: dict[str, int]) -> None:
        """The best of each chunk of each row of logits, to the workspace."""
        lanes = _LANES_OF_FEW if sizes["K"] <= _FEW else _LANES_OF_MANY
        packed = self._check.pack("expand_frontier", sizes, *arguments)
        shared_bytes = _KEY_BYTES * lanes * (CHUNK // _EXPAND_THREADS) * sizes["K"]
        grid = (_chunks(sizes["U"]), sizes["B"] * sizes["n"])
        kernel = Kernel(tree_source(self._dtype), "draft_expand")
        self._launch(kernel, grid, _EXPAND_THREADS, (packed, lanes), shared_bytes)

    def prepare_block(self, block: Block, token_ids: DeviceArray, tables: ModelTables, inputs: StepInputs) -> None:
        tables, embedding = split_tables(tables)
        sizes, packed = self._packed("prepare_block", block, token_ids, tables, inputs)
        dtype = tables.embedding.dtype
        kernel = Kernel(tree_source(dtype, embedding), f"draft_block<{CUDA_TYPES[dtype]}>")
        self._launch(kernel, (sizes["T"], sizes["B"]), _THREADS, (packed,))

    def prepare_proposal(self, level, committed, tables, candidates, hidden, inputs, expansion):
        tables, embedding = split_tables(tables)
        arguments = (level, committed, tables, candidates, hidden, inputs, expansion)
        sizes, packed = self._packed("prepare_proposal", *arguments)
        top_k, rows = sizes["K"], 1 if level.number == 1 else sizes["K"]
        mergers, list_bytes = _mergers("prepare_proposal", sizes, expansion, rows)
        shared_bytes = (_KEY_BYTES + 4) * rows * top_k + list_bytes + 4 * (rows + (level.number - 1) * top_k)
        dtype = tables.embedding.dtype
        kernel = Kernel(tree_source(dtype, embedding), f"draft_proposal<{CUDA_TYPES[dtype]}>")
        self._launch(kernel, (top_k, sizes["B"]), _THREADS, (packed, mergers), shared_bytes)

    def prepare_verification(self, level, state, tables, candidates, tree, inputs, expansion):
        tables, embedding = split_tables(tables)
        arguments = (level, state, tables, candidates, tree, inputs, expansion)
        sizes, packed = self._packed("prepare_verification", *arguments)
        top_k, count = sizes["K"], contract.candidate_count(level.number, sizes["K"])
        rows = 0 if expansion is None else 1 if level.number == 1 else top_k
        mergers, list_bytes = _mergers("prepare_verification", sizes, expansion, rows)
        keeps = count <= _KEPT_CANDIDATES
        shared_bytes = (_KEY_BYTES + 4) * rows * top_k + list_bytes + 4 * rows + (_KEPT_BYTES * count if keeps else 0)
        dtype = tables.embedding.dtype
        name = f"draft_verification<{CUDA_TYPES[dtype]}, {'true' if keeps else 'false'}>"
        kernel, grid = Kernel(tree_source(dtype, embedding), name), (sizes["T"], sizes["B"])
        self._launch(kernel, grid, _THREADS, (packed, mergers), shared_bytes)


def _chunks(draft_vocab_size: int) -> int:
    return -(-draft_vocab_size // CHUNK)


def _workspace_bytes(rows: int, draft_vocab_size: int, top_k: int) -> int:
    """Bytes of the best keys, the sum and the maximum of each chunk of each row."""
    return rows * _chunks(draft_vocab_size) * (_KEY_BYTES * top_k + 8 + 4)


def _check_workspace(kernel: str, sizes: dict[str, int], expansion: Expansion, rows: int = 0) -> None:
    """`rows`: other than K for each sequence."""
    needed = _workspace_bytes(rows or sizes["B"] * sizes["K"], sizes["U"], sizes["K"])
    check_workspace(kernel, expansion.workspace, needed, 8, "expand_workspace_size")


def _mergers(
    kernel: str, sizes: dict[str, int], expansion: Expansion | None, rows: int, in_workspace: int = 0
) -> tuple[int, int]:
    """How many warps finish an expansion of so many `rows` of a sequence, and bytes of shared memory for the lists that
    they merge; `in_workspace` are the rows of all sequences, if not K of each."""
    if expansion is None:
        return 0, 0
    _check_workspace(kernel, sizes, expansion, in_workspace)
    list_bytes = _KEY_BYTES * _chunks(sizes["U"]) * sizes["level.width"]
    mergers = min(rows, _THREADS // 32, max(1, _LIST_BYTES // list_bytes))
    return mergers, mergers * list_bytes
