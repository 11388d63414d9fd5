"""What torch.jit.script makes of polycast.autocast: torch's own autocast class.

A scripted region does not touch the dispatcher's state. The JIT has a pass of its own that finds regions in a graph by
the qualified name of their class, and puts casts around the ops between. So a region in a scripted function has to be
of torch's class; it is then compiled, refused, optimized and saved as torch's is.
"""

from typing import Any

import torch

from .torch_autocast import TorchAutocast


class ScriptedAsTorch:
    """The attribute of a class by which TorchScript takes it for ``torch.autocast``.

    TorchScript looks a class up by its qualified name, which it asks of the class as ``_jit_override_qualname``; torch
    uses that for modules that it traces. It compiles the class that it was asked about and not the one of that name, so
    torch's is compiled at the question: not before, and not for functions that are never scripted.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type) -> str:
        # The methods of a subclass may do anything, which torch's class would not.
        if owner is not self._owner:
            raise AttributeError(f"{owner.__name__} has no {self._name}: TorchScript is to compile its own methods")
        jit: Any = torch.jit
        sources: Any = torch._sources
        compiled = jit._state._get_script_class(TorchAutocast)
        if compiled is None:
            compiled = jit._script._recursive_compile_class(TorchAutocast, sources.fake_range())
        name: str = compiled.qualified_name()
        return name
