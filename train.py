"""Train a small language model whose normalization layers can be tapered away, and watch what they do.

Every run gets its own directory with its configuration, metrics, checkpoints and log; --multirun compares runs.

Examples:
  python train.py experiment=smoke
  python train.py model=3m norm=all_taper anchor=mean_log trainer.max_steps=2000
  python train.py --multirun norm=baseline,internal_taper seed=0,1,2
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli.main import launch, train


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(tree: DictConfig) -> float | None:
    return train(tree)


if __name__ == "__main__":
    launch(main, description=__doc__)
