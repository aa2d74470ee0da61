"""Continue a text with a trained model, printed as it is produced.

Examples:
  python scripts/generate.py checkpoint=runs/RUN
  python scripts/generate.py checkpoint=runs/RUN prompt='Once upon a time' samples=3 top_p=0.95 seed=7
  python scripts/generate.py checkpoint=runs/RUN "prompt='Tim, the cat, said:'"  # with commas: quotes inside quotes
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli.main import generate, launch
from tapernorm.config.programs import GenerateConfig


@hydra.main(version_base="1.3", config_path="../configs", config_name="generate")
def main(tree: DictConfig) -> None:
    generate(tree)


if __name__ == "__main__":
    launch(main, description=__doc__, schema=GenerateConfig)
