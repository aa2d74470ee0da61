"""Report of runs, of sweeps or of both together: a page to look at, statistics over seeds, a table, figures.

Writes report.html (one file that needs no network), report.md, report.csv, chasing.png and losses.png. Unfinished
runs are shown as far as they are.

Examples:
  COMMAND runs/sweeps/NAME
  COMMAND runs/RUN runs/sweeps/NAME --out report
  COMMAND runs/sweeps/NAME --watch 30    # again whenever something was logged; Ctrl-C ends it
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from tapernorm.analysis.report import last_change, write_report
from tapernorm.cli.command import parser_of, spelled
from tapernorm.cli.errors import stop
from tapernorm.config.schema import ConfigError


def parser() -> argparse.ArgumentParser:
    found = parser_of("report", __doc__)
    found.add_argument("directories", nargs="+", type=Path, help="of runs, of sweeps, or whatever holds them")
    found.add_argument(
        "--out", type=Path, help="where to write; default: the directory, or ./report if there are several"
    )
    found.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=30.0,
        metavar="SECONDS",
        help="write again while runs go on (default: 30)",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(spelled(arguments, "out", "watch"))
    directories: list[Path] = given.directories
    out: Path = given.out or (directories[0] if len(directories) == 1 else Path("report"))
    try:
        seen = last_change(directories)
        print(write_report(directories, out), flush=True)
        while given.watch is not None:
            time.sleep(max(given.watch, 1.0))
            if (now := last_change(directories)) != seen:
                seen = now
                print(f"{time.strftime('%H:%M:%S')} {write_report(directories, out)}", flush=True)
    except ConfigError as error:
        stop(str(error))
    except OSError as error:
        stop(f"{error.filename or out}: {error.strerror}", status=1)
    except KeyboardInterrupt:
        print()
