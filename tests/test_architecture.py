"""The rules of the layout that a reader relies on: imports point down, files stay small, nothing is machine-bound."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kvfold"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Higher imports lower; parts on one level may import each other.
LEVELS = {
    "cli": 5,
    "report": 4,
    "lab": 4,
    "doctor": 4,
    "train": 3,
    "evaluate": 3,
    "export": 3,
    "convert": 2,
    "modeling": 2,
    "families": 1,
    "checkpoint": 1,
    "attention": 1,
    "errors": 0,
    "precision": 0,
    "option_types": 0,
    "allocator": 0,
    "progress": 0,
    "provenance": 0,
    "registry": 0,
    "texts": 0,
}

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users|tmp)/\w")


def part_of(path: Path) -> str:
    """The part of the package that a source file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str) -> set[str]:
    """The absolute names of the modules that `source` imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "kvfold"}
    return names


def upward_imports(part: str, source: str) -> list[str]:
    """The imports of kvfold in `source` that do not point down, for a file of `part`."""
    upward = []
    for name in sorted(imported_modules(source)):
        target = name.split(".")[1:2]
        if name == "kvfold":
            upward += [name] if not re.search(r"from kvfold import \w", source) else []
        elif name.startswith("kvfold.") and LEVELS[target[0]] > LEVELS[part]:
            upward.append(name)
    return upward


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    if path == PACKAGE / "__init__.py":
        return
    assert upward_imports(part_of(path), path.read_text("utf-8")) == []


def test_the_import_rule_sees_what_it_should():
    assert upward_imports("attention", "from kvfold.convert import plan") == ["kvfold.convert"]
    assert upward_imports("attention", "def f():\n    import kvfold.cli.main") == ["kvfold.cli.main"]
    assert upward_imports("errors", "from kvfold import registry, report") == ["kvfold.report"]
    assert upward_imports("cli", "import torch\nfrom kvfold.errors import KvfoldError") == []
    assert upward_imports("convert", "from kvfold.modeling import load_model") == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_small_and_named_after_what_they_hold(path):
    assert len(path.read_text("utf-8").splitlines()) <= 400
    assert "util" not in path.stem


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=lambda p: p.parent.name)
def test_init_files_only_re_export(path):
    for node in ast.parse(path.read_text("utf-8")).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__")
        assert docstring or exports or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)


def test_every_part_is_documented_as_a_level():
    assert {part_of(path) for path in SOURCES} - {"__init__"} <= set(LEVELS)


def test_no_file_holds_a_path_of_the_machine_it_was_written_on():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit[0]}" for hit in MACHINE_PATH.finditer(text)]
    assert found == []
