"""Writes of a module under the rule "fp32" reach its arguments, and the containers that hold them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Policy

pytestmark = pytest.mark.usefixtures("engine")


def reduced(*values, **kwargs):
    return torch.tensor(values, dtype=torch.bfloat16, **kwargs)


@pytest.mark.parametrize("rule", ["fp32", "off", "float16", {"relu": "fp32"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_relu_in_place_whose_result_is_unused_is_seen_by_the_caller_also_of_a_copy(rule, dtype):
    relu = nn.ReLU(inplace=True)
    polycast.apply_policy(relu, Policy(modules={"": rule}))
    for model in (relu, copy.deepcopy(relu)):
        x = torch.tensor([-1.0, 2.0], dtype=dtype)
        with polycast.autocast("cpu"):
            model(x)
        assert (x.tolist(), x.dtype) == ([0, 2], dtype)


@pytest.mark.parametrize(
    "mode", [nullcontext, torch.no_grad, torch.inference_mode], ids=["grad", "no grad", "inference"]
)
def test_attention_fills_the_cache_that_it_is_given(mode, call):
    def attend(q, k, v, *, cache):
        cache["k"][:, 1] = k
        cache["v"].index_copy_(1, torch.tensor([1]), v[:, None])
        return nn.functional.scaled_dot_product_attention(q[:, None], cache["k"], cache["v"])

    with mode():
        cache = {name: torch.zeros(2, 3, 4, dtype=torch.bfloat16) for name in ("k", "v")}
        given, (q, k, v) = dict(cache), torch.randn(3, 2, 4).bfloat16()
        assert call(attend, q, k, v, cache=cache).dtype is torch.float32
        for name, written in {"k": k, "v": v}.items():
            assert torch.equal(cache[name][:, 1], written)
            assert cache[name] is given[name]
    assert not cache["k"][:, ::2].any()


WRITES = {
    "copy_": lambda k: k.copy_(torch.arange(6.0).view(2, 3)),
    "a view": lambda k: k.view(-1)[1:].fill_(5),
    "an item": lambda k: k.__setitem__((0, 1), 5),
    "out=": lambda k: torch.add(torch.ones(2, 3, dtype=k.dtype), 4, out=k),
    "detach()": lambda k: k.detach().add_(1),
    "foreach": lambda k: torch._foreach_add_([k], 2.0),
    "no_grad": lambda k: torch.no_grad()(k.mul_)(3),
    "inference mode": lambda k: torch.inference_mode()(k.mul_)(3),
    "an op in place": lambda k: torch.nn.functional.relu_(k.neg_()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_however_a_module_writes_the_argument_has_what_was_written(write, inference, call):
    with torch.inference_mode(inference):
        k, expected = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)
        write(expected)
        call(write, k)
        assert torch.equal(k, expected)


def test_an_argument_that_is_not_written_to_keeps_its_version_and_history(call):
    x = reduced(1, 2, requires_grad=True) * 1
    version, history = x._version, x.grad_fn
    call(lambda x: (x + 1, x.view(-1), x.detach()), x)
    assert (x._version, x.grad_fn) == (version, history)


def test_elements_that_are_not_written_keep_their_bits(call):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)[~bits.view(dtype).isnan()].clone()
        before = x.clone()
        call(lambda x: x[:1].zero_(), x)
        assert torch.equal(x[1:].view(torch.int16), before[1:].view(torch.int16))


@pytest.mark.parametrize("leaf", ["the argument", "a weight", "both"])
def test_gradients_through_a_written_argument_equal_those_without_the_rule(leaf, call):
    def gradients(run):
        x = reduced(1, -2, 3, requires_grad=leaf != "a weight")
        w = torch.tensor([2.0, 2.0, 4.0], requires_grad=leaf != "the argument")
        h = x * 1
        run(h, w)
        (h.float() * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        return [each.grad for each in (x, w) if each.requires_grad], h.detach()

    def write(h, w):
        h.mul_(w)
        h[1:].exp_()

    (found, h), (expected, other) = gradients(lambda h, w: call(write, h, w)), gradients(write)
    torch.testing.assert_close(h, other, rtol=1e-2, atol=1e-2)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=1e-2)


def test_gradients_flow_through_the_result_and_the_written_argument(call):
    x = reduced(1.5, -2, requires_grad=True)
    h = x * 1
    y = call(lambda h: h.relu_(), h)
    (y.sum() + h.float().sum()).backward()
    assert x.grad.tolist() == [2, 0]


def test_a_write_under_no_grad_leaves_the_history_as_it_is(under):
    x = reduced(1, 2, requires_grad=True)
    h = x * 3
    history = h.grad_fn
    with polycast.autocast("cpu"):
        under(lambda h: torch.no_grad()(h.fill_)(7))(h)
        under(lambda x: torch.no_grad()(x.fill_)(5))(x)  # even a leaf's, as without the rule
    assert h.grad_fn is history
    assert (h.tolist(), x.tolist()) == ([7, 7], [5, 5])


def test_a_write_that_enable_grad_records_is_recorded_under_no_grad_too(call):
    x, w = reduced(1, 2), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        call(lambda x: torch.enable_grad()(lambda: x.mul_(w))(), x)
    x.sum().backward()
    assert w.grad.tolist() == [1, 2]


def test_autograd_refuses_a_value_that_was_saved_before_the_write(call):
    x = reduced(1, 2, requires_grad=True)
    h = x.exp()  # saves its result
    call(lambda h: h.zero_(), h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_writes_as_the_forward_did(reentrant):
    relu, x = nn.ReLU(inplace=True), reduced(1, -2, 3, requires_grad=True)
    polycast.apply_policy(relu, Policy(modules={"": "fp32"}))

    def forward(x):
        h = x * 2
        relu(h)
        return h.float() * 3

    with polycast.autocast("cpu"):
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert x.grad.tolist() == [6, 0, 6]


def test_a_tensor_that_is_given_twice_is_one_tensor_in_the_module(call):
    x = reduced(1, 2)

    def forward(one, two, *, three):
        one.add_(1)
        return one is two is three[0], two.tolist()

    assert call(forward, x, x, three=[x]) == (True, [2, 3])
    assert x.tolist() == [2, 3]


def test_a_write_to_an_argument_whose_memory_another_one_shares_is_refused(call):
    x = reduced(1, 2)
    expected = (
        "Does ('' = 'fp32') wrote to an argument that was cast from torch.bfloat16 to torch.float32, and the "
        "write cannot be copied back to the argument: it shares memory with another argument that was cast. Give the "
        "module an argument in torch.float32, which needs no cast, or let it write to a new tensor."
    )
    with pytest.raises(RuntimeError) as raised:
        call(lambda one, two: one.add_(1), x, x[:1])
    assert str(raised.value) == expected
    assert x.tolist() == [1, 2]
    call(lambda one, two: one + two, x, x[:1])  # reading is no harm


def test_arguments_that_are_columns_of_one_matrix_can_be_written_to(call):
    qkv = torch.ones(2, 6, dtype=torch.bfloat16)
    q, k, v = qkv.split(2, dim=1)

    def rotate(q, k, v):
        q.mul_(2)
        k.mul_(3)

    with torch.no_grad():
        call(rotate, q, k, v)
    assert qkv.tolist() == [[2, 2, 3, 3, 1, 1]] * 2


REFUSED = {
    "resized": (lambda: reduced(1, 2), lambda x: x.resize_(3), r"it has the shape \(2,\), and was resized to \(3,\)"),
    "a leaf, recorded": (
        lambda: reduced(1, 2, requires_grad=True),
        lambda x: x.mul_(2),
        r"cannot be copied back.*: a leaf Variable that requires grad",
    ),
    "one element is several": (
        lambda: reduced(1).expand(3),
        lambda x: x.mul_(2),
        r"cannot be copied back.*single memory location",
    ),
    "an inference tensor, outside of that mode": (
        lambda: torch.inference_mode()(reduced)(1, 2),
        lambda x: torch.no_grad()(x.mul_)(2),
        r"cannot be copied back.*Inplace update to inference tensor",
    ),
    "one of the views of chunk, recorded": (
        lambda: (reduced(1, 2, requires_grad=True) * 1).chunk(2)[0],
        lambda x: x.mul_(2),
        r"cannot be copied back.*returns multiple views",
    ),
}


@pytest.mark.parametrize(("make", "write", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_write_that_cannot_be_copied_back_is_refused(make, write, reason, call):
    with pytest.raises(RuntimeError, match=reason):
        call(write, make())


def test_writes_to_a_cast_and_to_its_argument_are_refused(call):
    x = reduced(1, 2)

    def forward(cast):
        cast.add_(1)
        x.add_(1)

    with pytest.raises(RuntimeError, match="the argument itself was written to, too"):
        call(forward, x)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_a_transform_sees_the_write(transform, under):
    module = under(lambda h: h.mul_(3))

    def f(x):
        h = x * 1
        module(h)
        return h.float().sum()

    def plain(x):
        return (x * 3).float().sum()

    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with polycast.autocast("cpu"):
        assert torch.equal(transform(f)(x), transform(plain)(x))


def test_jit_trace_records_the_write(under):
    module = under(lambda h: h.mul_(3))

    def f(x):
        h = x * 1
        module(h)
        return h

    with polycast.autocast("cpu", cache_enabled=False):
        traced = torch.jit.trace(f, reduced(1, 2), check_trace=False)
    assert traced(reduced(3, 4)).tolist() == [9, 12]


def test_a_rule_inside_a_rule_writes_through_both(call, under):
    inner = under(lambda x, seen: (seen.append(x.dtype), x.add_(1)))

    def forward(x, seen):
        with polycast.autocast("cpu", torch.float16):
            half = x.half()
            inner(half, seen)
        x.copy_(half)

    x, seen = reduced(1, 2), []
    call(forward, x, seen)
    assert (x.tolist(), seen) == ([2, 3], [torch.float32])


def test_what_forward_returns_is_float32_also_where_it_is_an_argument(call):
    x = reduced(-1, 2)
    y = call(lambda x: x.relu_(), x)
    assert (y.dtype, y.tolist(), x.dtype, x.tolist()) == (torch.float32, [0, 2], torch.bfloat16, [0, 2])
    assert call(lambda x: x, x).dtype is torch.float32


def test_what_a_function_with_cast_inputs_writes_to_a_cast_is_its_own_as_with_torch(call_function):
    x = reduced(1, 2)
    assert call_function(lambda x: x.mul_(2).sum(), x).item() == 6
    assert x.tolist() == [1, 2]
