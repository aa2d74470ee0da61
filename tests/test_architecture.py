"""The shape of the package: who imports whom, and who may import the heavy libraries."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tapernorm"

# What each module may import from the package; a module not named here is an entry layer and may import anything.
ALLOWED = {
    "schema": set(),
    "sites": {"schema"},
    "config": {"schema", "sites"},
    "commands": {"config", "schema"},
    "gate": {"config", "sites"},
    "tokenizer": {"config", "schema"},
    "dist": {"config", "schema"},
    "toy": set(),
    "sources": {"config", "schema", "tokenizer", "toy"},
    "data": {"config", "schema", "sources", "tokenizer"},
    "device": {"schema"},
    "tracking": {"config", "schema"},
    "statistics": set(),
    "optim": {"config", "dist", "model"},
    "norms": {"config", "gate", "sites"},
    "calibration": {"config", "dist", "norms"},
    "anchor": {"config", "norms"},
    "cache": set(),
    "model": {"cache", "config", "gate", "norms", "sites"},
    "dynamics": {"anchor", "dist", "model"},
    "lean": set(),
    "generate": {"cache", "lean", "model", "schema"},
    "checkpoint": {"config", "gate", "model", "schema", "tokenizer"},
    "timing": set(),
    "hf": {"config", "gate", "model", "norms", "schema", "tokenizer"},
    "pretrained": {"checkpoint", "config", "gate", "hf", "model", "schema", "tokenizer"},
    "losses": {"tokenizer"},
    "table": set(),
    "comparison": {"checkpoint", "losses", "table"},
    "fold": {"config", "device", "gate", "model", "norms", "schema"},
    "lens": {"checkpoint", "export", "fold", "hf", "model", "schema", "tokenizer"},
    "probing": set(),
    "tracing": {"probing"},
    "conversion": {"anchor", "calibration", "config", "fold", "gate", "norms", "probing", "tracing"},
}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_imports_point_one_way() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    for name, allowed in ALLOWED.items():
        own = {part.split(".")[1] for part in imports(PACKAGE / f"{name}.py") if part.startswith("tapernorm.")}
        assert own & modules <= allowed, name


def test_configurations_are_checked_before_torch_is_imported() -> None:
    code = "import sys, tapernorm.cli.main, tapernorm.config.programs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_reports_are_made_from_files_alone() -> None:
    """Neither torch nor anything that trains: a report costs no second of import and works beside running jobs."""
    allowed = {"config", "report", "schema", "run", "statistics", "tracking"}
    for path in (PACKAGE / "report").glob("*.py"):
        own = {part.split(".")[1] for part in imports(path) if part.startswith("tapernorm.")}
        assert own <= allowed, path.stem
        assert "torch" not in {name.split(".")[0] for name in imports(path)}


def test_exported_models_need_torch_and_transformers_alone() -> None:
    for path in (PACKAGE / "exported").glob("*.py"):
        tree = ast.parse(path.read_text())
        relative = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
        roots = {name.split(".")[0] for name in imports(path)}
        assert roots <= {"torch", "transformers"} | relative and relative <= {"configuration_tapernorm"}


def test_each_heavy_library_has_one_place() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "exported":  # data: what exported models compute with, somewhere else
            continue
        roots = {name.split(".")[0] for name in imports(path)}
        assert "wandb" not in roots or path.stem == "tracking"
        assert "transformers" not in roots or path.stem == "hf"
        assert "transformer_lens" not in roots or path.stem == "lens"
        assert "hydra" not in roots or path.stem in {"cli", "sweep", "faults"}
