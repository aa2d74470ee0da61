"""tapernorm.train and its neighbours: what the commands do, as functions."""

from pathlib import Path

import pytest

import tapernorm

SMOKE = ("experiment=smoke", "tracking=none", "report=false", "trainer.samples=0", "trainer.progress=none")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tapernorm.Run:
    folder = tmp_path_factory.mktemp("api")
    return tapernorm.train(*SMOKE, "norm=all_taper", f"run_dir={folder / 'run'}", f"cache_dir={folder / 'cache'}")


def test_a_run_has_all_that_its_directory_has(run: tapernorm.Run) -> None:
    assert run.summary["status"] == "finished" and run.config.norm.name == "all_taper"
    assert run.metrics.index[-1] == 30 and run.metrics["val/loss"].dropna().iloc[-1] == run.summary["val_loss"]
    assert run.metrics["gate/g"].iloc[-1] == 0.0
    assert run.model.config.vocab_size == run.tokenizer.n_vocab
    assert tapernorm.load(run.directory) == tapernorm.load(run) == run


def test_what_goes_wrong_is_raised_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tapernorm.ConfigError, match=r"unknown key 'optim\.learning_rat'; did you mean 'optim\.lr'"):
        tapernorm.train("optim.learning_rat=1")
    with pytest.raises(tapernorm.ConfigError, match="did you mean experiment=smoke"):
        tapernorm.compose("experiment=smok")
    with pytest.raises(tapernorm.ConfigError, match=r"trainer\.max_steps"):
        tapernorm.compose("trainer.max_steps=-1")
    with pytest.raises(tapernorm.ConfigError, match="holds no run"):
        tapernorm.load(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(tapernorm.RunFailed, match=r"(?s)not finite|non-finite.*run\.log"):
        tapernorm.train(*SMOKE, "optim.lr=1e9", "optim.warmup_steps=0", f"cache_dir={tmp_path / 'c'}", "run_dir=bad")
    assert tapernorm.load("bad").summary["status"] == "diverged"


def test_a_sweep_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(tapernorm.__file__).parents[1]))
    runs = tapernorm.sweep(*SMOKE, "norm=baseline,all_taper", "cache_dir=c")
    assert sorted(run.config.norm.name for run in runs) == ["all_taper", "baseline"]
    assert tapernorm.report(runs, "pages") == Path("pages/report.html") and Path("pages/report.html").is_file()
    with pytest.raises(tapernorm.RunFailed, match="unknown key"):
        tapernorm.sweep("seeed=0,1")
