"""Write a checkpoint as a model that transformers loads: norm-free with its own code, or in GPT-2's or Llama's layout.

Examples:
  python scripts/export_hf.py checkpoint=runs/RUN out=exported/RUN
  python scripts/export_hf.py checkpoint=runs/RUN out=exported/RUN format=gpt2
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli.main import export_hf, launch
from tapernorm.config.programs import ExportConfig


@hydra.main(version_base="1.3", config_path="../configs", config_name="export_hf")
def main(tree: DictConfig) -> None:
    export_hf(tree)


if __name__ == "__main__":
    launch(main, description=__doc__, schema=ExportConfig)
