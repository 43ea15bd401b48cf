"""The import order of the rooms, as ARCHITECTURE.md lists it, read from the source."""

import ast
import pathlib

import pytest

import onnxamp

ROOT = pathlib.Path(onnxamp.__file__).parent

# Each room may import itself and those in its row.
BASE = {"errors", "dtypes", "config", "console", "files"}
MAY_IMPORT = {
    "errors": set(),
    "dtypes": {"errors"},
    "config": {"errors"},
    "console": {"errors"},
    "files": set(),
    "model": BASE,
    "ort": BASE | {"model"},
    "policy": BASE | {"model"},
    "passes": BASE | {"model", "policy"},
    "conversion": BASE | {"model", "policy", "passes"},
    "evidence": BASE | {"model", "policy", "passes", "conversion", "ort"},
    "autodiff": BASE | {"model", "policy", "passes"},
    "training": BASE | {"model", "policy", "passes", "conversion", "autodiff"},
    "trainer": BASE | {"model", "policy", "passes", "conversion", "ort", "evidence", "training", "report"},
    "report": set(),
    "comparison": BASE | {"model", "policy", "passes", "conversion", "evidence", "ort", "report"},
}
FREE = {"commands", "cli", "__init__", "__main__"}


def room(path: pathlib.Path) -> str:
    """The first part of a module's path below the package."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: pathlib.Path) -> set[str]:
    """Rooms of onnxamp that the module imports, in type-checking blocks and function bodies too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "onnxamp":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("onnxamp.")}
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if room(path) not in FREE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_forward_only(path: pathlib.Path) -> None:
    allowed = MAY_IMPORT[room(path)] | {room(path), "__version__"}
    assert imports(path) <= allowed


def test_every_room_is_listed() -> None:
    rooms = {room(path) for path in ROOT.rglob("*.py")}
    assert rooms == set(MAY_IMPORT) | FREE


def test_only_ort_imports_the_runtime() -> None:
    for path in ROOT.rglob("*.py"):
        if room(path) == "ort":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "onnxruntime" for name in names), path
