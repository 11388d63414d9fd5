"""Names that are imported when they are first used."""

import importlib
import py_compile

import pytest


def test_a_package_without_its_stub_is_named_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "stubless.py").write_text(
        "from polycast.plugin import lazy_names\n__getattr__, __dir__, __all__ = lazy_names(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"The stub of stubless, .*stubless\.pyi, cannot be read: install the \.pyi"):
        importlib.import_module("stubless")


def test_a_module_without_its_source_has_the_names_of_its_stub(tmp_path, monkeypatch):
    source = tmp_path / "sourceless.py"
    source.write_text("from polycast.plugin import lazy_names\n__getattr__, __dir__, __all__ = lazy_names(__name__)\n")
    (tmp_path / "sourceless.pyi").write_text("from .part import name as name\n")
    py_compile.compile(str(source), cfile=str(tmp_path / "sourceless.pyc"))
    source.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("sourceless").__all__ == ["name"]
