"""NVIDIA's NCCL gathers what ranks of one process have on each GPU, also where one does not reach another's memory.

Of its calls a dozen are used, and none that adds: the order of a sum would be NCCL's own. Variables that it reads
(`NCCL_...`) stay as they are set.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.nvrtc import wheel_folders

#: The oldest release that is taken, as `ncclGetVersion` counts.
OLDEST = 21800
#: Of nccl.h: results that are no error, and the type of what is brought.
_SUCCESS, _IN_PROGRESS, _UINT8 = 0, 7, 1
_NAME, _INSTALL = "libnccl.so.2", "Install it with: pip install '.[nccl]' in EdgeLLM's checkout"
_ARRAYS = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
#: Arguments of each call, all of which give a result but those of the texts.
CALLS = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetErrorString": (ctypes.c_int,),
    "ncclGetLastError": (ctypes.c_void_p,),
    "ncclCommInitAll": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclCommAbort": (ctypes.c_void_p,),
    "ncclCommDestroy": (ctypes.c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # from, to, elements, their type, of a broadcast whose they are, communicator, stream
    "ncclAllGather": (*_ARRAYS, ctypes.c_void_p, ctypes.c_void_p),
    "ncclBroadcast": (*_ARRAYS, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
}


def _places() -> Iterator[str]:
    """Where the library may be: of the extra `nccl`, an installed PyTorch's, at last what the system's loader knows."""
    folders = [folder / "nccl" / "lib" for folder in wheel_folders()]
    torch = importlib.util.find_spec("torch")  # which is not imported
    for place in () if torch is None else torch.submodule_search_locations or ():
        folders += [Path(place).parent / "nvidia" / "nccl" / "lib", Path(place) / "lib"]
    yield from (str(folder / _NAME) for folder in folders if (folder / _NAME).is_file())
    yield _NAME


class NcclLibrary:
    """The first that is found: where (`path`), its release (`version`), and its `CALLS`."""

    def __init__(self) -> None:
        """Raises MissingDependencyError that says what was looked for, or which library is no NCCL or too old."""
        self.path = next(_places())
        try:
            self._library = ctypes.CDLL(self.path)
            for name, arguments in CALLS.items():
                call = getattr(self._library, name)
                call.argtypes = arguments
                call.restype = ctypes.c_char_p if "Error" in name and "Async" not in name else ctypes.c_int
        except (OSError, AttributeError) as error:
            raise MissingDependencyError(
                f"{self.path} does not load as NCCL ({error}), by which GPUs share a model that do not reach each "
                "other's memory. It is looked for in the wheel nvidia-nccl-cu13 (or -cu12), in an installed PyTorch, "
                f"and by the system's loader. {_INSTALL}"
            ) from error
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version, oldest = map(_release, (number.value, OLDEST))
        if number.value < OLDEST:
            raise MissingDependencyError(f"{self.path} is NCCL {self.version}; expected {oldest} or later. {_INSTALL}")

    def call(self, name: str, *arguments: object) -> None:
        """Raises KernelError with what NCCL says of a call that fails."""
        result = getattr(self._library, name)(*arguments)
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise KernelError(f"{name} of NCCL failed: {self.said(result)}")

    def said(self, result: int) -> str:
        """What NCCL calls a result, and its last warning."""
        texts = self._library.ncclGetErrorString(result), self._library.ncclGetLastError(None)
        return ": ".join(text.decode(errors="replace").strip() for text in texts if text)


def _release(number: int) -> str:
    """2.18.0 of 21800."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class NcclRank(NamedTuple):
    """What one rank begins, all within a group, in memory of which it takes addresses."""

    library: NcclLibrary
    communicator: int | None
    stream: int

    def gather(self, source: int, target: int, nbytes: int) -> None:
        """`target` [ranks, nbytes] becomes what all have at `source`."""
        self.library.call("ncclAllGather", source, target, nbytes, _UINT8, self.communicator, self.stream)

    def broadcast(self, root: int, place: int, nbytes: int) -> None:
        """So many bytes at `place` become what the rank `root` has at its own."""
        self.library.call("ncclBroadcast", place, place, nbytes, _UINT8, root, self.communicator, self.stream)


class Communicators:
    """One rank on each of several GPUs, all of this thread: what they begin stands in a `group`, whole."""

    def __init__(self, gpus: Sequence[int]) -> None:
        """`gpus`: indices, no two alike. Raises MissingDependencyError without the library, or KernelError."""
        self.library = NcclLibrary()
        self._ranks = (ctypes.c_void_p * len(gpus))()
        self.library.call("ncclCommInitAll", self._ranks, len(gpus), (ctypes.c_int * len(gpus))(*gpus))
        self._held, self._lock = True, threading.Lock()

    def rank(self, rank: int, stream: int) -> NcclRank:
        """What a rank enqueues on a stream, of which this is the handle."""
        return NcclRank(self.library, self._ranks[rank], stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Within, each rank begins its part of a collective, which starts at the end. Raises KernelError, also when
        they have ended."""
        with self._lock:
            if not self._held:
                raise KernelError("the communicators of NCCL have ended")
            self.library.call("ncclGroupStart")
            try:
                yield
            finally:
                self.library.call("ncclGroupEnd")

    def failure(self) -> tuple[int, str] | None:
        """A rank of which NCCL has found that it failed, and how."""
        for rank, communicator in enumerate(self._ranks if self._held else ()):
            found = ctypes.c_int()
            self.library.call("ncclCommGetAsyncError", communicator, ctypes.byref(found))
            if found.value not in (_SUCCESS, _IN_PROGRESS):
                return rank, self.library.said(found.value)
        return None

    def abort(self) -> None:
        """End what runs, whoever waits for it; returns when no graph holds a collective any more."""
        self._end("ncclCommAbort")

    def close(self) -> None:
        """Free the communicators once nothing runs and no graph holds a collective: later, and in a thread of its own,
        where one does still."""
        ending = threading.Thread(target=self._end, args=("ncclCommDestroy",), name="edgellm-nccl", daemon=True)
        ending.start()
        ending.join(5.0)

    def _end(self, name: str) -> None:
        # The last call frees, so no group may be under way: one that is not done by then waits for a stream that is
        # full of what is to be ended.
        locked = self._lock.acquire(timeout=1.0)
        held, self._held = self._held, False
        if locked:
            self._lock.release()
        for communicator in self._ranks if held else ():
            self.library.call(name, communicator)
