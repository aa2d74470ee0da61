"""Evaluate a checkpoint: validation loss and samples, folded or not; one JSON beside the run.

Examples:
  python evaluate.py checkpoint=runs/RUN
  python evaluate.py checkpoint=runs/RUN fold=true save_folded=runs/RUN-folded
  python evaluate.py checkpoint=runs/RUN/checkpoints/step-00000300 prompt='Once upon a time' samples=5
"""

import hydra
from omegaconf import DictConfig

from tapernorm import cli
from tapernorm.config import EvaluateConfig, all_keys


@hydra.main(version_base="1.3", config_path="configs", config_name="evaluate")
def main(tree: DictConfig) -> float:
    return cli.evaluate(tree)


if __name__ == "__main__":
    cli.launch(main, description=__doc__, schema=EvaluateConfig, shown=[key for key, _ in all_keys(EvaluateConfig)])
