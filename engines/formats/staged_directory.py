"""A directory that appears under its name only when it is complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from edgellm.engines.errors import EdgeLLMError
from edgellm.kernels.atomic_write import sync_directory, unfinished_in, unfinished_sibling
from edgellm.kernels.user_paths import resolved

_AT_CURRENT_DIRECTORY = -100  # AT_FDCWD of fcntl.h
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_SPARE_DISK_BYTES = 16 << 20


class StagedDirectory:
    """A hidden sibling of `target` to write into: `path`. `commit` gives it the target's name.

    Leaving the context without a commit, for whatever reason, removes it, and the folders above that were made for it.
    What an earlier process left behind when it was killed is removed on entry. Raises OSError.
    """

    def __init__(self, target: Path) -> None:
        self._target = resolved(target)
        self._lock = -1
        self._above: list[Path] = []

    def __enter__(self) -> StagedDirectory:
        self._above = [folder for folder in self._target.parents if not folder.exists()]
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        while True:
            self.path = unfinished_sibling(self._target)
            self.path.mkdir()
            self._lock = _locked(self.path, fcntl.LOCK_EX)
            if self.path.exists():  # not taken for an abandoned one before it was locked
                return self
            self._unlock()

    def __exit__(self, *exception: object) -> None:
        # After a commit that replaced a directory, this name holds the replaced one.
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()
        for folder in self._above:
            with suppress(OSError):  # one that has something in it stays
                folder.rmdir()

    def commit(self, replace: bool) -> None:
        """Give the directory its name; one that has it is replaced, in one step where the system can. Without `replace`
        only an empty one is; another raises OSError."""
        sync_directory(self.path)
        if not replace or not self._target.exists():
            try:
                self.path.rename(self._target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise OSError(error.errno, "another process made it meanwhile", str(self._target)) from error
        elif not _exchange(self.path, self._target):
            replaced = self.path.with_name(f"{self.path.name}.replaced")
            self._target.rename(replaced)
            try:
                self.path.rename(self._target)
            except BaseException:
                replaced.rename(self._target)
                raise
            replaced.rename(self.path)
        sync_directory(self._target.parent)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)

    def _remove_abandoned(self) -> None:
        for path in unfinished_in(self._target.parent, self._target.name):  # others' stay
            lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock >= 0:  # nobody writes into it any more
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def is_vacant(target: Path) -> bool:
    """Whether nothing is in the way of a new directory: no entry of the name, or an empty directory. Raises OSError for
    a name that cannot be looked up, as a link to itself."""
    try:
        target.stat()
    except FileNotFoundError:
        return True
    return target.is_dir() and not any(target.iterdir())


def holds(target: Path, source: Path) -> bool:
    """Whether `target` is `source` or a folder above it."""
    return resolved(target) in (resolved(source), *resolved(source).parents)


def check_space(folder: Path, needed: int, error_class: type[EdgeLLMError], what: str, or_else: str = "") -> None:
    """Raise an error where the bytes `needed` for `what` and a little more are not free in the nearest existing parent;
    its message ends with what to do, and what else can be done."""
    folder, needed = folder.absolute(), needed + _SPARE_DISK_BYTES
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise error_class(
            f"{folder} has {free >> 20:,} MiB free, {needed >> 20:,} MiB are needed for {what}. Free some space, or "
            f"choose another disk{or_else}"
        )


def is_taken(descriptor: int) -> bool:
    """Whether another process has locked what is open here; else it is locked, until it is closed. Where the file
    system has no locks, as some on a network, nobody is kept apart."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _locked(path: Path, kind: int) -> int:
    """A descriptor of the directory with a lock of this kind, which ends with the process; -1 where there is none to be
    had."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where kernel, file system or C library cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(_AT_CURRENT_DIRECTORY, bytes(first), _AT_CURRENT_DIRECTORY, bytes(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))
