"""Sphinx configuration of the site that `make docs` builds."""

import importlib.metadata

project = "polycast"
author = "The polycast authors"
copyright = author
release = version = importlib.metadata.version("polycast")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "figures", "pictures"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# In docstrings, single backquotes mark arguments, and polycast's names are linked without markup.
add_module_names = False
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False

html_theme = "furo"
html_title = f"polycast {release}"
html_favicon = "pictures/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False

nitpicky = True
nitpick_ignore_regex = [
    # Private names, and names of other libraries, whose inventories are not fetched.
    ("py:.*", r"(torch|collections|os|enum|typing)\..*|DeviceMesh|Shard|OffloadPolicy|HookimplMarker"),
    ("py:.*", r"(polycast\.)?([a-z_0-9]+\.)*_\w+|polycast\.engine\.state\.\w+"),
]


def _readable(app, what, name, of, options, signature, returns):
    """Return a signature that is valid Python: show default factories of dataclass fields as ``...``."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def setup(app):
    """Connect the handlers of autodoc's events."""
    app.connect("autodoc-process-signature", _readable)
