"""Evaluate checkpoints: losses with errors, tails and worst documents, samples, folded models, comparisons; one JSON.

Examples:
  python evaluate.py checkpoint=runs/RUN
  python evaluate.py checkpoint=runs/RUN fold=true save_folded=runs/RUN-folded
  python evaluate.py checkpoint=runs/RUN dataset=text dataset.valid=other.txt
  python evaluate.py 'checkpoint=[openai-community/gpt2,runs/RUN]' suite=gpt2
  python evaluate.py checkpoint=runs/sweeps/NAME baseline=runs/sweeps/NAME/norm-baseline_seed-0
  python evaluate.py 'checkpoint=[runs/A,runs/B]' 'out=a-and-b.json'
  python evaluate.py 'checkpoint=runs/*-s0'
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli.main import evaluate, launch
from tapernorm.config.programs import EvaluateConfig


@hydra.main(version_base="1.3", config_path="configs", config_name="evaluate")
def main(tree: DictConfig) -> None:
    evaluate(tree)


if __name__ == "__main__":
    launch(main, description=__doc__, schema=EvaluateConfig)
