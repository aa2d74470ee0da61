"""What comes from others is data: nothing that is loaded executes code, and no secret gets into what is written."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import save_file

from tapernorm.cli import errors, replay
from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, to_dict, write_text
from tapernorm.data.prepare import prepare
from tapernorm.data.tokenizer import Tokenizer, build_tokenizer
from tapernorm.model.hf import open_pretrained
from tapernorm.runtime.log import LOGGER, append_log, open_log, printable
from tapernorm.runtime.record import MetricsFile
from tapernorm.runtime.saved import load_run
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training.loop import train
from tests.conftest import TINY, merge

ROOT = Path(__file__).parents[1]


class Evil:
    """A pickle of it runs a command when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that is there once foreign code has run."""
    return tmp_path / "executed"


@pytest.fixture
def evil(marker: Path) -> bytes:
    content = pickle.dumps(Evil(marker), protocol=2)  # the one that torch.load knows
    pickle.loads(content)
    assert marker.exists(), "the attack of these tests works"
    marker.unlink()
    return content


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text.strip(), text
    return text


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def trained(tiny: Callable[..., Config], tmp_path: Path) -> tuple[Config, Path]:
    """A short run and its last checkpoint."""
    config = tiny(trainer={"max_steps": 4, "save_interval": 2}, gate={"k_warmup": 2, "k_taper": 3})
    (tmp_path / "run").mkdir()
    train(config, tmp_path / "run")
    return config, checkpoints.path_at(tmp_path / "run", 4)


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Put another file into a checkpoint, with the right checksum."""
    (checkpoint / name).write_bytes(content)
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][name] = checkpoints.checksum(checkpoint / name)
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    assert checkpoints.fault(checkpoint) is None


@pytest.mark.parametrize("zipped", [False, True])
def test_a_malicious_training_state_is_not_opened(
    trained: tuple[Config, Path], evil: bytes, marker: Path, zipped: bool
) -> None:
    config, path = trained
    if zipped:
        torch.save({"optimizer": Evil(marker)}, path / "training.pt")
        evil = (path / "training.pt").read_bytes()
    replace_file(path, "training.pt", evil)
    with pytest.raises(ConfigError, match=r"training\.pt is not what was saved") as caught:
        train(config, path.parents[1], path)
    one_line(caught.value)
    assert not marker.exists()


def test_malicious_weights_are_not_opened(trained: tuple[Config, Path], evil: bytes, marker: Path) -> None:
    _, path = trained
    replace_file(path, "model.safetensors", evil)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read") as caught:
        checkpoints.load_model(path)
    one_line(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "line",
    [
        '!!python/object/apply:os.system ["touch {marker}"]',
        "name: !!python/object/apply:os.system ['touch {marker}']",
        "_target_: os.system\ncommand: touch {marker}",
        "model: {{_target_: os.system, command: touch {marker}}}",
        "norm: {{kind: taper, _target_: os.system, command: touch {marker}}}",
    ],
)
def test_a_malicious_saved_configuration_is_refused(tmp_path: Path, marker: Path, line: str) -> None:
    text = line.format(marker=marker)
    (tmp_path / ".hydra").mkdir()
    for file in (tmp_path / "config.yaml", tmp_path / ".hydra" / "config.yaml"):
        file.write_text(text)
    with pytest.raises(ConfigError):
        checkpoints.read_config(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError):
        load_run(tmp_path)
    assert not marker.exists()


# ----------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_story_files_are_only_data(tmp_path: Path, evil: bytes, marker: Path, suffix: str) -> None:
    (tmp_path / f"stories{suffix}").write_bytes(evil * 40)
    dataset = {"kind": "text", "train": str(tmp_path / f"stories{suffix}"), "vocab_size": 300}
    tree = merge(TINY, {"dataset": dataset, "tokenizer": {"kind": "bytes"}, "cache_dir": str(tmp_path / "cache")})
    try:
        prepare(resolve(build(tree)))
    except ConfigError as error:
        one_line(error)
    assert not marker.exists()


def test_pickled_objects_inside_parquet_stay_bytes(tmp_path: Path, evil: bytes, marker: Path) -> None:
    schema = pa.schema([pa.field("text", pa.string())], metadata={b"pandas": evil, b"ARROW:extension:name": evil})
    rows = [f"story {number} " * 20 for number in range(80)]
    pq.write_table(pa.table({"text": rows}, schema=schema), tmp_path / "stories.parquet")
    dataset = {"kind": "text", "train": str(tmp_path / "stories.parquet"), "held_out": 0.2, "vocab_size": 300}
    tree = merge(TINY, {"dataset": dataset, "tokenizer": {"kind": "bytes"}, "cache_dir": str(tmp_path / "cache")})
    prepare(resolve(build(tree)))
    assert not marker.exists()


def test_a_ranks_file_is_only_data(tmp_path: Path, evil: bytes, marker: Path) -> None:
    (tmp_path / "ranks").write_bytes(evil)
    config = build(merge(TINY, {"tokenizer": {"kind": "bpe", "ranks": str(tmp_path / "ranks")}}))
    with pytest.raises(ConfigError, match="not a usable tiktoken ranks file") as caught:
        build_tokenizer(config.tokenizer, None)
    one_line(caught.value)
    assert not marker.exists()


def test_prepared_tokens_are_only_data(tmp_path: Path, evil: bytes, marker: Path) -> None:
    config = resolve(build(merge(TINY, {"cache_dir": str(tmp_path / "cache")})))
    entry = prepare(config).entry
    for file in entry.iterdir():
        file.write_bytes(evil)
    prepare(config)  # made anew, as they are damaged
    assert not marker.exists()


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors", "both"])
def test_a_foreign_model_executes_nothing(tmp_path: Path, evil: bytes, marker: Path, weights: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    code = f"import os\nos.system('touch {marker}')\nclass Model: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    config = {
        "model_type": "llama",
        "auto_map": {"AutoConfig": "configuration_evil.Model", "AutoModelForCausalLM": "modeling_evil.Model"},
        "trust_remote_code": True,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 88,
        "max_position_embeddings": 32,
        "vocab_size": 300,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if weights != "model.safetensors":
        (folder / "pytorch_model.bin").write_bytes(evil)
    if weights == "both":
        save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    elif weights == "model.safetensors":
        (folder / "model.safetensors").write_bytes(evil)
    with pytest.raises(ConfigError) as caught:
        open_pretrained(str(folder)).weights()
    one_line(caught.value)
    assert not marker.exists()


def test_remote_code_is_never_trusted() -> None:
    for file in [*(ROOT / "tapernorm").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), *ROOT.glob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        assert "trust_remote_code" not in {keyword.arg for call in calls for keyword in call.keywords}, file


# --------------------------------------------------------------------------------------------------------------- replay


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved configuration as a run directory has it."""
    folder = tmp_path / "run" / ".hydra"
    folder.mkdir(parents=True)
    tree = {**to_dict(Config()), "runs_dir": str(tmp_path / "runs")}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "overrides.yaml").write_text("- seed=1\n")
    return folder


def check(folder: Path, *arguments: str, name: str | None = "config") -> None:
    named = ["--config-name", name] if name else []
    replay.check_replayed([str(ROOT / "train.py"), "--config-path", str(folder), *named, *arguments])


def test_what_we_save_can_be_replayed(saved: Path) -> None:
    check(saved)
    check(saved, "seed=2", "trainer.max_steps=3")
    check(saved, name="config.yaml")
    with pytest.raises(ConfigError, match="add --config-name config"):
        check(saved, name=None)
    check(ROOT / "configs", "norm=dyt", name="train")
    replay.check_replayed([str(ROOT / "scripts" / "export_hf.py"), "--config-path", "../configs"])


ATTACKS = {
    "callback": "hydra: {callbacks: {x: {_target_: os.system, command: touch MARKER}}}",
    "callback of a mild class": "hydra: {callbacks: {x: {_target_: logging.FileHandler, filename: MARKER}}}",
    "logging": "hydra: {job_logging: {version: 1, handlers: {x: {'()': os.system, command: touch MARKER}}}}",
    "launcher": "hydra: {launcher: {_target_: os.system, command: touch MARKER}}",
    "environment": "hydra: {job: {env_set: {WANDB_BASE_URL: 'http://127.0.0.1:9'}}}",
    "merged": "base: &base {hydra: {callbacks: {x: {_target_: os.system, command: touch MARKER}}}}\n<<: *base",
    "escaped": '"\\x68ydra": {callbacks: {x: {_target_: os.system, command: touch MARKER}}}',
    "defaults": "defaults: [override hydra/launcher: evil]",
    "package": "# @package hydra.callbacks.x\n_target_: os.system\ncommand: touch MARKER",
    "tag": "x: !!python/object/apply:os.system [touch MARKER]",
    "secret": "name: ${oc.env:WANDB_API_KEY}",
    "hidden secret": "name: '${${a}:WANDB_API_KEY}'",
    "escaped secret": 'name: "\\x24{oc.env:WANDB_API_KEY}"',
    "folded secret": 'tracking: {tags: ["$\\\n  {oc.env:WANDB_API_KEY}"]}',
    "secret in a key": '? "\\x24{oc.env:WANDB_API_KEY}"\n: 1',
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_replayed_configuration_cannot_do_more_than_set_keys(saved: Path, marker: Path, attack: str) -> None:
    file = saved / "config.yaml"
    file.write_text(ATTACKS[attack].replace("MARKER", str(marker)) + "\n" + file.read_text())
    for name in ("config", None):
        with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
            check(saved, name=name)
        assert "\n" not in errors.explain(caught.value) or attack == "tag"  # `stop` joins the lines
    assert not marker.exists()


@pytest.mark.parametrize("group", ["hydra", "experiment"])
def test_a_replayed_configuration_brings_no_groups(saved: Path, group: str) -> None:
    (saved / group).mkdir()
    (saved / group / "config.yaml").write_text("callbacks: {x: {_target_: os.system, command: ls}}")
    with pytest.raises(ConfigError, match="has no groups"):
        check(saved, "+experiment=config")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config-path", "pkg://this", "--config-name", "config"],
        ["--config-name", "../elsewhere/config"],
        ["--experimental-rerun", "config.pickle"],
    ],
)
def test_other_ways_in_are_closed(saved: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(replay, "CONFIGS", saved)
    (saved.parent / "elsewhere").mkdir()
    (saved.parent / "elsewhere" / "config.yaml").write_text(ATTACKS["environment"])
    with pytest.raises(ConfigError) as caught:
        replay.check_replayed([str(ROOT / "train.py"), *arguments])
    one_line(caught.value)


def test_what_is_checked_is_what_hydra_reads_beside_a_linked_program(saved: Path) -> None:
    """Hydra takes --config-path from the directory of the link, not of what it points to."""
    (saved.parent / "train.py").symlink_to(ROOT / "train.py")
    (saved / "config.yaml").write_text(ATTACKS["environment"])
    with pytest.raises(ConfigError, match="has a section 'hydra'"):
        replay.check_replayed([str(saved.parent / "train.py"), "--config-path", ".hydra", "--config-name", "config"])


@pytest.mark.parametrize("attack", ["callback of a mild class", "tag"])
def test_a_malicious_run_directory_is_refused_in_one_line(saved: Path, marker: Path, attack: str) -> None:
    file = saved / "config.yaml"
    file.write_text(ATTACKS[attack].replace("MARKER", str(marker)) + "\n" + file.read_text())
    command = [sys.executable, str(ROOT / "train.py"), "--config-path", str(saved), "--config-name", "config"]
    done = subprocess.run(command, cwd=saved, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not marker.exists() and not (saved / "runs").exists()


# -------------------------------------------------------------------------------------------------------------- imports

IMPORT = """
import pkgutil, socket, sys
def refuse(*arguments):
    raise SystemExit(f"connects to {arguments[1:]}")
socket.socket.connect = socket.socket.connect_ex = refuse
import tapernorm
for module in pkgutil.walk_packages(tapernorm.__path__, "tapernorm."):
    if ".exported" not in module.name:
        __import__(module.name)
sys.exit(" ".join(name for name in ("wandb", "transformers", "datasets") if name in sys.modules) or 0)
"""


def test_importing_connects_to_nobody_and_leaves_the_heavy_libraries_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------------------- secrets

SECRETS = {
    "WANDB_API_KEY": "5ec2e7" * 6 + "aaaa",
    "HF_TOKEN": "hf_TopSecretMarkerOfTheHub",
    "HTTPS_PROXY": "http://proxyuser:proxypassword@127.0.0.1:9",
    "HTTP_PROXY": "http://proxyuser:proxypassword@127.0.0.1:9",
}
MARKERS = [SECRETS["WANDB_API_KEY"][:8], SECRETS["HF_TOKEN"][:8], "proxypassword"]  # not even the beginning of a key


def test_no_secret_is_written_or_said(tmp_path: Path) -> None:
    """A run, its report, its evaluation and its exported model: no file and no output holds a secret."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "HF_"))}
    environment = (
        clean
        | SECRETS
        | {
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path / "home"),
            "WANDB_BASE_URL": "http://127.0.0.1:9",
            "WANDB_INIT_TIMEOUT": "2",
            "TAPERNORM_CACHE": str(tmp_path / "cache"),
        }
    )
    run = tmp_path / "runs" / "one"
    said = []

    def call(script: str, *arguments: str, status: int = 0) -> str:
        command = [sys.executable, str(ROOT / script), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == status, done.stdout + done.stderr
        said.append(done.stdout + done.stderr)
        return said[-1]

    device = "trainer.device=cpu"
    assert "W&B" in call("train.py", "experiment=smoke", "norm=all_taper", f"run_dir={run}", device)
    call("evaluate.py", f"checkpoint={run}", "fold=true", "device=cpu")
    call("scripts/export_hf.py", f"checkpoint={run}", f"out={tmp_path / 'exported'}")
    call("train.py", "experiment=smoke", "dataset=tinystories", device, status=2)  # the hub's error, with its proxy
    assert (run / "wandb").is_dir() and (run / "report.html").is_file() and (tmp_path / "exported").is_dir()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    found = [str(path) for path in files if any(marker.encode() in path.read_bytes() for marker in MARKERS)]
    assert not found
    for text in said:
        assert not any(marker in text for marker in MARKERS), text


@pytest.mark.parametrize("what", ["\x1b]0;owned\x07", "\x1b[2J", "\r", "\x08", "\x9b31m", "\u202e", "\x00"])
def test_P66_what_a_model_writes_steers_no_terminal(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(tmp_path):
        LOGGER.info(f"sample 1: a{what}b\tc")
        LOGGER.warning(f"{what}")
    for text in (capsys.readouterr().out, (tmp_path / "run.log").read_text(encoding="utf-8")):
        assert what not in text.replace("\r\n", "\n") and "a\ufffd" in text and "b\tc" in text
    assert printable(f"one{what}\ntwo\tthree").startswith("one\ufffd") and "\ntwo\tthree" in printable(
        f"one{what}\ntwo\tthree"
    )


def test_P66_samples_and_continuations_are_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tapernorm.cli import continuation

    continuation._print("a\x1b[2Jb\n")
    assert capsys.readouterr().out == "a\ufffd[2Jb\n"


@pytest.mark.parametrize(
    "name", ["summary.json.tmp", "config.yaml.tmp", "report.html.tmp", "data.json.tmp", "samples.txt.tmp"]
)
def test_P64_no_link_is_followed_for_writing(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / name.removesuffix(".tmp")
    (tmp_path / "run" / name).symlink_to(precious)
    write_text(target, "ours")
    assert target.read_text() == "ours" and precious.read_text() == "mine"
    target.unlink()
    target.symlink_to(precious)
    write_text(target, "ours")
    assert target.read_text() == "ours" and precious.read_text() == "mine" and not target.is_symlink()


@pytest.mark.parametrize("name", ["run.log", "metrics.jsonl"])
def test_P64_nothing_is_appended_through_a_link(tmp_path: Path, name: str) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text('{"step": 1}\n')
    folder.mkdir()
    (folder / name).symlink_to(precious)
    if name == "run.log":
        append_log(folder, "a line")
        with pytest.raises(ConfigError, match="cannot be written"), open_log(folder):
            pass
    else:
        with pytest.raises(OSError, match="symbolic links"):
            MetricsFile(folder)
    assert precious.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "..", ".hidden"])
def test_P64_a_data_set_stays_in_the_cache(name: str) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.name=.* is to be a plain name"):
        build({"dataset": {"kind": "toy", "name": name}})


@pytest.mark.parametrize(
    "claim", [{"d_model": 1 << 20, "head_dim": 1 << 10}, {"n_layer": 1 << 30}, {"d_ff": 1 << 40}, {"n_ctx": 1 << 50}]
)
@pytest.mark.timeout(60)
def test_P64_shapes_are_compared_before_memory_is_taken(
    tiny: Callable[..., Config], tmp_path: Path, claim: dict[str, int]
) -> None:
    train(tiny(), tmp_path / "run")
    path = checkpoints.find(tmp_path / "run")
    tree = yaml.safe_load((path / "config.yaml").read_text())
    tree["model"] |= claim
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"is not of the model in config\.yaml|model\.n_(ctx|layer)=") as told:
        checkpoints.load_model(path)
    assert "\n" not in str(told.value)


def test_P64_a_rank_beyond_all_vocabularies_is_refused() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 10**12}
    with pytest.raises(ValueError, match="rank 1000000000000 is beyond 16,777,216 ids"):
        Tokenizer("bpe", ranks)
