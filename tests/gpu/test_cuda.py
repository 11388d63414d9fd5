"""Tests that fake tensors cannot replace: kernels, graph capture and streams. They need a CUDA device."""

import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import polycast

from .graphs import captured_call

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()


def inputs(rows=16):
    torch.manual_seed(1)
    return torch.randn(rows, 64, device="cuda")


def test_the_backend_is_ready():
    assert polycast.is_autocast_available("cuda")
    assert polycast.backends()["cuda"].state == "ready"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward_and_backward_give_torchs_bits(dtype):
    def run(region):
        net = model()
        with region:
            out = net(inputs())
        out.float().pow(2).sum().backward()
        return [out, *(parameter.grad for parameter in net.parameters())]

    polycast.uninstall()
    theirs = run(torch.autocast("cuda", dtype))
    ours = run(polycast.autocast("cuda", dtype))
    for their, our in zip(theirs, ours, strict=True):
        assert our.dtype is their.dtype
        assert torch.equal(our, their)


def launched(function):
    """Return the kernels that a function launches, and how often."""
    with torch.profiler.profile(acc_events=True) as profile:
        function()
        torch.cuda.synchronize()
    on_gpu = [each for each in profile.key_averages() if each.device_type is torch.autograd.DeviceType.CUDA]
    return sorted((each.key, each.count) for each in on_gpu)


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_region_launches_the_kernels_that_torchs_launches(trains):
    def run(region):
        net = model().requires_grad_(trains)
        with region:
            out = net(inputs())
        if trains:
            out.float().pow(2).sum().backward()

    polycast.uninstall()
    run(torch.autocast("cuda"))  # cuBLAS starts
    theirs = launched(lambda: run(torch.autocast("cuda")))
    if not theirs:
        pytest.skip("torch's profiler sees no kernels here")
    assert launched(lambda: run(polycast.autocast("cuda"))) == theirs


@pytest.mark.parametrize("cache", [None, "shared"])
def test_a_captured_graph_sees_later_updates_of_the_weights(cache):
    net, x = model(), inputs()
    region = polycast.autocast("cuda", cache=polycast.WeightCache() if cache else None)
    with torch.no_grad():
        graph, captured = captured_call(net, x, region)
        for parameter in net.parameters():
            parameter.mul_(2)
        graph.replay()
        with region:
            expected = net(x)
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("part", ["step", "callable"])
def test_casts_in_a_cache_are_fresh_while_graphs_train(part):
    """The graph is of a whole training step, or of the forward and backward of a callable."""
    net, x, cache = model(), inputs(), polycast.WeightCache()
    if part == "callable":
        torch.cuda.make_graphed_callables(net, (x,))  # replaces its forward
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad(set_to_none=False)
        with polycast.autocast("cuda", enabled=part == "step"):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()

    if part == "step":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(), step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for _ in range(3):
        graph.replay() if part == "step" else step()
        with torch.no_grad():
            with polycast.autocast("cuda", cache_enabled=False):
                expected = net[0](x)
            for _ in range(2):
                with polycast.autocast("cuda", cache=cache):
                    assert torch.equal(net[0](x), expected)
    assert cache.stats().hits >= 2


def test_regions_on_several_streams_give_the_same_bits():
    net, x = model(), inputs()
    with torch.no_grad(), polycast.autocast("cuda"):
        expected = net(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    outputs = []
    for turn in range(40):
        stream = streams[turn % len(streams)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad(), polycast.autocast("cuda"):
            outputs.append(net(x))
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_stream_does_not_use_a_cast_that_another_has_yet_to_make(cached, requires_grad):
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"), requires_grad=requires_grad)
    cache = polycast.WeightCache() if cached else None
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), polycast.autocast("cuda", cache=cache):
        with torch.cuda.stream(late):
            torch.cuda._sleep(100_000_000)
            torch.mm(x, weight)
            torch.mm(x, weight)
        with torch.cuda.stream(early):
            out = torch.mm(x, weight)
    torch.cuda.synchronize()
    assert torch.all(out == 64)
    if cached:
        assert cache.stats().entries == 1


def test_memory_of_weights_casts_is_given_back():
    net, x = model(), inputs()
    with torch.no_grad(), polycast.autocast("cuda"):
        net(x)  # cuBLAS keeps a workspace
    polycast.clear_autocast_cache()
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), polycast.autocast("cuda"):
        net(x)
    polycast.clear_autocast_cache()
    assert torch.cuda.memory_allocated() == before


def test_training_in_float16_skips_the_step_that_overflows_and_learns():
    net, x = model(), inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = polycast.grad_scaler("cuda", torch.float16, init_scale=2.0**30)
    losses, scales = [], []
    for _ in range(60):
        with polycast.autocast("cuda", torch.float16):
            out = net(x)
        assert out.dtype is torch.float16
        loss = (out.float() - 1).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert scales[0] == 2.0**29
    assert losses[1] == losses[0], "the first scale is too large for float16, so the step is skipped"
    assert losses[-1] < losses[0] / 5


def test_without_a_dtype_the_scaler_is_enabled_for_float16():
    assert polycast.grad_scaler("cuda").is_enabled()
    assert not polycast.grad_scaler("cuda", torch.bfloat16).is_enabled()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_is_recomputed_with_the_policies_and_the_cache_of_the_forward(reentrant):
    """On another thread: the backward of a device has one of its own."""
    seen, cache = [], polycast.WeightCache()

    def gradients(checkpointed):
        net = model()
        net[0].register_forward_hook(lambda module, args, output: seen.append((threading.get_ident(), output.dtype)))
        x = inputs().requires_grad_()
        with polycast.autocast("cuda", cache=cache, policy={"aten::linear": polycast.CastPolicy.FP32}):
            out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant) if checkpointed else net(x)
        out.pow(2).sum().backward()
        return [x.grad, *(parameter.grad for parameter in net.parameters())]

    expected = gradients(False)
    seen.clear()
    for actual, wanted in zip(gradients(True), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert [dtype for _, dtype in seen] == [torch.float32, torch.float32]
    assert seen[0][0] == threading.get_ident() != seen[1][0]


def test_replicas_of_data_parallel_run_in_the_region_of_a_patched_torch():
    from torch.nn.parallel import parallel_apply

    net = model()
    with polycast.patch_torch(), torch.autocast("cuda", torch.float16):
        (out,) = parallel_apply([net], [inputs()], devices=[0])
    assert out.dtype is torch.float16


def test_the_deprecated_class_of_the_device_is_polycasts_while_patched():
    with polycast.patch_torch():
        with pytest.warns(FutureWarning, match=r"torch\.cuda\.amp\.autocast"):
            region = torch.cuda.amp.autocast()
        with region:
            assert polycast.autocast_nesting("cuda") == 1
            assert model()(inputs()).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # inductor captures one to begin with
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiled_code_with_cached_casts_sees_updates_of_the_weights(mode):
    """Inductor's CUDA graphs among them, which would replay what they recorded."""
    torch.compiler.reset()
    net, x, cache = nn.Linear(64, 64).cuda(), inputs(), polycast.WeightCache(verify=True)
    compiled = torch.compile(net, mode=mode, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(3):
                with polycast.autocast("cuda", cache=cache):
                    y = compiled(x).clone()
            with polycast.autocast("cuda"):
                torch.testing.assert_close(y, net(x), rtol=0.02, atol=0.02)
            net.weight.mul_(2)
    assert cache.stats().hits >= 3
