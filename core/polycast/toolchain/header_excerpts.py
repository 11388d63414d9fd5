"""What the C++ includes in place of headers of torch's that take long to parse, or that are for one Python only.

A struct is cut out of the header that is installed, so that its layout is that of the torch which is built for.
"""

import re
from pathlib import Path

from .build_cache import BuildError

# Structs, by the header that each is in.
_STRUCTS = {
    "THPVariable": "torch/csrc/autograd/python_variable.h",
    "python_error": "torch/csrc/Exceptions.h",
    "ToCopyBackward0": "torch/csrc/autograd/generated/Functions.h",
}

# Some headers ask for all ops and need none of their functions.
_IN_PLACE = {"ATen/ATen.h": "#pragma once\n#include <ATen/core/Tensor.h>\n"}


def write_excerpts(include: Path, folder: Path) -> None:
    """Write them to a folder, which is to be searched before that of torch's headers.

    Raises:
        BuildError: a header is not what it was.
    """
    texts = {f"excerpt_{name}.h": _cut_out(include / header, name) for name, header in _STRUCTS.items()} | _IN_PLACE
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _cut_out(header: Path, name: str) -> str:
    try:
        text = header.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"the header {header} is not there. Install torch with its headers.") from None
    found = re.findall(
        rf"^struct (?:TORCH_\w+ )?{name}\b[^;{{]*\{{\n(?:(?!struct |\}};).*\n)*\}};$", text, re.MULTILINE
    )
    if not found:
        raise BuildError(f"no struct {name} is found in {header}: this torch is newer than this polycast.")
    return (
        re.sub(r"^#.*\n", "", found[-1], flags=re.MULTILINE) + "\n"
    )  # where it begins in two ways, one is for Windows
