"""Sphinx configuration of the site that `make docs` builds."""

import importlib.metadata
import os

import polycast

# autodoc reads the defaults of a signature in the source of the function, and __new__ has the signature of __init__.
setattr(polycast.autocast.__new__, "__wrapped__", polycast.autocast.__init__)

project = "polycast"
author = "The polycast authors"
copyright = author
release = version = importlib.metadata.version("polycast")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "figures", "pictures"]

# The repository, where a workflow of it builds the site; a copy of the sources knows no address.
_SERVER, _NAME = os.environ.get("GITHUB_SERVER_URL", "https://github.com"), os.environ.get("GITHUB_REPOSITORY")
repository = f"{_SERVER}/{_NAME}" if _NAME else ""

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {"repository": f"· [Repository]({repository})" if repository else ""}
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

SEARCH_WORDS = {
    "quantization": ("fp8", "float8", "int8", "int4", "w8a8", "quantize"),
    "regions": ("bf16", "fp16", "mixed precision"),
    "coming-from": ("amp", "apex"),
    "profile": ("slow bf16",),
}
"""Words by which people search, for pages that use other ones: index entries, which the search finds."""

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_theme_options = (
    {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"} if repository else {}
)
html_title = f"polycast {release}"
html_favicon = "pictures/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False

nitpicky = True
nitpick_ignore_regex = [
    # Private names, and names of other libraries, whose inventories are not fetched.
    (
        "py:.*",
        r"(torch|collections|contextlib|os|enum|pathlib|typing)\..*|DeviceMesh|Shard|OffloadPolicy|HookimplMarker|"
        r"OpOverload|OpOverloadPacket|CustomOpDef",
    ),
    (
        "py:.*",
        r"(polycast\.)?([a-z_0-9]+\.)*_\w+|polycast\.(common\.atfork|policy\.manifests|region\.suspend|"
        r"engine\.(casts\.cast_cache|choice|drift|override|recipes\.(actions|plan\.Plan)|state)|"
        r"region\.slow_dtype|registry\.(recipe_kernels|statuses)|toolchain\.load)\.\w+",
    ),
]


def _readable(app, what, name, of, options, signature, returns):
    """Return a signature that is valid Python: show default factories of dataclass fields as ``...``."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def _add_search_words(app, page, source):
    """Add index entries to a page, below its title."""
    entries = "".join(f"```{{index}} single: {word}\n```\n\n" for word in SEARCH_WORDS.get(page, ()))
    if entries:
        title, rest = source[0].split("\n", 1)
        source[0] = f"{title}\n\n{entries}{rest}"


def setup(app):
    """Connect the handlers of events."""
    app.connect("source-read", _add_search_words)
    app.connect("autodoc-process-signature", _readable)
