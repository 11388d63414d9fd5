"""Cast the arguments of a call so that its side effects on them still reach the caller.

A cast is another tensor. So:

- lists, dicts and sets are passed themselves: casts replace their items during the call;
- writes of the call to a cast are copied to the argument, with their autograd history;
- if that is impossible, the call raises.

An ``autograd.Function`` may save its arguments for the backward, including casts. So it gets copies of containers, and
its changes of a copy are applied to the container. Its writes to a cast are lost, as with torch's decorator.

The tensor's version detects writes. Objects other than containers are passed unchanged, and tensors in them are not
cast.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..engine.overlap import CONFLICT, RECORDED, UNWRITTEN, WRITTEN, overlap
from ..engine.reference.rules import is_eligible
from ..torch_internals.private_names import disable_dynamo, is_tracing, version_of
from .cast_containers import ByIdentity, CastCopy, CastInPlace, rebuilt

_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_ITERATORS = ("builtins", "itertools")
"""Modules whose iterators have no other purpose; those of other modules may be files, say."""


class CastArguments:
    """The casts of the arguments of one call.

    Dynamo traces this only as a part of the call, not by itself after a graph break: what one graph knows of a cast,
    another does not.

    Args:
        device_type, dtype: eligible tensors on this device are cast to this dtype.
        of: cast only tensors of this dtype.
        in_place: replace the items of mutable containers, as module rules do. If False, the call gets copies of them,
            as from torch's ``custom_fwd``, and generators in place of iterators of any class.
    """

    __slots__ = ("_casts", "_containers", "_device_type", "_dtype", "_in_place", "_of", "_rebuilt")

    def __init__(
        self, device_type: str, dtype: torch.dtype, in_place: bool = True, of: torch.dtype | None = None
    ) -> None:
        self._device_type, self._dtype, self._in_place, self._of = device_type, dtype, in_place, of
        self._casts = ByIdentity()
        self._containers: ByIdentity | None = None
        self._rebuilt: list[tuple[Any, Any]] = []
        """The items of containers that replace others, with those."""

    @disable_dynamo
    def of(self, value: Any) -> Any:
        """Return `value` with each eligible tensor in it cast, also in mappings, lists, tuples, sets and iterators.

        A mutable container is returned itself, with casts in it until :meth:`restore`, or as a copy.
        """
        if isinstance(value, torch.Tensor):
            return self._cast(value)
        if type(value) in _ATOMS:
            return value
        if isinstance(value, (tuple, frozenset)):
            return rebuilt(value, [self.of(item) for item in value])
        if isinstance(value, ChainMap):  # setting an item would put it into the first map, wherever it was
            maps = self._mutable(value.maps)
            return value if maps is value.maps else _chained(value, maps)
        if isinstance(value, (list, dict, set, MutableMapping)):
            return self._mutable(value)
        if isinstance(value, Mapping):
            items = {key: self.of(item) for key, item in value.items()}
            return value if all(item is value[key] for key, item in items.items()) else items
        if isinstance(value, Iterator) and (not self._in_place or type(value).__module__ in _ITERATORS):
            return (self.of(item) for item in value)
        return value

    @disable_dynamo
    def give_back(self, module: torch.nn.Module, why: str) -> None:
        """Restore containers, and copy writes to casts back to the arguments.

        Args:
            module, why: the called module and the rule that cast its arguments, for error messages.

        Raises:
            RuntimeError: a write cannot be copied back to its argument.
        """
        self.restore()
        if self._casts:
            self._write_back(module, why)

    @disable_dynamo
    def restore(self) -> None:
        """Remove the casts from containers, or apply the changes of their copies."""
        self._in_place = False  # containers that a generator yields after the call are copied
        if self._containers is None:
            return
        originals = ByIdentity()
        for argument, cast in self._casts.items():
            originals.add(cast.tensor, argument)
        for replacement, item in self._rebuilt:
            originals.add(replacement, item)
        for _, each in self._containers.items():
            each.end(originals)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is self._dtype or not is_eligible(tensor, self._device_type):
            return tensor
        if self._of is not None and tensor.dtype is not self._of:
            return tensor
        known: _Cast | None = self._casts.get(tensor)
        if known is not None:
            return known.tensor
        if not is_dynamo_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a tensor made in inference mode has no version
                cast = tensor.detach().to(self._dtype)
        else:
            cast = tensor.to(self._dtype)
        self._casts.add(tensor, _Cast.of(tensor, cast))
        return cast

    def _mutable(self, container: Any) -> Any:
        """Return a mutable container with casts in it, or a copy."""
        if self._containers is None:
            self._containers = ByIdentity()
        known: CastInPlace | CastCopy | None = self._containers.get(container)
        if known is not None:
            return known.passed
        entry = CastInPlace(container) if self._in_place else CastCopy(container)
        self._containers.add(container, entry)  # first, so that it ends even if the rest is interrupted
        entry.begin()
        casts = [self.of(item) for _, item in entry.items]
        changes = [(key, item, cast) for (key, item), cast in zip(entry.items, casts, strict=True) if cast is not item]
        if changes:
            self._rebuilt += [(cast, item) for _, item, cast in changes if not isinstance(item, torch.Tensor)]
            entry.put(changes)
        return entry.passed

    def _write_back(self, module: torch.nn.Module, why: str) -> None:
        casts = [(argument, cast, cast.how_written(argument)) for argument, cast in self._casts.items()]
        written = [each for each in casts if each[2] != UNWRITTEN]
        for argument, cast, how in written:
            for other, _, _ in casts:
                if other is not argument and _overlap(argument, other):
                    raise _refusal(module, why, argument, cast, "it shares memory with another argument that was cast")
            if how == CONFLICT:
                raise _refusal(module, why, argument, cast, "the argument itself was written to, too")
            if not is_tracing() and argument.shape != cast.tensor.shape:
                reason = f"it has the shape {tuple(argument.shape)}, and was resized to {tuple(cast.tensor.shape)}"
                raise _refusal(module, why, argument, cast, reason)
        for argument, cast, how in written:
            with torch.set_grad_enabled(how == RECORDED):
                try:
                    argument.copy_(cast.tensor)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    raise _refusal(module, why, argument, cast, str(error)) from error


class _Cast(NamedTuple):
    """A cast, with the versions of it and its argument when it was made."""

    tensor: torch.Tensor
    version: int = 0
    history: Any = None
    argument_version: int = 0

    @classmethod
    def of(cls, argument: torch.Tensor, cast: torch.Tensor) -> "_Cast":
        """Note the versions of a cast and its argument."""
        if is_dynamo_compiling():
            from ..compilers.casts_in_graphs import note_cast

            note_cast(argument, cast)
            return cls(cast)
        return cls(cast, version_of(cast), cast.grad_fn, version_of(argument))

    def how_written(self, argument: torch.Tensor) -> int:
        """Return how the cast was written since."""
        if is_dynamo_compiling():
            from ..compilers.casts_in_graphs import how_written

            return how_written(argument, self.tensor)
        if version_of(self.tensor) == self.version:
            return UNWRITTEN
        if version_of(argument) != self.argument_version:
            return CONFLICT
        return WRITTEN if self.tensor.grad_fn is self.history else RECORDED


def _chained(chain: ChainMap[Any, Any], maps: list[Any]) -> ChainMap[Any, Any]:
    """Return a copy of a chain, which may have attributes, with other maps."""
    copied = object.__new__(type(chain))
    vars(copied).update(vars(chain), maps=maps)
    return copied


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_dynamo_compiling():
        from ..compilers.casts_in_graphs import overlap_in_graph

        return overlap_in_graph(one, other)
    return overlap(one, other)


def _refusal(module: torch.nn.Module, why: str, argument: torch.Tensor, cast: _Cast, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__} ({why}) wrote to an argument that was cast from {argument.dtype} to "
        f"{cast.tensor.dtype}, and the write cannot be copied back to the argument: {reason}. Give the module an "
        f"argument in {cast.tensor.dtype}, which needs no cast, or let it write to a new tensor."
    )
