"""Update everything in the documentation that is generated, except docs/figures: ``python -m docs``."""

from . import families, modules, needs, readme_figures, tables, versions
from .pictures import draw


def main() -> None:
    """Write the pictures, the tables, and the generated parts of the README."""
    for generator in (draw, tables, families, readme_figures, versions, modules, needs):
        generator.main()


if __name__ == "__main__":
    main()
