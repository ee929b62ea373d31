"""One name, one thing: no two classes or type aliases of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import likethat

PACKAGE = Path(likethat.__file__).parent


def named_types(file: Path) -> list[str]:
    """Return the classes and type aliases that a module defines; nobody else sees those that begin with _."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assigned = [(node.value, target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    aliases = [target.id for value, target in assigned if isinstance(target, ast.Name) and not is_type_variable(value)]
    return [name for name in (*classes, *aliases) if not name.startswith("_") and not name.isupper()]


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "TypeVar"


def test_no_two_types_share_a_name() -> None:
    places = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in named_types(file):
            places[name].append(str(file.relative_to(PACKAGE)))
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
