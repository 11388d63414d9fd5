"""Measure the profile of npy, through torch's ops and by the backend's own kernels."""

import polycast
from polycast_plugins.fastest import stopwatch


def test_what_is_fast_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POLYCAST_PROFILE", raising=False)
    monkeypatch.setattr(stopwatch, "_involuntary_switches", lambda: 0)  # on a busy machine every block may be preempted
    found = polycast.profile("npy", refresh=True)
    assert found.device_type == "npy"
    assert found.ways("linear") == ("float32", "float16", "int8")
    assert found.ways("bmm") == ("float32", "float16")
    assert all(found.ratio(op, 128, "float16") > 0 for op in ("linear", "matmul", "bmm", "conv2d"))
    assert "encoder_layer" in {each.op for each in found.omissions}  # npy has no such op
