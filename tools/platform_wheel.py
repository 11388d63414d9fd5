"""Add prebuilt engines to a wheel: ``python tools/platform_wheel.py PURE_WHEEL ENGINES FOLDER``.

ENGINES is the folder that ``python -m polycast.cli.prebuild`` has filled, once for each version of torch. The wheel is
for Python 3.10 and later, and for the oldest Linux that auditwheel allows.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

from polycast.toolchain.archive import pack

PLACE = "polycast/toolchain/prebuilt"
MAX_BYTES = 2_000_000
"""The largest size of a wheel."""


def main() -> None:
    """Write the wheel, and print what auditwheel says of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("pure_wheel", "engines", "folder"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    first = write_wheel(given.pure_wheel, given.engines, given.folder, platform)
    if not platform.startswith("linux"):
        check_size(first)
        print(first)
        return
    told = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", first], check=True, capture_output=True, text=True
    ).stdout
    print(told)
    first.unlink()
    # torch's libraries tie the wheel to this machine; what counts is what else it needs.
    tag = re.search(r'constrains\s+the\s+platform\s+tag\s+to\s+"(\w+)"', told)
    wheel = write_wheel(given.pure_wheel, given.engines, given.folder, platform if tag is None else tag[1])
    check_size(wheel)
    print(wheel)


def check_size(wheel: Path) -> None:
    """Print the size of a wheel; remove it and exit if it is too large."""
    size = wheel.stat().st_size
    print(f"{wheel.name} has {size:,} bytes")
    if size > MAX_BYTES:
        wheel.unlink()
        raise SystemExit(
            f"{wheel.name} has {size:,} bytes, more than {MAX_BYTES:,}: build it for fewer versions of torch."
        )


def write_wheel(pure: Path, engines: Path, folder: Path, platform: str) -> Path:
    """Write the wheel for a platform tag, and return its path."""
    name, version, *_ = pure.name.split("-")
    tag = f"cp310-abi3-{platform}"
    wheel = folder / f"{name}-{version}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    record = []
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for path, content in (*_of_pure(source, tag), *_of_engines(engines)):
            target.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}\n")
        path = f"{name}-{version}.dist-info/RECORD"
        target.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), "".join([*record, f"{path},,\n"]))
    return wheel


def _of_pure(source: zipfile.ZipFile, tag: str) -> Iterator[tuple[str, bytes]]:
    for path in source.namelist():
        content = source.read(path)
        if path.endswith(".dist-info/WHEEL"):
            content = re.sub(rb"(?m)^Root-Is-Purelib: .*$", b"Root-Is-Purelib: false", content)
            content = re.sub(rb"(?m)^Tag: .*$", f"Tag: {tag}".encode(), content)
        if not path.endswith(".dist-info/RECORD"):
            yield path, content


def _of_engines(engines: Path) -> Iterator[tuple[str, bytes]]:
    files = list(pack(engines))
    if not files:
        raise SystemExit(f"no engine is in {engines}.")
    for name, content in files:
        print(f"{name} has {len(content):,} bytes", file=sys.stderr)
        yield f"{PLACE}/{name}", content


if __name__ == "__main__":
    main()
