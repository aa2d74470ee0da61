"""Measure what norms cost in decoding with a cache, arm by arm, beside transformers' generate(); JSON and a table.

Examples:
  python scripts/benchmark_decode.py model=30m
  python scripts/benchmark_decode.py model=1m modes=[eager] dtypes=[float32] batch_sizes=[1]
  python scripts/benchmark_decode.py checkpoint=runs/RUN out=decode.json
"""

import hydra
from omegaconf import DictConfig

from tapernorm.cli import main as cli
from tapernorm.config.programs import BenchmarkConfig
from tapernorm.config.schema import all_keys


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark")
def main(tree: DictConfig) -> None:
    cli.benchmark(tree)


if __name__ == "__main__":
    shown = [key for key, _ in all_keys(BenchmarkConfig) if not key.startswith("model.")]
    cli.launch(main, description=__doc__, schema=BenchmarkConfig, shown=shown)
