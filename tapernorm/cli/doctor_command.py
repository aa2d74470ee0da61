"""What this machine has of what tapernorm needs, and a short training self-test: for when something does not work.

One line per finding: ok, warning or problem, with the remedy. Takes up to half a minute. Put the output into a bug
report: keys, passwords and the home directory's name are left out. Exit status 0 without problems, 1 with some.

Examples:
  COMMAND
  COMMAND runs_dir=/scratch/runs json=doctor.json
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tapernorm.cli import doctor
from tapernorm.cli.command import parser_of, spelled


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended politely, it leaves nothing behind either
    try:
        sys.exit(examine())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # stdout was closed, e.g. by head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def examine(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("doctor", __doc__)
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="as the key runs_dir (default: %(default)s)")
    parser.add_argument("--cache-dir", metavar="DIR", help="as the key cache_dir")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    given = parser.parse_args(spelled(arguments, "runs_dir", "cache_dir", "json"))
    for stream in (sys.stdout, sys.stderr):  # one that lacks a character gets a question mark, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    findings = doctor.examine(
        doctor.Options(given.runs_dir, given.cache_dir), lambda finding: print(finding, flush=True)
    )
    problems, warnings = (sum(finding.mark == mark for finding in findings) for mark in ("problem", "warning"))
    print(f"{problems} problems, {warnings} warnings")
    if given.json:
        try:
            given.json.write_text(doctor.as_json(findings), encoding="utf-8")
        except OSError as error:
            print(f"error: --json {given.json}: {error.strerror}", file=sys.stderr)
            return 2
    return 1 if problems else 0
