"""Make the links of a checkout absolute, for package indexes: ``python tools/for_index.py REPOSITORY REF``.

REPOSITORY is the address of the repository, REF a tag or commit. The README's links and pictures then lead there, and
pyproject.toml has the addresses of the project. The workflow that builds the distributions runs it; the files in the
repository have relative links, which work in every copy of it.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?P<image>!?)\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)(?P<target>[^)]+)\)")


def absolute(readme: str, repository: str, ref: str) -> str:
    """Return the README with absolute links and image addresses."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['words']}]({repository}/{kind}/{ref}/{match['target']})"

    return _LINK.sub(link, readme)


def with_urls(project: str, repository: str, ref: str) -> str:
    """Return pyproject.toml with the addresses of the project."""
    urls = {
        "Documentation": f"{repository}/blob/{ref}/docs/index.md",
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    return project.replace("[project.scripts]\n", f"[project.urls]\n{table}\n[project.scripts]\n", 1)


def main() -> None:
    """Rewrite README.md and pyproject.toml."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", help="the address of the repository, without a slash at the end")
    parser.add_argument("ref", help="a tag or commit")
    given = parser.parse_args()
    for name, change in {"README.md": absolute, "pyproject.toml": with_urls}.items():
        path = ROOT / name
        path.write_text(change(path.read_text(encoding="utf-8"), given.repository, given.ref), encoding="utf-8")


if __name__ == "__main__":
    main()
