"""Fixtures for compiled code."""

from pathlib import Path

from tests.core.compilers.conftest import (
    _fresh_dynamo,
    _main_thread_compiles_first,
    backend,
    cache,
    data,
    in_region,
    leave_out_graphs_that_others_run,
    run_with_inductor,
)

__all__ = ["_fresh_dynamo", "_main_thread_compiles_first", "backend", "cache", "data", "in_region", "run_with_inductor"]


def pytest_collection_modifyitems(config, items):
    leave_out_graphs_that_others_run(config, items, Path(__file__).parent)
