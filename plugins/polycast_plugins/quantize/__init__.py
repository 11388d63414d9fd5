"""The recipes Int8, Int4 and Float8, and their kernels; also the kernels of the recipe "fastest" for the CPU.

The manifest is in a module of its own, because the first region imports this package to find the extensions.
"""

from polycast.plugin import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
