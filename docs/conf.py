"Sphinx's settings of the site. docs/make_site.py stages the pages, calls Sphinx with this file, and checks every link."
import sys
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
settings = ConfigParser(delimiters=["="])
settings.read(HERE.parent/"settings.ini", encoding="utf-8")

project, version, author = (settings["DEFAULT"][name] for name in ("lib_name", "version", "author"))
extensions = ["myst_nb", "site_look"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["**/.ipynb_checkpoints"]

nb_execution_mode = "off"        # a page shows the outputs that its notebook keeps
nb_merge_streams = True
nb_ipywidgets_js = {}            # would be fetched from another host
myst_enable_extensions = ["dollarmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 3
myst_heading_slug_func = "site_look.jupyter_anchor"
# Markdown of Jupyter has none of these: a line that begins with % is text there
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]
# pages stand in the side bar that site_look makes; levels of headings and unknown lexers are no broken link
suppress_warnings = ["toc.not_included", "myst.header", "misc.highlighting_failure", "mystnb.unknown_mime_type"]

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # would be fetched, which a browser refuses for pages on the disk
html_use_index = False
html_domain_indices = False
FONT = {"font-stack": "system-ui, sans-serif"}
html_theme_options = dict(light_css_variables=FONT, dark_css_variables=FONT)
pygments_dark_style = "github-dark"
