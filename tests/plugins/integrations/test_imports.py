"""Each integration imports only its own library."""

import pytest

LIBRARIES = {"lightning": "pytorch_lightning", "transformers": "transformers", "accelerate": "accelerate"}


@pytest.mark.slow
@pytest.mark.parametrize("module", LIBRARIES)
def test_only_its_own_library_is_imported(launch, module):
    pytest.importorskip(LIBRARIES[module])
    before = f"import sys, {LIBRARIES[module]}; before = set(sys.modules)"
    after = f"import polycast_plugins.integrations.{module}; print(*sorted(set(sys.modules) - before))"
    done = launch(f"{before}; {after}")
    assert done.returncode == 0, done.stderr
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert "polycast" in tops
    its_own = {"transformers", "accelerate"} if module == "transformers" else {LIBRARIES[module]}  # the Trainer's
    assert not tops & ({*LIBRARIES.values()} - its_own)
