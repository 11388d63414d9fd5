"""The C functions behind builtin functions and methods of torch, in the structs of CPython that refer to them.

A builtin function is replaced in place, so that it is also replaced for those who have imported it by name.
"""

import ctypes
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch

from .patcher import expect
from .private_names import tensor_base

_VARARGS, _KEYWORDS, _FASTCALL = 0x1, 0x2, 0x80
_CALLERS = {_VARARGS | _KEYWORDS: "PyObject_Call", _FASTCALL | _KEYWORDS: "PyObject_Vectorcall"}
"""By a function's flags: the function of Python's C API that calls an object with arguments in the same form."""


class _Definition(ctypes.Structure):  # PyMethodDef
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Method(ctypes.Structure):  # PyMethodDescrObject
    _fields_ = (
        ("head", ctypes.c_byte * object.__basicsize__),
        ("names", ctypes.c_void_p * 3),
        ("definition", ctypes.POINTER(_Definition)),
    )


def _data_ptr() -> Callable[[torch.Tensor], int]:
    """Return ``torch.Tensor.data_ptr`` as it is now, which hooks do not change."""
    method = _Method.from_address(id(vars(tensor_base)["data_ptr"]))
    function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(
        method.definition.contents.function
    )
    return lambda tensor: function(tensor, None)


const_data_ptr: Callable[[torch.Tensor], int] = getattr(tensor_base, "const_data_ptr", None) or _data_ptr()
"""Return the address of a tensor's memory, to read it, without the hooks, which take ``data_ptr()`` for a write."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to read it: polycast does not take this for a write.

    It must not be used longer than the tensor.
    """
    if tensor.nbytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(const_data_ptr(tensor))
    return memoryview(memory).cast("B")


class _Target(ctypes.Structure):
    _fields_ = (("definition", ctypes.POINTER(_Definition)), ("self", ctypes.c_void_p))


class _Function(ctypes.Structure):  # the beginning of PyCFunctionObject
    _fields_ = (("head", ctypes.c_byte * object.__basicsize__), ("target", _Target))


_kept: list[object] = []
"""Definitions that are or were in place: other threads may still be in a call of one that was replaced."""


class Builtin:
    """A builtin function, which calls its attribute ``replacement`` while that is set; it stays the same object.

    Attributes:
        original: a function that always does what the builtin did.
    """

    def __init__(self, function: Any) -> None:
        expect(isinstance(function, BuiltinFunctionType), f"{function!r} is not a builtin function")
        before = _Target.from_buffer_copy(_Function.from_address(id(function)).target)
        definition = before.definition.contents
        expect(definition.name == function.__name__.encode(), f"{function!r} has another layout")
        expect(definition.flags in _CALLERS, f"{function!r} has the flags {definition.flags:#x}")
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Definition), ctypes.py_object, ctypes.py_object)(
            ("PyCFunction_NewEx", ctypes.pythonapi)
        )
        original = make(before.definition, function.__self__, function.__module__)
        vars(self).update(function=function, before=before, original=original)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __setattr__(self, name: str, replacement: Any) -> None:
        before = self.before.definition.contents
        caller = ctypes.cast(getattr(ctypes.pythonapi, _CALLERS[before.flags]), ctypes.c_void_p).value
        definition = _Definition(before.name, caller, before.flags, before.doc)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(replacement))  # `self` is a strong reference
        _kept.append(definition)
        _Function.from_address(id(self.function)).target = _Target(ctypes.pointer(definition), id(replacement))
        vars(self)[name] = replacement

    def __delattr__(self, name: str) -> None:
        _Function.from_address(id(self.function)).target = self.before
        del vars(self)[name]
