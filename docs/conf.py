"""How Sphinx builds these pages: `sphinx-build -W --keep-going docs build/docs`. Needs neither MPI nor a GPU."""

import re
import sys
from pathlib import Path

from mpistrat import __version__
from mpistrat.settings import SETTINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for docstrings.py and tested_versions.py

import tested_versions  # noqa: E402

# The areas of the file, each with its name in a comment before it.
_, *areas = re.split(
    r"^# --- (.+) ---$",
    (HERE.parent / "tests/conformance/differences.toml").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)

project = "mpistrat"
version = release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "docstrings",
]

html_theme = "furo"
html_title = f"mpistrat {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_exclude = ".gp, .go"  # prompts, and what a program printed

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {
    "tested": tested_versions.tested(),
    "recorded": tested_versions.recorded(),
    "declared": tested_versions.declared(),
    "settings": "\n".join(
        (
            "| variable | default | unit | what it says | read by |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| `{row.name}` | {row.default} | {row.unit} | {row.meaning} | {row.read_by} |"
                for row in SETTINGS
                if not row.internal
            ),
        )
    ),
    "differences": "\n\n".join(
        f"**{area.capitalize()}**\n\n"
        + "\n".join(f"- {rule['reason']}." for rule in tomllib.loads(rules)["difference"])
        for area, rules in zip(areas[::2], areas[1::2], strict=True)
    ),
}

default_role = "py:obj"  # `name` in a docstring is code, and a link where the name has a page
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # what a base class says of a method stands there
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
