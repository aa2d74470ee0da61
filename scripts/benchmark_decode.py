"""Measure what norms cost in decoding with a cache, arm by arm, beside transformers' generate(); JSON and a table.

Examples:
  python scripts/benchmark_decode.py model=30m
  python scripts/benchmark_decode.py model=1m modes=[eager] dtypes=[float32] batch_sizes=[1]
  python scripts/benchmark_decode.py checkpoint=runs/RUN out=decode.json
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli.main import benchmark, launch
from tapernorm.config.programs import BenchmarkConfig


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark")
def main(tree: DictConfig) -> None:
    benchmark(tree)


if __name__ == "__main__":
    launch(main, description=__doc__, schema=BenchmarkConfig)
