"""torch's own autocast class, in place of polycast's: in TorchScript, and in graphs.

A scripted region does not change the dispatcher's state. A pass of the JIT finds regions in a graph by the qualified
name of their class, and inserts casts around the ops between. So a region in a scripted function has to be of torch's
class; it is then compiled, optimized and saved as torch's is.
"""

import torch

from ..torch_internals.private_names import script_name

TorchAutocast = torch.amp.autocast_mode.autocast


class UnpatchedAutocast(TorchAutocast):
    """A region of torch's own, even while ``patch_torch`` has replaced the methods of torch's class."""

    __init__ = TorchAutocast.__init__
    __enter__ = TorchAutocast.__enter__
    __exit__ = TorchAutocast.__exit__


class ScriptedAsTorch:
    """An attribute that makes TorchScript take a class for ``torch.autocast``.

    TorchScript looks up a class by its qualified name, which is ``_jit_override_qualname`` if the class has that. It
    would compile the class itself, not torch's; so reading the attribute compiles torch's class, and functions that are
    never scripted do not pay for it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type) -> str:
        # A subclass may have methods of its own.
        if owner is not self._owner:
            raise AttributeError(f"{owner.__name__} has no {self._name}: TorchScript is to compile its own methods")
        name = script_name(TorchAutocast)
        if name is None:
            raise RuntimeError(
                f"torch.jit.script of this torch ({torch.__version__}) has no way to compile a region of polycast: use "
                "torch.autocast in functions that are scripted."
            )
        return name
