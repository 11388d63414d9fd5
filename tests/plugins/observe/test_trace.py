"""Observation.to_trace: a Chrome trace of ops and casts, alone and beside torch.profiler's events."""

import gzip
import json
import os
import threading
from dataclasses import replace

import pytest
import torch

import polycast
from polycast_plugins.observe import observer as observing
from polycast_plugins.observe.trace import Trace

pytestmark = pytest.mark.usefixtures("engine")

PHASES = set("BEXiIstfMCNODbnePvRc")
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_format(whole):
    """Check a trace against the Trace Event Format."""
    assert whole["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(whole["baseTimeNanoseconds"], int)
    for event in whole["traceEvents"]:
        phase = event["ph"]
        assert phase in PHASES
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], (int, str))
        assert isinstance(event["tid"], (int, str))
        assert isinstance(event["ts"], (int, float))
        assert isinstance(event.get("args", {}), dict)
        if phase == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        if phase in "stf":
            assert isinstance(event["id"], (int, str))
        if phase == "M":
            assert METADATA[event["name"]] in event["args"]


def written(seen, path, **options):
    seen.to_trace(path, **options)
    whole = json.loads(path.read_text(encoding="utf-8"))
    check_format(whole)
    return whole["traceEvents"], whole


def of_kind(events, category):
    return [event for event in events if event.get("cat") == category]


def train(model, cache=None):
    with polycast.autocast("cpu", cache=cache):
        loss = model(torch.ones(4, 8)).float().sum()
    loss.backward()


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())


@pytest.fixture
def seen(model):
    with polycast.observe(model, trace=True) as seen:
        train(model)
    return seen


def test_ops_have_times_dtypes_and_modules(seen, tmp_path):
    events, _ = written(seen, tmp_path / "trace.json")
    ops = of_kind(events, "polycast_op")
    linear = next(event for event in ops if event["name"] == "aten::linear")
    assert linear["args"] == {"phase": "forward", "module": "0", "computes_in": "bfloat16"}
    assert linear["pid"] == os.getpid()
    assert {event["args"]["phase"] for event in ops} == {"forward", "backward"}
    assert sum(op.calls for op in seen.ops) == len(ops)
    assert seen.run.timing
    assert seen.fast_time_share > 0


def test_casts_are_marked_in_the_time_of_their_op(seen, tmp_path):
    events, _ = written(seen, tmp_path / "trace.json")
    casts = of_kind(events, "polycast_cast")
    assert len(casts) == seen.total.casts == 3
    assert {event["name"] for event in casts} == {"cast float32 to bfloat16"}
    assert sum(event["args"]["bytes"] for event in casts) == seen.total.cast_bytes
    assert [event["args"]["of"] for event in casts].count("weight") == 2
    (linear,) = (event for event in of_kind(events, "polycast_op") if event["name"] == "aten::linear")
    assert all(linear["ts"] <= event["ts"] for event in casts)
    assert all(event["ts"] + event["dur"] <= linear["ts"] + linear["dur"] for event in casts)


def test_a_cached_cast_is_marked_as_such(model, tmp_path):
    cache = polycast.WeightCache()
    train(model, cache)
    with polycast.observe(model, trace=True) as seen:
        train(model, cache)
    events, _ = written(seen, tmp_path / "trace.json")
    names = [event["name"] for event in of_kind(events, "polycast_cast")]
    assert names.count("cached cast float32 to bfloat16") == seen.total.hits == 2


def test_ops_and_casts_have_tracks_next_to_their_thread(seen, tmp_path):
    events, _ = written(seen, tmp_path / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    sorting = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    (cast,) = {event["tid"] for event in of_kind(events, "polycast_cast")}
    here = threading.get_native_id()
    assert names[cast] == f"casts by polycast, thread {here}"
    assert sorting[cast] == here


def test_events_have_what_the_format_asks_for_and_nest(model, in_thread, tmp_path):
    with polycast.observe(model, trace=True, threads="all") as seen:
        train(model)
        in_thread(lambda: train(model))
    events, _ = written(seen, tmp_path / "trace.json")
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((event["ts"], -event["ts"] - event["dur"]))
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert tracks.keys() == named
    for track in tracks.values():
        around = []
        for begin, minus_end in sorted(track):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or -minus_end <= around[-1] + 1e-6
            around.append(-minus_end)


@pytest.fixture
def profiled(model):
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profiled = torch.profiler.profile(activities=cpu, acc_events=True)
    with profiled as profile, polycast.observe(model, trace=True) as seen:
        train(model)
    return seen, profile


@pytest.mark.parametrize("source", ["object", "file", "compressed"])
def test_a_profile_is_merged_on_one_time_base(profiled, source, tmp_path):
    seen, profile = profiled
    if source != "object":
        name = tmp_path / ("profile.json" + ".gz" * (source == "compressed"))
        profile.export_chrome_trace(str(name))
        profile = name
    events, _ = written(seen, tmp_path / "trace.json", profile=profile)
    casts = of_kind(events, "polycast_cast")
    (linear,) = (event for event in of_kind(events, "cpu_op") if event["name"] == "aten::linear")
    assert len(casts) == 3
    assert of_kind(events, "polycast_op") == []
    slack = 1000  # microseconds, of two clocks
    assert all(linear["ts"] - slack <= event["ts"] for event in casts)
    assert all(event["ts"] + event["dur"] <= linear["ts"] + linear["dur"] + slack for event in casts)
    assert {event["pid"] for event in casts} == {linear["pid"]}
    (track,) = {event["tid"] for event in casts}
    sorting = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorting[track] == sorting[linear["tid"]]


def test_a_file_that_ends_in_gz_is_compressed(seen, tmp_path):
    seen.to_trace(tmp_path / "trace.json.gz")
    check_format(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())))


def test_a_profile_that_was_exported_is_refused_with_the_remedy(profiled, tmp_path):
    seen, profile = profiled
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    with pytest.raises(ValueError, match=r"cannot be exported: Trace is already saved.*pass the path of the file\.$"):
        seen.to_trace(tmp_path / "trace.json", profile=profile)


def test_a_profile_of_another_time_is_refused(profiled, model, tmp_path):
    _, profile = profiled
    with polycast.observe(model, trace=True) as later:
        train(model)
    later._trace = replace(
        later._trace, events=tuple(replace(event, began=event.began + 10**12) for event in later._trace.events)
    )
    with pytest.raises(ValueError, match=r"^the profile has no event in the time of the observation\. Profile and obs"):
        later.to_trace(tmp_path / "trace.json", profile=profile)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [3]}'])
def test_a_file_that_is_no_trace_is_refused(seen, text, tmp_path):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"^profile.json is not a Chrome trace of torch.profiler: .* Pass what export_"
    ):
        seen.to_trace(tmp_path / "trace.json", profile=tmp_path / "profile.json")


def test_what_is_no_profile_is_refused(seen, tmp_path):
    with pytest.raises(TypeError, match=r"^profile must be a torch.profiler.profile or the path .*, got int$"):
        seen.to_trace(tmp_path / "trace.json", profile=3)


def test_an_observation_without_times_is_refused(model, seen, tmp_path):
    with polycast.observe(model, timing=True) as untraced:
        train(model)
    for each in (untraced, seen + seen):
        with pytest.raises(ValueError, match=r"^this observation has no times of single ops: pass trace=True to"):
            each.to_trace(tmp_path / "trace.json")


def test_events_are_bounded(model, monkeypatch, tmp_path):
    monkeypatch.setattr(observing, "MAX_EVENTS", 5)
    with polycast.observe(model, trace=True) as seen:
        train(model)
    _, whole = written(seen, tmp_path / "trace.json")
    assert len(seen._trace.events) == 5
    assert whole["polycastEventsNotKept"] == seen.total.calls + seen.total.casts - 5


def test_an_observation_without_ops_has_an_empty_trace(tmp_path):
    with polycast.observe(trace=True) as seen:
        pass
    assert seen._trace == Trace((), (), 0)
    events, _ = written(seen, tmp_path / "trace.json")
    assert [event["ph"] for event in events] == ["M"]
