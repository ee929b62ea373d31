"""A hook of mkdocs that makes the pages of the site whose text stands elsewhere: README, examples, docstrings."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "likethat"
TOP = "modules"  # the page of what lies in no folder of the package
CODE_STYLES = {"light": "friendly", "dark": "github-dark"}  # of Pygments
LINK_TO_DOCS = re.compile(r"(?<=\]\()(\.\./)?docs/")
LINK_TO_ROOT = re.compile(r"(?<=\]\()(?:\.\./)?(CONTRIBUTING|CHANGELOG)\.md(?=\))")
LINK_TO_EXAMPLE = re.compile(r"(?<=\]\()(?:\.\./)?examples/(\w+)\.(?:py|ipynb)(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages, and the reference's to the navigation."""
    modules = module_pages()
    generated = {
        "index.md": _read("README.md"),
        "contributing.md": _read("CONTRIBUTING.md"),
        "changelog.md": _read("CHANGELOG.md"),
        "examples/quickstart.md": notebook_as_markdown(json.loads(_read("examples/quickstart.ipynb"))),
        **{f"api/{folder}.md": page for folder, page in modules.items()},
        **{f"code-{mode}.css": HtmlFormatter(style=style).get_style_defs() for mode, style in CODE_STYLES.items()},
    }
    for path in (ROOT / "examples").glob("*.py"):
        generated[f"examples/{path.stem}.md"] = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    (reference,) = (entry["Reference"] for entry in config.nav or () if "Reference" in entry)
    reference += [f"api/{folder}.md" for folder in modules]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links into docs/, to an example and to pages of the root, as the repository has them, lead to their pages on
    the site."""
    markdown = LINK_TO_ROOT.sub(lambda link: f"{link[1].lower()}.md", markdown)
    return LINK_TO_EXAMPLE.sub(r"examples/\1.md", LINK_TO_DOCS.sub(r"\1", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script too: a page that was opened from the disk may load no JSON."""
    folder = Path(config.site_dir, "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var searchIndex = {index};\n", encoding="utf-8")


def notebook_as_markdown(notebook: dict) -> str:
    """Return a notebook's cells as a page, without what they print."""
    cells = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        cells.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(cells) + "\n"


def module_pages() -> dict[str, str]:
    """Return the reference's pages, one for each folder of the package and one for the modules beside them."""
    pages: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("[!_]*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").parts
        pages.setdefault(module[0] if len(module) > 1 else TOP, []).append(".".join(module))
    return {
        folder: f"# {folder}\n" + "".join(f"\n## {name}\n\n::: likethat.{name}\n" for name in names)
        for folder, names in pages.items()
    }


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
