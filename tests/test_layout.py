"""The import order of the rooms, as ARCHITECTURE.md lists it, and what the source does."""

import ast
import pathlib
import re

import pytest

import onnxamp

ROOT = pathlib.Path(onnxamp.__file__).parent

FREE = {"commands", "cli", "__init__", "__main__"}


def table() -> dict[str, set[str]]:
    """What each room may import besides itself, from the table of rooms in ARCHITECTURE.md."""
    text = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    base: set[str] = set()
    found: dict[str, set[str]] = {}
    for line in text.partition("| room |")[2].partition("\n\n")[0].splitlines()[2:]:
        first, _, last = re.split(r" \| ", line.strip("| "), maxsplit=2)
        rooms = [name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", first)]
        base = base or set(rooms)
        allowed = set(re.findall(r"`([^`]+)`", last)) | (set() if "nothing of ours" in last else base)
        found |= {name: allowed for name in rooms if name not in FREE}
    return found


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


MAY_IMPORT = table()
MODULES = sorted(path for path in ROOT.rglob("*.py") if room(path) not in FREE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_forward_only(path: pathlib.Path) -> None:
    allowed = MAY_IMPORT[room(path)] | {room(path), "__version__"}
    assert imports(path) <= allowed


def test_every_room_is_listed() -> None:
    rooms = {room(path) for path in ROOT.rglob("*.py")}
    assert rooms == set(MAY_IMPORT) | FREE
    assert set().union(*MAY_IMPORT.values()) <= rooms  # no typing error lets something through
    assert {"policy", "passes", "evidence"}.isdisjoint(MAY_IMPORT["model"])


def test_only_ort_imports_the_runtime() -> None:
    for path in ROOT.rglob("*.py"):
        if room(path) == "ort":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "onnxruntime" for name in names), path
