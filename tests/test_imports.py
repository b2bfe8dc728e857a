"""Imports only go down, and what answers at once never imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kumi"

# From the bottom up; a module may import its own package and what stands before it.
ORDER = [
    "errors",
    "objectives",
    "paths",
    "units",
    "progress",
    "output",
    "files",
    "hub",
    "spec",
    "megatron",
    "plan",
    "report",
    "clusters",
    "config",
    "describe",
    "compat",
    "storage",
    "data",
    "nn",
    "parallel",
    "dryrun",
    "convert",
    "launch",
    "train",
    "bench",
    "api",
    "cli",
    "__main__",
]
TORCH_FREE = [
    "errors",
    "paths",
    "units",
    "progress",
    "output",
    "files",
    "hub",
    "spec",
    "megatron",
    "plan",
    "report",
    "config",
    "describe",
    "data",
    "api",
    "cli",
    "__main__",
    "objectives",
    "storage",
]


def _imports(file: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level) of every import outside of `if TYPE_CHECKING`."""
    tree = ast.parse(file.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"kumi.{alias.name}" for alias in node.names] if node.module == "kumi" else [node.module or ""]
            found += [(name, node in tree.body) for name in names]
    return found


def _package(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_go_down():
    wrong = []
    for file in SOURCE.rglob("*.py"):
        package = _package(file)
        if package == "__init__":
            continue
        assert package in ORDER, f"{package} has no place in ORDER"
        for module, _ in _imports(file):
            parts = module.split(".")
            if (
                parts[0] == "kumi"
                and len(parts) > 1
                and parts[1] in ORDER
                and ORDER.index(parts[1]) > ORDER.index(package)
            ):
                wrong.append(f"{file.relative_to(SOURCE)} imports {module}")
    assert wrong == []


def test_no_torch_at_the_top_of_descriptions():
    wrong = [
        f"{file.relative_to(SOURCE)} imports {module}"
        for file in SOURCE.rglob("*.py")
        if _package(file) in TORCH_FREE
        for module, top in _imports(file)
        if module.split(".")[0] == "torch" and (top or _package(file) == "data")
    ]
    assert wrong == []


def test_help_and_describe_do_not_import_torch():
    program = (
        "import sys; from kumi.cli import main\n"
        "main(['describe', 'examples/quickstart.toml'])\n"
        "heavy = {'torch', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=SOURCE.parents[1], capture_output=True)
