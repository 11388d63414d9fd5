"""custom_fwd with setup_context finds its classes, although no frame names them."""

import functools
import gc
import operator
import weakref

import pytest
import torch
from torch.autograd import Function

import polycast

pytestmark = pytest.mark.usefixtures("engine")


class Frameless(Function):
    """A Function whose `apply` has no frame that names the class, as from torch 2.14 on."""

    apply = torch._C._FunctionBase.__dict__["apply"]


def doubling(cast_inputs=None):
    @polycast.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
    def forward(x):
        return 2 * x

    return forward


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def noting(seen, decorator=polycast.custom_bwd):
    """Return a decorated backward, which notes the dtype of a product in it."""

    @decorator(device_type="cpu")
    def backward(ctx, gradient):
        seen.append(torch.mm(gradient, gradient).dtype)
        return 2 * gradient

    return backward


def made(forward, seen, bases=(Frameless,), **attributes):
    methods = {"forward": forward, "setup_context": setup_context, "backward": noting(seen), **attributes}
    return type("Double", bases, {name: staticmethod(method) for name, method in methods.items()})


def call(apply, dtype=torch.bfloat16):
    """Call forward in a region and backward outside of it; nothing here names the class."""
    x = torch.ones(2, 2, requires_grad=True)
    with polycast.autocast("cpu", dtype):
        (y,) = map(apply, [x])
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))


def test_a_class_in_a_dict():
    seen = []
    functions = {"double": made(doubling(), seen)}
    for dtype in (torch.bfloat16, torch.float16):
        call(operator.attrgetter("apply")(functions["double"]), dtype)
    assert seen == [torch.bfloat16, torch.float16]


@pytest.mark.slow
def test_a_temporary_class_lives_no_longer_for_it():
    seen, forward, classes = [], doubling(), []
    for _ in range(3):
        cls = made(forward, seen)
        classes.append(weakref.ref(cls))
        apply = cls.apply
        del cls
        call(apply)
        del apply
    gc.collect()
    assert seen == [torch.bfloat16] * 3
    assert [cls() for cls in classes] == [None] * 3


@pytest.mark.parametrize("called_between", [False, True])
def test_two_classes_with_one_forward(called_between):
    first, second, forward = [], [], doubling()
    one = made(forward, first).apply
    if called_between:
        call(one)
    other = made(forward, second).apply
    if not called_between:
        call(one)
    call(other, torch.float16)
    assert (first, second) == ([torch.bfloat16], [torch.float16])


def test_a_class_that_is_given_its_forward_later():
    seen, forward = [], doubling()
    cls = made(None, seen)
    assert forward(3) == 6
    cls.forward = staticmethod(forward)
    call(cls.apply)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("methods", [{}, {"setup_context": setup_context}])
@pytest.mark.parametrize("called", ["the parent first", "the child first"])
def test_a_class_that_inherits_forward(methods, called):
    seen = []
    parent = made(doubling(), seen)
    child = type("Child", (parent,), {name: staticmethod(method) for name, method in methods.items()})
    applies = [parent.apply, child.apply]
    if called == "the child first":
        applies.reverse()
    del parent, child
    for apply in applies:
        call(apply)
    assert seen == [torch.bfloat16] * 2


def test_a_class_that_inherits_setup_context_has_the_state_of_its_own_forward():
    seen = []
    parent = made(doubling(cast_inputs=torch.float32), seen)
    child = type("Child", (parent,), {"forward": staticmethod(doubling())})
    for apply in (parent.apply, child.apply, parent.apply):
        call(apply)
    assert seen == [torch.float32, torch.bfloat16, torch.float32]


def test_a_forward_that_is_decorated_again():
    seen, calls = [], []

    def counted(function):
        @functools.wraps(function)
        def wrapper(*args):
            calls.append(function)
            return function(*args)

        return wrapper

    call(made(counted(doubling()), seen).apply)
    assert seen == [torch.bfloat16]
    assert len(calls) == 1


def test_a_forward_that_is_decorated_for_two_devices_records_each_once_a_call():
    seen = []
    cls = made(polycast.custom_fwd(doubling(), device_type="cuda"), seen)
    call(cls.apply)
    once = cls.setup_context
    call(cls.apply)
    assert cls.setup_context is once
    assert seen == [torch.bfloat16] * 2


def test_a_setup_context_that_wraps_the_parents_is_called():
    seen, calls = [], []
    parent = made(doubling(), seen)
    call(parent.apply)

    @functools.wraps(parent.setup_context)
    def counted(*args):
        calls.append(1)
        return parent.setup_context(*args)

    call(type("Child", (parent,), {"setup_context": staticmethod(counted)}).apply)
    assert calls == [1]
    assert seen == [torch.bfloat16] * 2


def test_a_setup_context_that_is_replaced_later():
    seen = []
    cls = made(doubling(), seen)
    call(cls.apply)
    cls.setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))
    call(cls.apply, torch.float16)
    assert seen == [torch.bfloat16, torch.float16]


def test_torchs_custom_bwd_reads_the_recorded_state():
    seen = []
    call(made(doubling(), [], backward=noting(seen, torch.amp.custom_bwd)).apply, torch.float16)
    assert seen == [torch.float16]


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "grad of vmap"])
def test_a_generated_vmap_rule(transform):
    seen = []

    @polycast.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        seen.append(polycast.get_autocast_dtype("cpu") if polycast.is_autocast_enabled("cpu") else None)
        return 2 * gradient

    cls = made(doubling(), [], (Function,), backward=backward)
    cls.generate_vmap_rule = True
    apply = cls.apply
    x = torch.ones(3, 2, requires_grad=True)
    with polycast.autocast("cpu", torch.float16):
        if transform == "vmap":
            y = torch.func.vmap(apply)(x)
        elif transform == "vmap of grad":
            y = torch.func.vmap(torch.func.grad(lambda row: apply(row).sum()))(x)
        else:
            y = torch.func.grad(lambda rows: torch.func.vmap(apply)(rows).sum())(x)
    if transform == "vmap":
        y.sum().backward()
        y = x.grad
    assert torch.equal(y, torch.full((3, 2), 2.0))
    assert seen == [torch.float16]


def test_a_forward_with_ctx_that_is_called_by_hand_keeps_its_style():
    @polycast.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return 2 * x

    seen = []
    methods = {"forward": forward, "backward": noting(seen)}
    cls = type("WithCtx", (Function,), {name: staticmethod(method) for name, method in methods.items()})
    assert cls.forward("in place of a ctx", 3) == 6
    call(cls.apply)
    assert seen == [torch.bfloat16]
