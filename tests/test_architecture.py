"""The shape of the package: who imports whom, and who may import the heavy libraries."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tapernorm"

# What each module may import from the package; a module not named here is an entry layer and may import anything.
ALLOWED = {
    "config": set(),
    "gate": {"config"},
    "dist": {"config"},
    "tokenizer": {"config"},
    "toy": set(),
    "sources": {"config", "tokenizer", "toy"},
    "data": {"config", "sources", "tokenizer"},
    "device": {"config"},
    "tracking": {"config"},
    "statistics": set(),
    "optim": {"config", "dist"},
    "norms": {"config", "gate"},
    "calibration": {"config", "dist", "norms"},
    "anchor": {"calibration", "config", "dist"},
    "cache": set(),
    "model": {"cache", "config", "gate", "norms"},
    "dynamics": {"anchor", "dist", "model"},
    "lean": set(),
    "generate": {"cache", "config", "lean", "model"},
    "checkpoint": {"config", "gate", "model", "tokenizer"},
    "timing": set(),
    "hf": {"config", "gate", "model", "norms"},
    "pretrained": {"checkpoint", "config", "gate", "hf", "model", "tokenizer"},
    "losses": {"tokenizer"},
    "table": set(),
    "comparison": {"checkpoint", "losses", "table"},
    "fold": {"config", "device", "gate", "model", "norms"},
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


def test_reports_are_made_from_files_alone() -> None:
    """Neither torch nor anything that trains: a report costs no second of import and works beside running jobs."""
    allowed = {"config", "report", "run", "statistics", "tracking"}
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
        assert "hydra" not in roots or path.stem in {"cli", "sweep", "faults"}
