"""Docstrings of functions say what the function does: they start with a verb and are sentences."""

from __future__ import annotations

import ast
from pathlib import Path

import likethat

PACKAGE = Path(likethat.__file__).parent
NO_VERBS = frozenset(
    "A All An And As At Both By Each Every For From How However In It Its No None Of On One Only Other Ours Some That "
    "The Their These They This Those To True Two Under Unless Until What When Where Whether Which Who Why With".split()
)


def test_docstrings_of_functions_start_with_a_verb() -> None:
    wrong, seen = [], 0
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                seen += 1
                word = text.split()[0].rstrip(",;")
                is_sentence = word[0].isupper() and word.replace("-", "").isalpha() and text.rstrip()[-1] in ".?:"
                if word in NO_VERBS or not is_sentence:
                    wrong.append(f"{file.relative_to(PACKAGE)}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    assert seen > 500
    assert wrong == []
