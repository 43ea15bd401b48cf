"""Sphinx configuration: MyST pages, the furo theme, and pages generated from the code."""

import pathlib

import onnxamp

project = "onnxamp"
author = "onnxamp maintainers"
release = version = onnxamp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"onnxamp {release}"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["onnxruntime", "torch", "tensorboardX"]
napoleon_numpy_docstring = False
nitpicky = False


def generate() -> None:
    """Write the rule pages and bf16 from the policy, and the operators from the table of gradients."""
    from onnxamp.autodiff import coverage
    from onnxamp.policy import opset_page, pages

    folder = pathlib.Path(__file__).parent
    pages.write(folder / "rules")
    opset_page.write(folder / "bf16.md")
    coverage.write(folder / "operators.md")


generate()
