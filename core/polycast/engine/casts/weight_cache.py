"""`WeightCache`: the cache of casts and prepacked weights that users create."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from typing_extensions import Self

from ...errors import warn_user
from .. import state
from ..choice import choose_engine, chosen
from ..installation import watch_writes
from ..recipes.prepacking import WRITTEN_UNSEEN, undisturbed
from .cast_cache import CastCache, EntryKind


class WeightCache(CastCache):
    """Casts of weights that outlive regions: inference with float32 weights at nearly the speed of a bfloat16 model.

    Pass one to any regions, on any threads. It caches a cast until the weight changes or is freed, or until the cache
    is cleared or freed. Casts made under ``torch.no_grad`` and ``torch.inference_mode`` are used in grad mode too. On
    the reference engine it stays empty: each use of a weight makes a new cast.

    In-place updates (an optimizer's step, also of a fused one; ``load_state_dict``; a collective), a new
    ``weight.data = ...`` and writes through ``.data`` (``weight.data.add_(1)``) are detected. No cast is cached while
    another object shares the weight's memory and could write to it undetected, such as ``alias = weight.data``.
    Writes of C++ through a raw pointer are not detected: call ``clear()`` after them.

    Args:
        max_bytes: the memory limit for casts and prepacked weights. A new entry evicts the least recently used one,
            if that was not used while the new one was needed as often (16 times for prepacked weights). None: no limit.
        verify: compare the cast with the weight at every hit, to find writes that were not detected. Slow.

    Raises:
        TypeError: `max_bytes` is not an int, or `verify` not a bool.
        ValueError: `max_bytes` is negative.

    Example:
        >>> import torch, polycast
        >>> model, cache = torch.nn.Linear(8, 8), polycast.WeightCache()
        >>> for _ in range(3):
        ...     with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        ...         y = model(torch.ones(1, 8))
        >>> cache.stats().misses, cache.stats().hits
        (2, 4)
    """

    def __repr__(self) -> str:
        engine, stats = chosen(), self.stats()
        if engine is not None and not engine.caches:
            return f"<WeightCache: empty, since the {engine.name} engine caches no weights>"
        entries = stats.entries + stats.packings
        size = (stats.bytes + stats.packed_bytes) / 2**20
        return f"<WeightCache: entries {entries}, MiB {size:.1f}, hits {stats.hits}, misses {stats.misses}>"

    def adopt(
        self,
        weight: torch.Tensor,
        view: tuple[tuple[int, ...], tuple[int, ...], int] | None,
        kind: EntryKind,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Add what was made of a weight elsewhere, such as in another process, given as in an item of `entries()`.

        Args:
            weight: the weight, which has the values that it was made of.
            view: sizes, strides, and the offset from the weight's, of the view that it was made of; None: the weight.
            kind: the dtype of a cast, or the id of a prepacked weight.
            tensors: the cast alone, or the parts of the prepacked weight.

        Raises:
            ValueError: a cast has other sizes or another dtype; or it cannot be cached: there is no room, or something
                may write the weight unseen.
        """
        if isinstance(kind, torch.dtype):
            sizes = tuple(weight.shape) if view is None else tuple(view[0])
            found = [(tuple(each.shape), each.dtype) for each in tensors]
            if found != [(sizes, kind)]:
                raise ValueError(f"tensors must be one of sizes {sizes} and {kind}, got {found}")
        store = state.machine.store(self)

        def attempt() -> bool | None:
            source = weight if view is None else weight.as_strided(view[0], view[1], weight.storage_offset() + view[2])
            return store is None or store.adopt(source, kind, tensors)

        watch_writes()
        with torch.inference_mode(False), torch.no_grad():
            if not undisturbed(weight, attempt):
                room = "" if self.max_bytes is None else f"; or there is no room for it in {self.max_bytes} bytes"
                raise ValueError(f"cannot be cached: {WRITTEN_UNSEEN}{room}")

    def save(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        """Write the casts and prepacked weights of a model to a file, for :meth:`load`.

        The file is written beside `path` and then replaces it, so an interrupted save leaves the old file, and caches
        that were loaded from that go on using it. Its format is that of safetensors.

        Args:
            path: the file; of a symbolic link, the file that it points to is replaced.
            model: the model whose parameters were cast; entries of others are left out. Pass the same to :meth:`load`.

        Raises:
            OSError: the file cannot be written.
            TypeError: `path` is not a path, or `model` not a module.
            ValueError: there is nothing to save, or a backend prepacks weights into tensors that cannot be saved.
            RuntimeError: a weight was written, or the cache cleared, while it was saved.
        """
        _check_model(model)
        from ...policy.manifests import method  # a region needs none

        method("WeightCache.save")(self, Path(path), model)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        max_bytes: int | None = None,
        verify: Literal["all", "sample"] = "all",
    ) -> Self:
        """Return a cache with the casts and prepacked weights of a file, without making them again.

        They are mapped into memory: processes that load the file share it. Writes to a weight drop them, as those that
        were made in this process. On the reference engine the cache is empty, and a UserWarning says so.

        Args:
            path: a file that :meth:`save` wrote.
            model: the model, with the same weights.
            max_bytes: the memory limit of the cache, which the file's contents count for; see :class:`WeightCache`.
            verify: which values of the weights and of the file to compare with digests. ``"all"`` finds the change of
                one element, and reads several GB in a second, if they are in memory. ``"sample"``, for servers, reads
                at most 256 KiB of each tensor: it tells models and checkpoints apart, and leaves weights that are
                mapped and not used on disk. A weight of which only some rows differ is not noticed.

        Raises:
            OSError: the file cannot be read.
            TypeError: `path` is not a path, `model` not a module, or `max_bytes` not an int.
            ValueError: `verify` is another one; `max_bytes` is negative, or less than the file's contents need; the
                file is not a regular file, damaged, of another version of polycast, torch or a backend, or was made of
                other weights or by another kernel; or something else holds the memory of a weight, such as a state
                dict. The message says which.
        """
        _check_model(model)
        if verify not in ("all", "sample"):
            raise ValueError(f"verify must be 'all' or 'sample', got {verify!r}")
        cache = cls(max_bytes)
        from ...policy.manifests import method

        method("WeightCache.load")(cache, Path(path), model, verify)
        engine = choose_engine()
        if not engine.caches:
            warn_user(f"The saved cache was checked and left: the {engine.name} engine caches no weights.")
        return cache


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
