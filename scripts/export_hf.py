"""Write a checkpoint as a model that transformers loads: norm-free with its own code, or in GPT-2's or Llama's layout.

Examples:
  python scripts/export_hf.py checkpoint=runs/RUN out=exported/RUN
  python scripts/export_hf.py checkpoint=runs/RUN out=exported/RUN format=gpt2
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli import main as cli
from tapernorm.config.programs import ExportConfig
from tapernorm.config.schema import all_keys


@hydra.main(version_base="1.3", config_path="../configs", config_name="export_hf")
def main(tree: DictConfig) -> None:
    cli.export_hf(tree)


if __name__ == "__main__":
    cli.launch(main, description=__doc__, schema=ExportConfig, shown=[key for key, _ in all_keys(ExportConfig)])
