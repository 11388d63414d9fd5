"""The ops of the built-in tables that have an unboxed entry point in the native engine; the boxed one is slower."""

from importlib import resources

import polycast


def test_every_op_of_a_built_in_table_has_an_unboxed_entry_point():
    text = (resources.files("polycast.engine.native") / "signatures.h").read_text()
    listed = set(text.partition("OpList<\n")[2].partition(">;")[0].replace(",", " ").split())
    found = {
        name.partition("::")[2].replace(".", "_")
        for device_type in ("cpu", "cuda", "maia", "mps", "mtia", "xpu")
        for name in polycast.plugin.get_backend(device_type).policies
    }
    assert found - listed == {"batch_norm"}  # boxed, since it writes running statistics
