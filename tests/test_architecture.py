"""The shape of the package: folders by duty, imports downward only, each heavy library in one place."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tapernorm"
# From the bottom up: a folder imports from itself and from those before it.
FOLDERS = (
    "config", "data", "runtime", "method", "model", "training", "conversion", "analysis", "interop", "bench", "cli",
)  # fmt: skip
MODULES = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "exported"]  # these are data: see below


def imports(path: Path, top: bool = False) -> set[str]:
    """Dotted names that a file imports, those inside functions included unless `top`; TYPE_CHECKING blocks too."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    nodes = tree.body if top else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def own(path: Path, top: bool = False) -> set[str]:
    """The package's modules that a file imports."""
    known = {module_of(other) for other in MODULES}
    return imports(path, top) & known - {module_of(path)}


def test_modules_lie_in_folders() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.suffix == ".py"} <= {"__init__.py", "__main__.py"}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(FOLDERS)
    for folder in FOLDERS:
        assert ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())), folder


def test_imports_point_downward() -> None:
    for path in MODULES:
        if path.parent == PACKAGE:
            continue
        here = FOLDERS.index(path.relative_to(PACKAGE).parts[0])
        for name in own(path) - {"tapernorm"}:
            assert FOLDERS.index(name.split(".")[1]) <= here, f"{module_of(path)} imports {name}"


def test_no_imports_go_in_circles() -> None:
    graph = {module_of(path): own(path) for path in MODULES}
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"in circles, or above one: {sorted(graph)}"


def test_the_step_stands_on_little() -> None:
    """What the training loop imports, directly or not, without what functions import when they are called."""
    paths = {module_of(path): path for path in MODULES}
    found, waiting = set(), {"tapernorm.training.loop"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= own(paths[name], top=True) - found
    assert sum(len(paths[name].read_text().splitlines()) for name in found) <= 5_000
    assert not {name.split(".")[1] for name in found - {"tapernorm"}} & {"analysis", "interop", "bench", "cli"}


def test_modules_are_short() -> None:
    assert not [path.name for path in MODULES if len(path.read_text().splitlines()) > 400]


def test_configurations_are_checked_before_torch_is_imported() -> None:
    code = "import sys, tapernorm.cli.main, tapernorm.config.programs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_reports_are_made_from_files_alone() -> None:
    """Without torch: a report costs no second of import and works beside running jobs."""
    code = "import sys, tapernorm.analysis.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_exported_models_need_torch_and_transformers_alone() -> None:
    for path in (PACKAGE / "interop" / "exported").glob("*.py"):
        tree = ast.parse(path.read_text())
        relative = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
        roots = {name.split(".")[0] for name in imports(path)}
        assert roots <= {"torch", "transformers"} | relative and relative <= {"configuration_tapernorm"}


def test_each_heavy_library_has_one_place() -> None:
    for path in MODULES:
        roots = {name.split(".")[0] for name in imports(path)}
        assert "wandb" not in roots or path.stem == "tracking"
        assert "transformers" not in roots or path.stem == "hf"
        assert "transformer_lens" not in roots or path.stem == "lens"
        assert "hydra" not in roots or path.parent.name == "cli"
