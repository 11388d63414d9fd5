"""Add prebuilt engines to a wheel: ``python tools/platform_wheel.py PURE_WHEEL ENGINES FOLDER``.

ENGINES is the folder that ``tools/prebuild.py`` has filled, once for each version of torch. The wheel is for Python
3.10 and later, and for the oldest Linux that auditwheel allows.
"""

import argparse
import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PLACE = "polycast/toolchain/prebuilt"
MAX_BYTES = 5_000_000
"""The largest size of a wheel: more than twice the usual one, to notice a file that does not belong in it."""


def main() -> None:
    """Write the wheel, and print what auditwheel says of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("pure_wheel", "engines", "folder"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if platform.startswith("linux"):
        platform = oldest_linux(given.pure_wheel, given.engines, platform)
    wheel = write_wheel(given.pure_wheel, archives_of(given.engines), given.folder, platform)
    check_size(wheel)
    print(wheel)


def oldest_linux(pure_wheel: Path, engines: Path, platform: str) -> str:
    """Return the tag of the oldest Linux that the engines run on."""
    with tempfile.TemporaryDirectory() as folder:  # auditwheel looks into no archives
        unpacked = [
            (path.relative_to(engines).as_posix(), path.read_bytes()) for path in sorted(engines.glob("*/*.so"))
        ]
        wheel = write_wheel(pure_wheel, unpacked, Path(folder), platform)
        command = [sys.executable, "-m", "auditwheel", "show", wheel]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(printed)
    # torch's libraries tie the wheel to this machine; what counts is what else it needs.
    tag = re.search(r'constrains\s+the\s+platform\s+tag\s+to\s+"(\w+)"', printed)
    return platform if tag is None else tag[1]


def check_size(wheel: Path) -> None:
    """Print the size of a wheel; remove it and exit if it is too large."""
    size = wheel.stat().st_size
    print(f"{wheel.name} has {size:,} bytes")
    if size > MAX_BYTES:
        wheel.unlink()
        raise SystemExit(
            f"{wheel.name} has {size:,} bytes, more than {MAX_BYTES:,}: build it for fewer versions of torch."
        )


def write_wheel(pure: Path, added: Iterable[tuple[str, bytes]], folder: Path, platform: str) -> Path:
    """Add files, by path, to a pure wheel; write the wheel for a platform tag, and return its path."""
    name, version, *_ = pure.name.split("-")
    tag = f"cp310-abi3-{platform}"
    wheel = folder / f"{name}-{version}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    record = []
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for path, content in (*_of_pure(source, tag), *added):
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


def archives_of(engines: Path) -> Iterator[tuple[str, bytes]]:
    """Return the archives of the engines by path, and print their sizes."""
    files = list(pack(engines))
    if not files:
        raise SystemExit(f"no engine is in {engines}.")
    for name, content in files:
        print(f"{name} has {len(content):,} bytes")
        yield f"{PLACE}/{name}", content


def pack(builds: Path) -> Iterator[tuple[str, bytes]]:
    """Return archives of the builds, one for each library, and their indices of checksums, by file name."""
    for name in sorted({path.stem for path in builds.glob("*/*.so")}):
        built = {path.parent.name: path for path in sorted(builds.glob(f"*/{name}.so"))}
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
            for suffix in (".headers", ".so"):  # the lists first, which are read without what follows
                for key, path in built.items():
                    _add(archive, f"{key}{suffix}", path.with_suffix(suffix).read_bytes())
        yield f"{name}.tar.xz", content.getvalue()
        checksums = {key: hashlib.sha256(path.read_bytes()).hexdigest() for key, path in built.items()}
        yield f"{name}.json", json.dumps(checksums, indent=1).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main()
