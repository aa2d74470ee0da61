"""Write a model for transformers: `tapernorm export` of the checkout that this file lies in; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tapernorm.cli.command import start

if __name__ == "__main__":
    start("export")
