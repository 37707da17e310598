"""Memory that other libraries read without a copy: arrays of DLPack's protocol, by ctypes alone.

The protocol and the structures are those of DLPack (dlpack.h, version 0.8, which every later reader takes) and of the
Python array API: `array.__dlpack__()` gives a capsule named "dltensor"; who takes it renames it, and calls its deleter
when done. NumPy's own arrays cannot stand for a GPU's memory, so both kinds of memory take this one way.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, Array, DeviceArray

#: DLPack's numbers for memory of the host and of a GPU, and for kinds of values (4: bfloat16).
CPU, CUDA = 1, 2
_KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
_NAME = b"dltensor"


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ManagedTensor(ctypes.Structure):
    """DLManagedTensor, with the structures in it spread out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *(("device_kind", ctypes.c_int32), ("device", ctypes.c_int32), ("dimensions", ctypes.c_int32)),
        *(("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        *(("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", _Deleter)),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, _Deleter]
#: Readers let go while an error is under way, too, as where they refuse what they were given; no other function can be
#: called then. This one raises that error, where there is one, so that what has to be done is, behind `finally`. ctypes
#: writes it to standard error; whoever called the reader may get a SystemError in its place.
_raise_what_is_under_way = ctypes.pythonapi.PyErr_Occurred
_raise_what_is_under_way.restype = ctypes.c_void_p

#: What capsules under way need, by the address of their tensor: itself, its shape and strides, and the array.
_under_way: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _delete(address: int) -> None:
    """The reader is done with a tensor; it may say so from any thread."""
    try:
        _raise_what_is_under_way()
    finally:
        _under_way.pop(address, None)


@_Deleter
def _drop(capsule: int) -> None:
    """A capsule goes; where nobody has taken its tensor, that goes, too."""
    try:
        _raise_what_is_under_way()
    finally:
        if _is_valid(capsule, _NAME):
            _delete(_pointer(capsule, _NAME))


for _function in (_delete, _drop):  # readers may call them while Python is being taken apart
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_function))


class SharedArray:
    """A view of an `array`, NumPy's or a GPU's, of `shape` of its elements along each axis, of the last from number
    `first` on, that `np.from_dlpack`, `torch.from_dlpack` and others read where it is. It is not to be written. `gpu`
    is the index of the GPU that it is on, None: the host.

    `strides` are in elements, `dtype` a key of `ITEM_SIZES`. It, and everything that was made of it, keep `owner`.
    """

    def __init__(self, array: Array, shape: tuple[int, ...], owner: object, gpu: int | None, first: int = 0) -> None:
        self.shape, self.dtype = shape, str(array.dtype)
        start = array.pointer if isinstance(array, DeviceArray) else array.ctypes.data
        self.pointer = start + first * ITEM_SIZES[self.dtype]
        self.strides = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))
        self._device, self._kept = (CPU, 0) if gpu is None else (CUDA, gpu), (array, owner)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The kind of memory and the device's number, as DLPack counts: (1, 0) the host, (2, 0) the first GPU."""
        return self._device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule. All that made the values was done before this object was, so that any `stream` may read them at
        once. Raises BufferError where another device, or a copy, is asked for."""
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError(
                f"this memory is of the device {self._device} and is not copied: copy what you read of it"
            )
        places = ctypes.c_int64 * len(self.shape)
        sizes = places(*self.shape), places(*self.strides)
        shape, strides = (ctypes.cast(each, ctypes.POINTER(ctypes.c_int64)) for each in sizes)
        value = _KINDS[self.dtype.rstrip("0123456789")], 8 * ITEM_SIZES[self.dtype], 1
        managed = ManagedTensor(self.pointer, *self._device, len(self.shape), *value, shape, strides, 0, None, _delete)
        address = ctypes.addressof(managed)
        _under_way[address] = (managed, sizes, self)
        return _new(address, _NAME, _drop)
