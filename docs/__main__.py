"""Update everything in the documentation that is generated, except docs/figures: ``python -m docs``."""

from . import families, modules, needs, readme_figures, tables, versions
from .pictures import draw

GENERATORS = (tables, families, readme_figures, versions, needs)
"""Modules with the pages of which they update parts."""


def main() -> None:
    """Write the pictures, and the pages whose tables or sentences have changed: other pages cause no rebuild."""
    draw.main()
    modules.main()
    for generator in GENERATORS:
        for path in generator.PAGES:
            page = path.read_text(encoding="utf-8")
            if (updated := generator.updated(page)) != page:
                path.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
