"""What the command line says is one line, and what it suggests works when it is pasted."""

import shlex
import string

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from tapernorm.runtime.typed import line, quoted
from tests.cli.test_cli import launch, trainer  # noqa: F401

NASTY = [
    "My Drive",
    "müller",
    "exp=1",
    "it's",
    'a"b',
    "$HOME",
    "`x`",
    "a\\",
    "a\\'b",
    "${seed}",
    "\\${a}",
    "a,b",
    "[1]",
    "null",
]
NASTY += ["true", "1e5", "-3", "a: b", "#x", "~/x", "", " x ", "a;b", "x\ty", "!!", "*", "日本"]


@pytest.mark.parametrize("value", NASTY)
def test_P59_a_command_to_paste_names_what_it_should(value: str) -> None:
    *_, word = shlex.split(line("train", resume=value))
    override = OverridesParser.create().parse_override(word)
    assert override.get_key_element() == "resume"
    found = override.value()
    assert isinstance(found, str) and found.replace("\\${", "${").replace("\\\\", "\\") == value.replace("\\\\", "\\")


@given(st.text(alphabet=string.printable.replace("\n", "").replace("\r", "").replace("\x0b", "").replace("\x0c", "")))
@settings(max_examples=300, deadline=None)
def test_P59_any_text_comes_through_the_shell_and_hydra(value: str) -> None:
    (word,) = shlex.split(shlex.quote(f"name={quoted(value)}"))
    found = OverridesParser.create().parse_override(word).value()
    assert isinstance(found, str) and ("${" in value or found == value)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["seed=1,2"], "write seed=[1,2] for a list, or \"seed='1,2'\" for a text"),
        (["--optim.lr=0.01"], "write optim.lr=0.01, without dashes"),
        (["-optim.lr=0.01"], "write"),
        (["--nothing"], "unrecognized arguments: --nothing; see --help"),
        (["anchor=null"], "anchor=null: anchor has batch_mean, fixed_target"),
        (["optim=null"], "optim=null: optim has default"),
        (["tracking.wandb=None"], "input should be 'auto', 'online', 'offline' or 'disabled'"),
        (["run_dir=None", "cache_dir=None"], "run_dir='None' is a string; write run_dir=null"),
        (["-m", "sweep.name=12e4", "seed=0,1"], "sweep.name=120000.0 is no text"),
    ],
)
def test_P53_P54_faults_of_spelling_are_one_line(launch, trainer, tmp_path, typed, told):  # noqa: F811
    status, _, err = launch(*typed)
    assert status == 2 and told in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert not trainer.calls and not list(tmp_path.iterdir())


@pytest.mark.parametrize("typed", ["name=it's", "name=a, b", "name=x{y", "name=[a"])
def test_P53_the_hint_works_when_it_is_pasted(launch, trainer, typed):  # noqa: F811
    status, _, err = launch(typed)
    assert status == 2 and err.count("\n") == 1
    hint = err.partition(" or ")[2].rpartition(" for a text")[0] if "several" in err else err.partition("; write ")[2]
    assert launch("experiment=smoke", *shlex.split(hint))[0] == 0
    assert trainer.calls[-1][0].name == typed.partition("=")[2]


def test_P53_help_lists_what_the_program_takes(launch):  # noqa: F811
    out = launch("--help")[1]
    assert "suite" not in out and "True" not in out and "False" not in out
