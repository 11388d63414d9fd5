"""Names that are imported when they are first used."""

import importlib

import pytest


def test_a_package_without_its_stub_is_named_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "stubless.py").write_text(
        "from polycast.plugin import lazy_names\n__getattr__, __dir__, __all__ = lazy_names(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"The stub of stubless, .*stubless\.pyi, cannot be read: install the \.pyi"):
        importlib.import_module("stubless")
