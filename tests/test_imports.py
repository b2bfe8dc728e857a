"""Imports only go down, and commands that answer at once never import torch."""

import ast
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kumi"

# From the bottom up; a module may import its own package and the ones before it.
ORDER = [
    "errors",
    "deprecated",
    "paths",
    "json_worker",
    "process_limits",
    "units",
    "progress",
    "safe_output",
    "files",
    "remote",
    "hub",
    "spec",
    "objectives",
    "megatron",
    "plan",
    "export",
    "clusters",
    "data",
    "rewards",
    "config",
    "report",
    "accelerator",
    "compat",
    "storage",
    "nn",
    "convert",
    "parallel",
    "dryrun",
    "inference",
    "launch",
    "doctor",
    "evaluation",
    "rollout",
    "train",
    "bench",
    "validation",
    "api",
    "cli",
    "__main__",
]
TORCH_FREE = [
    "errors",
    "paths",
    "process_limits",
    "units",
    "progress",
    "safe_output",
    "files",
    "remote",
    "hub",
    "spec",
    "megatron",
    "plan",
    "report",
    "config",
    "export",
    "deprecated",
    "data",
    "api",
    "cli",
    "__main__",
    "objectives",
    "rewards",
    "storage",
    "json_worker",
]


def _imports(file: Path, names: Collection[str] = ()) -> list[tuple[str, bool]]:
    """(module, whether at the top level) of every import outside of `if TYPE_CHECKING`.

    Names imported from a package count as the package, unless `names` has a module of that name.
    """
    tree = ast.parse(file.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    results = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            results += [(alias.name, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = (
                below if node.module == "kumi" else [name if name in names else node.module or "" for name in below]
            )
            results += [(name, node in tree.body) for name in modules]
    return results


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


def _module(file: Path) -> str:
    return ".".join(("kumi", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def test_no_modules_import_each_other():
    """Also where an import stands in a function."""
    files = {_module(file): file for file in SOURCE.rglob("*.py")}
    sorter = TopologicalSorter()
    for name, file in files.items():
        given = [module for module, _ in _imports(file, names=set(files))]
        sorter.add(name, *(module for module in given if module in files and module != name))
    sorter.prepare()  # raises CycleError, which names them


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
