"""`Rounded`: a recipe of the tests of the core, which has none without plugins, and its plan."""

from collections.abc import Sequence
from typing import Literal

import torch

from polycast.plugin import Plan, Recipe, check, recipe_kernels
from polycast.policy.recipe import kinds


class Rounded(Recipe):
    """Products with weights in 8 bits."""

    kind = "rounded"
    avoids_slow_dtypes = " (inference only)"
    plan_class = "tests.core.rounding:RoundedPlan"
    scales: Literal["row", "tensor"] = "row"
    ops: Sequence[str] = ("addmm", "linear", "matmul", "mm")
    min_size: int = 2**16


del kinds["rounded"]  # it is known in the tests of the core only


class RoundedPlan(Plan):
    """Computes an op by the first kernel of the device, and prepacks its weight."""

    def __init__(self, backend, recipe):
        super().__init__(backend, recipe)
        found = recipe_kernels(backend, recipe) if check(backend, recipe) else {}
        self.kernels = {op: offers[0].kernel for op, offers in found.items()}
        self.ids = {op: self.new_id() for op in self.kernels}

    def why_no_kernel(self, op):
        return None if op in self.kernels else self.NO_KERNEL

    def explain(self, op, args, cache, dtype):
        kernel = self.kernels.get(op)
        if kernel is None:
            return self.NO_KERNEL
        reason = self.unsupported_tensor(args, torch.is_grad_enabled()) or kernel.unsupported_reason(*args)
        small = self.SMALL if args[kernel.weight].numel() < self.recipe.min_size else None
        return reason or small or self.Computed()

    def perform(self, op, args, cache, checked):
        if self.in_function():  # which may go backward
            result = self.RECORDS
        else:
            result = self.INTERCEPTED if self.is_intercepted() else self.compute(op, args, cache)
        if result is self.INTERCEPTED and op in self.kernels and self.is_traced():
            result = self.in_graph(op, args, cache)
        elif isinstance(result, str):
            self.notify(op, result)
        return None if isinstance(result, str) else result, None

    def compute(self, op, args, cache):
        reason = self.explain(op, args, cache, None)
        if isinstance(reason, str):
            return reason
        kernel = self.kernels[op]
        prepacked = self.prepacked(args[kernel.weight], cache, self.ids[op], kernel.prepack)
        if not isinstance(prepacked, tuple):
            return prepacked or "the weight cannot be prepacked"
        result = kernel.run(prepacked, *args)
        self.notify(op, None)
        return result
