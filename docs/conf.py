"""The documentation as a site: Sphinx reads the Markdown pages and the docstrings. `make docs` builds it strictly."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "packages/rankmesh-engines/src"))

import rankmesh

project = "rankmesh"
author = "The rankmesh authors"
release = version = rankmesh.__version__
language = "en"
html_title = f"rankmesh {release}"

extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "docstrings"]
exclude_patterns = ["conf.py", "docstrings.py"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/mark.svg"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5c99", "color-brand-content": "#1f5c99"},
    "dark_css_variables": {"color-brand-primary": "#7fb8ee", "color-brand-content": "#7fb8ee"},
}
# The explorer, beside the pages: they embed it, and links to it are layouts. And an index for language models.
html_extra_path = ["../src/rankmesh/viz/explorer.html", "llms.txt"]
html_copy_source = False
html_show_copyright = False

# Headings of up to this depth can be linked to, between pages too, as on GitHub.
myst_heading_anchors = 3
# The cards of the first page, so written that GitHub shows their text and links.
myst_enable_extensions = ["colon_fence"]

# -- the reference ------------------------------------------------------------------------------------------------

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
# Whose layouts are read; the pages need no more of them than their names.
autodoc_mock_imports = ["mbridge", "megatron", "sglang", "transformers", "vllm"]
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# Every other reference must lead somewhere.
nitpick_ignore_regex = [
    # Other projects' names have no page here, and the build takes nothing from the network.
    (r"py:.*", r"(typing|collections|contextlib|datetime|os|pathlib|types|dataclasses|enum|argparse)\..*"),
    (r"py:.*", r"(pytest|unittest)\..*"),
    (r"py:.*", r"(torch|numpy|np|npt|dist|st|hypothesis)\..*"),
    (r"py:.*", r"(ProcessGroup|Tensor|DeviceMesh|Path|timedelta|ellipsis|ModuleType|IntArray)"),
    (r"py:class", r"Placement"),
    # Named by signatures whose hints cannot be resolved at run time: `Unpack` is in typing from Python 3.11 on.
    (r"py:class", r"(AxesLike|PickLike|GivenOptions|RankParameters|Cut)"),
    # Loaded when they are first used, so known to type checkers alone.
    (r"py:class", r"(RankFacts|Config)"),
    # What `to_dict` writes: `rankmesh schema` describes it.
    (r"py:class", r"(rankmesh\.core\.sharding\.)?ShardingData"),
    # What the world owns, and gives to the live groups that it makes.
    (r"py:class", r"(rankmesh\.runtime\.connection\.)?Connection"),
    # How a stored box is read: a field of a documented class that nobody passes.
    (r"py:class", r"rankmesh\.transfer\.torch_checkpoint\.Chunk"),
    # The types of plain data, whose keys the documents of their functions show.
    (r"py:class", r"rankmesh\.core\.(explain\.RankFacts|mesh\.MeshData|spec\.SpecData)"),
    # The type of a default that is given back as it is; of a number, or of many in an array.
    (r"py:class", r"rankmesh\..*\.(_Default|_Number)"),
    # The type of what a user's function returns.
    (r"py:class", r"rankmesh\.survival\._Result"),
    # Values of the inside that a public one holds.
    (
        r"py:class",
        r"Weights|rankmesh_engines\.strided\.Fragment|rankmesh\.transfer\.(sync\.direct\.Group|torch_checkpoint\.Chunk)",
    ),
    (r"py:class", r"rankmesh\.debug\.doctor\.(history\.History|waits\.Waits)"),
    (r"py:class", r"rankmesh\.placement\.(cost\.HopCounts|steps\.Roles)"),
    (r"py:class", r"Column|Ints|Bools|GroupName|Signature|InCall"),  # of a recording
    (r"py:class", r"rankmesh\.(core\.options\.GivenOptions|rendezvous\.round\.Round|runtime\.schedule\.\w+)"),
    (r"py:class", r"rankmesh\.sim\.channel\.Observer|Session"),
    (r"py:class", r"rankmesh\.sim\.channel\.(Collective|Failure|PendingOperation)"),
]
