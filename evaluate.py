"""Evaluate checkpoints: `tapernorm evaluate` of this checkout; see --help."""

from tapernorm.cli.command import start

if __name__ == "__main__":
    start("evaluate")
