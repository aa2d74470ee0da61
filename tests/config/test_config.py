"""The configuration: every YAML composes and validates, every key can be overridden, faults are named in one line."""

import dataclasses
import math
import typing
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tapernorm.cli import composition
from tapernorm.cli.resume import changes
from tapernorm.config.options import Config, DatasetConfig, NormConfig, TextDatasetConfig, ToyDatasetConfig
from tapernorm.config.paths import absolute_paths
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, all_keys, defaults, leaves, to_dict, validate, write_yaml
from tapernorm.config.sites import all_sites, select_sites
from tapernorm.method.gate import GateSchedule
from tapernorm.runtime.saved import load_run, match_key

CHOICES = sorted(
    (group.name, str(file.relative_to(group).with_suffix("")))
    for group in composition.CONFIGS.iterdir()
    for file in group.rglob("*.yaml")
    if group.name != "suite"
)
EXPERIMENTS = [choice for group, choice in CHOICES if group == "experiment"]
REQUIRED = {"text": ["dataset.train=stories.txt"], "hub": ["dataset.path=owner/name"]}


@pytest.fixture(scope="module", autouse=True)
def hydra_is_ready():
    composition.register()
    with initialize_config_dir(str(composition.CONFIGS), version_base="1.3"):
        yield


def composed(*overrides: str, program: str = "train") -> dict:
    return composition.plain(compose(program, list(overrides)))


# ----------------------------------------------------------------------------------------------------------- YAML files


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda value: value)
def test_every_choice_composes_and_validates(group, choice):
    config = build(composed(f"{group}={choice}", *REQUIRED.get(choice, [])))
    resolve(config)
    section = getattr(config, group, None)
    if group in ("anchor", "calibration", "tokenizer"):
        assert section.kind == choice
    if group in ("norm", "model", "dataset"):
        assert section.name == choice


@pytest.mark.parametrize("suite", [file.stem for file in composition.CONFIGS.glob("suite/*.yaml")])
def test_every_suite_composes_and_validates(suite):
    config = validate(composed("checkpoint=x", f"suite={suite}", program="evaluate"), EvaluateConfig)
    assert {dataset.name for dataset in config.suite.values()} == set(config.suite)


def test_a_suites_filter_follows_its_data_sets():
    given = ["checkpoint=x", "suite=gpt2", "suite.openwebtext.max_stories=7", "dataset@suite.pile=toy"]
    suite = validate(composed(*given, program="evaluate"), EvaluateConfig).suite
    assert suite["pile_filtered"].source == suite["pile"] == ToyDatasetConfig()
    assert suite["pile_filtered"].reference == suite["openwebtext"] and suite["openwebtext"].max_stories == 7


def test_the_longest_recipe_stays_within_an_epoch():
    """800 steps of 0.52 million tokens; a document of OpenWebText has 9.04e9 / 8.01e6 GPT-2 tokens."""
    dataset = build(composed("dataset=openwebtext")).dataset
    assert 800 * 524_288 < dataset.max_stories * 9.04e9 / 8.01e6 < 2 * 800 * 524_288
    pile = build(composed("dataset=pile_filtered", "dataset.source.max_stories=9")).dataset
    assert pile.reference == dataset and pile.source.max_stories == 9 and pile.vocab_size == 50257


def test_files_list_only_what_differs():
    for file in composition.CONFIGS.rglob("*.yaml"):
        assert len(file.read_text().splitlines()) <= 20, file
        assert "_target_" not in file.read_text(), file


def test_the_composed_default_is_the_schemas_default():
    assert build(composed()) == build(to_dict(Config(model=build(composed()).model, norm=build(composed()).norm)))
    assert build(composed("model.name=custom", "norm.name=custom_taper")) == Config()


@pytest.mark.parametrize("kind", [cls.__name__ for cls in typing.get_args(NormConfig) + typing.get_args(DatasetConfig)])
def test_every_key_takes_a_plain_override(kind):
    """No '+' is needed for any key of the schema, whatever the kind of norm or data set."""
    cls = {cls.__name__: cls for cls in typing.get_args(NormConfig) + typing.get_args(DatasetConfig)}[kind]
    section = "dataset" if "Dataset" in kind else "norm"
    name = defaults(cls)["kind"]
    choices = {"standard": "baseline", "taper": "all_taper", "fake": "fake_ln", "filtered": "pile_filtered"}
    choice = choices.get(name, name)
    tree = composed(f"{section}={choice}")
    assert list(tree[section]) == [field.name for field in dataclasses.fields(cls)]
    given = [
        f"{key}={'null' if value is None else 'x' if value == '???' else value}"
        for key, value in leaves(tree)
        if not isinstance(value, list)
    ]
    composed(f"{section}={choice}", *given)


def test_precedence_group_experiment_command_line():
    assert composed("gate=linear")["gate"]["shape"] == "linear"
    assert composed("experiment=smoke")["model"]["d_model"] == 32
    assert composed("optim=default")["optim"]["lr"] is None
    assert (
        composed("experiment=smoke", "optim=default")["optim"]["lr"] == 0.003
    )  # the experiment is laid over the group
    assert composed("experiment=smoke", "model=3m")["model"]["d_model"] == 128  # whose choice stays the command line's
    assert composed("experiment=smoke", "model=3m", "model.d_model=96")["model"]["d_model"] == 96
    assert composed("experiment=smoke", "tracking=wandb")["tracking"]["wandb"] == "auto"
    assert composed("experiment=tinystories", "dataset=toy")["dataset"]["kind"] == "toy"


@pytest.mark.parametrize("recipe", [None, "gpt2_xl"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_precedence_group_recipe_experiment_command_line_in_every_experiment(experiment, recipe):
    """Leaf by leaf: the experiment's own file, else the recipe, else the groups; the command line over all of them."""
    file = composition.CONFIGS / "experiment" / f"{experiment}.yaml"
    own = {key: value for key, value in leaves(yaml.safe_load(file.read_text())) if key != "defaults"}
    own = {key: value for key, value in own.items() if not key.startswith("hydra.")}
    chosen = [entry for entry in yaml.safe_load(file.read_text()).get("defaults", []) if isinstance(entry, dict)]
    names = {key.removeprefix("override /"): value for entry in chosen for key, value in entry.items()}
    recipe = recipe or names.get("recipe")
    given = [
        f"experiment={experiment}",
        *([f"recipe={recipe}"] if recipe else []),
        *REQUIRED.get(names.get("dataset"), []),
    ]
    tree = dict(leaves(composed(*given)))
    of_recipe = (
        dict(leaves(yaml.safe_load((composition.CONFIGS / "recipe" / f"{recipe}.yaml").read_text()))) if recipe else {}
    )
    groups = [f"{group}={choice}" for group, choice in names.items() if group != "recipe"]
    of_groups = dict(leaves(composed(*groups, *REQUIRED.get(names.get("dataset"), []))))
    for key, value in tree.items():
        wanted = own[key] if key in own else of_recipe[key] if key in of_recipe else of_groups[key]
        assert value == wanted, key
    overridden = dict(leaves(composed(*given, "trainer.max_steps=41", "seed=7", "norm=dyt", "model.d_model=96")))
    assert (overridden["trainer.max_steps"], overridden["seed"]) == (41, 7)
    assert (overridden["norm.kind"], overridden["model.d_model"]) == ("dyt", 96)


@pytest.mark.parametrize(
    ("size", "hub", "lr", "low", "warmup", "steps", "decay"),
    [
        ("gpt2", "gpt2", 6e-4, 3e-4, 25, 300, 300),
        ("gpt2_medium", "gpt2-medium", 6e-4, 3e-4, 10, 500, 500),
        ("gpt2_large", "gpt2-large", 3e-4, 4e-5, 15, 600, 1200),
        ("gpt2_xl", "gpt2-xl", 1e-4, 2e-5, 20, 800, 1200),
    ],
)
@pytest.mark.parametrize("experiment", ["taper_internal", "taper_all", "fake_ln", "vanilla"])
def test_recipes_of_gpt2(experiment, size, hub, lr, low, warmup, steps, decay):
    """Group < recipe < experiment < command line; the published learning rates, lengths and tokens a step."""
    given = ["dataset=toy"] if size == "gpt2" else ["dataset=toy", f"model={size}", f"recipe={size}"]
    config = resolve(build(composed(f"experiment=gpt2/{experiment}", *given)), 50257)
    optim, trainer = config.optim, config.trainer
    assert (config.model.name, config.model.init) == (size, f"openai-community/{hub}")
    assert (optim.lr, optim.warmup_steps, trainer.max_steps, optim.decay_steps) == (lr, warmup, steps, decay)
    assert optim.min_lr_ratio * lr == pytest.approx(low, rel=1e-3)
    assert trainer.batch_size * config.model.n_ctx == 524_288
    modes = {
        "taper_internal": ("internal_taper", "none"),
        "taper_all": ("all_taper", "mean_log"),
        "fake_ln": ("fake_ln", "batch_mean"),
        "vanilla": ("baseline", "none"),
    }
    assert (config.norm.name, config.anchor.kind) == modes[experiment]
    assert config.tokenizer.kind == "gpt2"
    schedule = GateSchedule.from_config(config)
    if experiment == "fake_ln":
        first, (mlp, qk, v), weight = {
            "gpt2": (20, (2, 2, 3), 0.1),
            "gpt2_medium": (20, (2, 2, 3), 0.1),
            "gpt2_large": (30, (4, 4, 6), 0.03),
            "gpt2_xl": (50, (4, 4, 6), 0.01),
        }[size]
        n, starts = config.model.n_layer, []
        for gap in (mlp, qk, v):
            starts += range(first, first + n * gap, gap)
            first += n * gap
        assert schedule.removals == tuple(step + 1 for step in [*starts, first])  # published steps count from 0
        assert config.anchor.spread_weight == weight and schedule.value(schedule.removals[-1]) == 0.0
    else:
        assert config.gate.k_warmup >= warmup
    assert build(composed(f"experiment=gpt2/{experiment}", *given, "optim.lr=0.5")).optim.lr == 0.5


def test_smoke_goes_through_every_phase():
    config = resolve(build(composed("experiment=smoke")))
    steps = config.trainer.max_steps
    assert 1 <= config.gate.k_warmup < config.gate.k_taper < steps - 5
    assert config.trainer.save_interval < steps and config.trainer.val_interval < steps


def test_deleted_keys_take_the_schemas_default():
    assert build(composed("~optim.beta1")).optim.beta1 == 0.9
    with pytest.raises(ConfigError, match="choose a norm group"):
        build(composed("~norm"))


# ---------------------------------------------------------------------------------------------------------------- build


def test_round_trip():
    for norm in ("baseline", "all_taper", "derf"):
        config = resolve(build(composed(f"norm={norm}", "dataset=text", "dataset.train=[a.txt,b.txt]")), 4096)
        assert build(to_dict(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+optim.learning_rat=1"], "unknown key 'optim.learning_rat'; did you mean 'optim.lr'"),
        (["+optim.weight_decy=1"], "unknown key 'optim.weight_decy'; did you mean 'optim.weight_decay'"),
        (["+seeed=3"], "unknown key 'seeed'; did you mean 'seed'"),
        (["++new.thing=3"], "unknown key 'new'"),
        (["norm=baseline", "+norm.alpha=1"], "unknown key 'norm.alpha'"),
        (["dataset=text"], "dataset.train is missing"),
        (["trainer.max_steps=???"], "trainer.max_steps is missing"),
        (["seed=None"], "seed=null: input should be a valid integer"),
        (["run_dir=None"], "write run_dir=null"),
        (["trainer.max_steps=10.5"], "trainer.max_steps=10.5"),
        (["optim.lr=fast"], "optim.lr='fast'"),
        (["optim.lr=-1"], "optim.lr=-1"),
        (["trainer.device=gpu"], "trainer.device='gpu'"),
        (["model.head_dim=5"], "model.d_model=64 is not a multiple of model.head_dim=5"),
        (["trainer.accumulation=3"], "trainer.batch_size=8 is not a multiple of trainer.accumulation=3"),
        (["norm.sites=[8.attn]"], "'8.attn' is outside the model's blocks 0 to 7"),
        (["norm.sites=[atn]"], "'atn' is not a site"),
        (["norm.sites=[]"], "norm=baseline"),
        (["gate.k_taper=400"], "gate.k_taper=400 <= trainer.max_steps=300"),
        (["gate.k_warmup=0"], "gate.k_warmup=0"),
        (["anchor=mean_log", "anchor.absolute_weight=1"], "anchor=mean_log has anchor.weight"),
        (["anchor=batch_mean", "anchor.absolute_weight=1"], "anchor=batch_mean has anchor.spread_weight"),
    ],
)
def test_P05_P08_faults_are_named_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        build(composed(*overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_faults_are_told_together():
    with pytest.raises(ConfigError, match=r"optim\.lr=-1.*; .*seed=-1"):
        build(composed("optim.lr=-1", "seed=-1"))


def test_every_key_has_a_meaning():
    own_words = [key for key, text in all_keys(Config) if not text and not key.endswith(".kind")]
    assert own_words == []


# -------------------------------------------------------------------------------------------------------------- resolve


def test_resolve_is_idempotent_and_fills_every_derived_value():
    config = resolve(build(composed()), 2048)
    assert resolve(config, 2048) == config
    assert config.model.vocab_size == 2048 and config.model.d_ff == 176
    assert config.optim.lr == 0.04 / 8
    open_keys = {key for key, value in leaves(to_dict(config)) if value is None}
    # What decides k_warmup and k_taper, where given; and levers that are off.
    open_keys -= {"gate.first_removal", "gate.gaps", "calibration.level", "model.embed_std"}
    assert not {key for key in open_keys if key.startswith(("gate", "calibration", "trainer", "model"))}


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 30, 300, 600, 5000])
def test_default_horizons_fit_any_length(steps):
    tree = composed(f"trainer.max_steps={steps}")
    if steps < 2:  # one step cannot hold a warmup and a taper
        with pytest.raises(ConfigError, match="must hold"):
            build(tree)
        return
    gate = resolve(build(tree)).gate
    assert gate.k_warmup >= max(1, math.ceil(0.05 * steps))
    assert gate.k_warmup < gate.k_taper <= steps


def test_an_extended_run_keeps_its_horizons():
    config = resolve(build(composed("trainer.max_steps=300")))
    longer = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=900))
    assert resolve(longer).gate == config.gate
    assert resolve(longer).optim == config.optim


def test_vocabulary_must_equal_the_tokenizers():
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100 differs from the tokenizer's 2048"):
        resolve(build(composed("model.vocab_size=100")), 2048)


def test_select_sites():
    assert select_sites(("attn", "final"), 2) == ["0.attn", "1.attn", "final"]
    assert select_sites(("0-1.mlp", "1.attn"), 3) == ["0.mlp", "1.attn", "1.mlp"]
    assert select_sites(("1-.attn", "2-.mlp"), 3) == ["1.attn", "2.attn", "2.mlp"]
    for pattern in ("1-.final", "-1.attn", "1-", "1--2.attn"):
        with pytest.raises(ConfigError, match=r"is not a site; write attn, mlp, final, 0\.attn, 2-5\.mlp or 1-\.attn$"):
            select_sites((pattern,), 3)
    for pattern in ("3-.attn", "3.mlp", "2-1.mlp"):
        with pytest.raises(ConfigError, match="outside the model's blocks 0 to 2"):
            select_sites((pattern,), 3)
    assert composed("norm.sites=[1-.attn,mlp]")["norm"]["sites"] == ["1-.attn", "mlp"]
    assert select_sites(("attn", "mlp", "final"), 3) == all_sites(3)


# ---------------------------------------------------------------------------------------------------------------- paths


def test_P06_paths_are_those_of_the_launch_directory(tmp_path):
    (tmp_path / "stories").mkdir()
    tree = {
        "dataset": {"train": ["a.txt", "/b.txt"], "valid": None, "path": "stories", "field": "text"},
        "model": {"init": "random"},
        "runs_dir": "runs",
        "resume": "auto",
        "run_dir": "../elsewhere",
    }
    found = absolute_paths(tree, tmp_path)
    assert found["dataset"] == {
        "train": [str(tmp_path / "a.txt"), "/b.txt"],
        "valid": None,
        "path": str(tmp_path / "stories"),
        "field": "text",
    }
    assert found["model"]["init"] == "random" and found["resume"] == "auto"
    assert found["runs_dir"] == str(tmp_path / "runs")
    assert found["run_dir"] == str(tmp_path.parent / "elsewhere")
    hub = {"dataset": {"path": "roneneldan/TinyStories"}, "model": {"init": "openai-community/gpt2"}}
    assert absolute_paths(hub, tmp_path) == hub
    suites = {
        "suite": {"web": {"kind": "hub", "path": "stories"}, "files": {"train": "a.txt", "valid": ["b.txt"]}},
        "dataset": {"kind": "filtered", "source": {"path": "stories"}, "reference": {"path": "owner/name"}},
    }
    found = absolute_paths(suites, tmp_path)
    assert found["suite"]["web"]["path"] == found["dataset"]["source"]["path"] == str(tmp_path / "stories")
    assert found["suite"]["files"] == {"train": str(tmp_path / "a.txt"), "valid": [str(tmp_path / "b.txt")]}
    assert found["dataset"]["reference"]["path"] == "owner/name"
    (tmp_path / "runs" / "x").mkdir(parents=True)
    models = {"checkpoint": ["openai-community/gpt2", "runs/none", "none"], "baseline": "owner/name"}
    assert absolute_paths(models, tmp_path) == {
        "checkpoint": ["openai-community/gpt2", str(tmp_path / "runs/none"), str(tmp_path / "none")],
        "baseline": "owner/name",
    }
    found = absolute_paths({"model": {"init": "runs/x"}}, tmp_path)
    assert found == {"model": {"init": str(Path(tmp_path, "runs/x"))}}


def test_text_dataset_takes_one_file_or_several():
    assert build(composed("dataset=text", "dataset.train=a.txt")).dataset == TextDatasetConfig(train="a.txt")
    assert build(composed("dataset=text", "dataset.train=[a,b]")).dataset == TextDatasetConfig(train=("a", "b"))


def test_P58_a_key_that_an_older_run_lacks_has_its_default(tmp_path):
    """Its run directory is read, paired and gone on with as if it had said so."""
    new = to_dict(resolve(build(composed()), 2048))
    old = {section: dict(keys) if isinstance(keys, dict) else keys for section, keys in new.items()}
    del old["optim"]["multipliers"], old["calibration"]["level"], old["model"]["embed_std"]
    write_yaml(tmp_path / ".hydra" / "config.yaml", old)
    write_yaml(tmp_path / "config.yaml", old)
    saved = load_run(tmp_path)
    assert saved.resolved == new and match_key(saved.resolved) == match_key(new)
    assert changes(saved, new, longer=False) == []


def test_a_run_is_paired_with_the_baseline_of_its_own_level():
    keys = [
        match_key(to_dict(resolve(build(composed(*overrides)), 2048)))
        for overrides in (["calibration.level=1.6"], ["norm=baseline", "calibration.level=1.6"], ["norm=baseline"])
    ]
    assert keys[0] == keys[1] != keys[2]
