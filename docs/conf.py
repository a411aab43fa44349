"""The site: `python -m sphinx -W --keep-going -q docs build/site`, with the extra `docs` installed.

Pages with code cells are executed; an error in one, or a warning, fails the build.
"""

import os
import re
from importlib.metadata import version as version_of
from pathlib import Path

# For the kernels that execute pages, before JAX starts in them: four devices, the programs that users run. A page that
# warns fails: where make_mesh comes too late, a reader's program may hang, and says so in a warning.
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4", XLA_FLAGS="", COLUMNS="160")
os.environ["PYTHONWARNINGS"] = "error::UserWarning"
os.environ["TTY_COMPATIBLE"] = "0"  # a kernel asks for colours, and a progress bar would then be drawn line by line
# Of the tree, the library alone is installed; pages run the trainer too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

project = "jaxcomm"
author = "The jaxcomm authors"
copyright = author
version = release = version_of("jaxcomm")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["data/*"]
html_theme = "furo"
html_title = "jaxcomm"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 600  # seconds a cell, on a machine however busy; a page takes less than 60 on two quiet cores
nb_execution_show_tb = True
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
napoleon_use_ivar = True


def setup(app):
    """Docstrings are Markdown more than reStructuredText: |x| is a magnitude, and * a product."""

    def end_of_code(match):
        return f"{match[1]}\\ {match[2]}" if match[2] else match[1]  # `array`s

    def translate(app, what, name, obj, options, lines):
        for place, line in enumerate(lines):
            line = line.replace("|", r"\|").replace("*", r"\*")
            line = re.sub(r"(`[^`]*`)(\w?)", end_of_code, line)
            lines[place] = re.sub(r"^( +)(?=\d+\. )", r"\1| ", line)  # a paper's numbers, of which some are left out

    app.connect("autodoc-process-docstring", translate, priority=400)  # before napoleon writes its own
