"""Excerpts of torch's headers: single structs of headers that take long to parse, or that fit one Python only.

The structs are cut out of the installed headers, so their layout is that of the torch that is compiled for.
"""

import re
from pathlib import Path

from .cpp_library import BuildError

# The header of each struct.
_STRUCTS = {
    "THPVariable": "torch/csrc/autograd/python_variable.h",
    "python_error": "torch/csrc/Exceptions.h",
    "ToCopyBackward0": "torch/csrc/autograd/generated/Functions.h",
}

EXCERPTED_HEADERS = tuple(_STRUCTS.values())
"""The headers of the structs, in torch's include folder."""

# Some headers include all ops and need none of their functions.
_REPLACEMENTS = {"ATen/ATen.h": "#pragma once\n#include <ATen/core/Tensor.h>\n"}


def write_excerpts(include: Path, folder: Path) -> None:
    """Write the excerpts to a folder, which the compiler has to search before torch's headers.

    Raises:
        BuildError: a header is missing or lacks its struct.
    """
    excerpts = {f"excerpt_{name}.h": _extract_struct(include / header, name) for name, header in _STRUCTS.items()}
    for path, text in {**excerpts, **_REPLACEMENTS}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _extract_struct(header: Path, name: str) -> str:
    try:
        text = header.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"the header {header} is missing. Install torch with its headers.") from None
    pattern = rf"^struct (?:TORCH_\w+ )?{name}\b[^;{{]*\{{\n(?:(?!struct |\}};).*\n)*\}};$"
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:
        raise BuildError(f"no struct {name} is found in {header}: this torch is newer than this polycast.")
    # If the struct begins twice, under #if, the first beginning is for Windows.
    return re.sub(r"^#.*\n", "", found[-1], flags=re.MULTILINE) + "\n"
