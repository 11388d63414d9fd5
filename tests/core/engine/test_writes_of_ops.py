"""Every op of torch, as a way to write to a weight: casts of the weight are not stale afterwards."""

import json
import os
from pathlib import Path

import pytest
import torch

from polycast.engine.casts.unversioned_writes import WRITING_OPS

SCRIPT = Path(__file__).with_name("writes_of_ops.py")
STALE = {"aten::_unsafe_view", "aten::set.source_Tensor"}
"""The ops that docs/limits.md names."""
NO_WRITES = {"aten::record_stream", "aten::shallow_copy_data_"}
"""Ops of which a schema says that they write, and which write no values, or to memory that the version stamp has."""


def test_the_ops_that_write_and_count_no_version_are_known():
    def has_kernel(name, *keys):
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)

    def schema_of(name):
        return torch._C._get_schema(*[*name.split("."), ""][:2])

    names = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and any(each.alias_info is not None and each.alias_info.is_write for each in schema_of(name).arguments)
        and not has_kernel(name, "ADInplaceOrView", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    }
    assert names - NO_WRITES <= set(WRITING_OPS)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked for each crash")
@pytest.mark.parametrize("chosen", ["native", "reference"])
def test_no_op_of_torchs_leaves_casts_stale(chosen, run_program):
    stale = {}
    script = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    templates = "2" if chosen == "native" else "1"  # in Python, the calls take long
    status, printed, errors = run_program(script, chosen, templates, timeout=600)
    assert status == 0, errors
    for line in printed.splitlines():
        _, name, *how = json.loads(line)
        stale.setdefault(name, []).extend(how)
    assert len(stale) > 2000
    assert {name: how for name, how in stale.items() if how and name not in STALE} == {}
