"""lm-evaluation-harness on exported models, started beside our evaluate.py, and the same numbers from our own model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra is absent: pip install -c constraints.txt -e '.[lm_eval]'")

from tapernorm.model.decoder import Decoder
from tapernorm.model.generate import generate
from tests.interop.test_export import BYTES, EOT, exported

ROOT = Path(__file__).parents[2]
CONTEXT = 32  # of the model
MODELS = [("all_taper", "gpt2", "tapernorm"), ("baseline", "llama", "llama"), ("baseline", "gpt2", "gpt2")]
STORIES = ["Once upon a time, Tom ran.", "The dog sat. It was a big dog, and it sat on the mat for a day."]
CHOICES = [
    {"text": "Tom ran", "choices": [" home.", " a cat", " away"], "label": 0},
    {"text": "A dog sat", "choices": [" on it.", " up"], "label": 1},
]
TASKS: dict[str, dict[str, Any]] = {
    "tiny_stories": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
    },
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
        "process_docs": "!function needs.as_they_are",
    },
    "tiny_words": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\x00"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
# A task's own code, as several of the harness's have it: it wants the package evaluate, not our evaluate.py.
NEEDS = "import evaluate\nevaluate.load\n\ndef as_they_are(docs):\n    return docs\n"
ALL = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

folder, *models = sys.argv[1:]
manager = TaskManager(include_path=folder, include_defaults=False)
for model in models:
    for task in "tiny_stories", "tiny_choice", "tiny_words":
        more = "" if task == "tiny_stories" else ",add_bos_token=True"  # which these texts have already
        given = f"pretrained={model},trust_remote_code=True,dtype=float32{more}"
        found = lm_eval.simple_evaluate("hf", given, [task], device="cpu", batch_size=2, task_manager=manager)
        answers = [[row["doc_id"], row["filtered_resps"]] for row in found["samples"][task]]
        print(json.dumps([found["results"][task], sorted(answers)]))
"""


def write_tasks(folder: Path) -> None:
    """Two tasks whose data are local files."""
    rows: dict[str, list[dict[str, Any]]] = dict.fromkeys(TASKS, CHOICES)
    rows["tiny_stories"] = [{"text": story} for story in STORIES]
    folder.mkdir()
    (folder / "needs.py").write_text(NEEDS)
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        files = {"test_split": "test", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        text = json.dumps({"task": name, **files, **task}).replace(
            '"!function needs.as_they_are"', "!function needs.as_they_are"
        )
        (folder / f"{name}.yaml").write_text(text)


def in_the_root(command: list[str], tmp_path: Path) -> str:
    """What a command prints, started where evaluate.py lies, without a network and with caches of its own."""
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **caches}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def log_probability(ours: Decoder, ids: list[int], first: int) -> float:
    """ln p of ids[first:], each given those before it; of a long text in windows, moved as the harness does."""
    total = 0.0
    for start in range(first, len(ids), CONTEXT):
        end = min(start + CONTEXT, len(ids))
        window = torch.tensor([ids[max(0, end - 1 - CONTEXT) : end]])
        with torch.no_grad():
            z = ours(window[:, :-1]).log_softmax(-1)
        total += z.gather(-1, window[:, 1:, None])[0, start - end :].sum().item()
    return total


def test_its_numbers_are_ours(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    models = [exported(tmp_path, norm, family, format=form) for norm, family, form in MODELS]
    directories = [str(out) for _, out in models]
    said = in_the_root([sys.executable, "-P", "-c", ALL, str(tmp_path / "tasks"), *directories], tmp_path)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("[{")]
    n_words, n_bytes = sum(len(story.split()) for story in STORIES), sum(len(story.encode()) for story in STORIES)
    triples = zip(found[::3], found[1::3], found[2::3], strict=True)
    for (ours, _), ((of_stories, stories), (_, choices), (_, words)) in zip(models, triples, strict=True):
        wanted = [log_probability(ours, [EOT, *BYTES.encode(story)], 1) for story in STORIES]
        assert [float(answer) for _, (answer,) in stories] == pytest.approx(wanted, rel=1e-5)
        assert of_stories["word_perplexity,none"] == pytest.approx(math.exp(-sum(wanted) / n_words), rel=1e-4)
        assert of_stories["bits_per_byte,none"] == pytest.approx(-sum(wanted) / n_bytes / math.log(2), rel=1e-4)
        for (_, answers), doc in zip(choices, CHOICES, strict=True):
            context = [EOT, *BYTES.encode(doc["text"])]
            wanted = [log_probability(ours, context + BYTES.encode(end), len(context)) for end in doc["choices"]]
            assert [float(answer) for answer, _ in answers] == pytest.approx(wanted, rel=1e-5)
        prompts = [[EOT, *BYTES.encode(doc["text"])] for doc in CHOICES]
        texts = [BYTES.decode(row) for row in generate(ours, prompts, 8, temperature=0, eot=EOT)]
        assert [answer for _, (answer,) in words] == [text.split("\0")[0] for text in texts]


def test_the_command_of_the_documentation(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    _, out = exported(tmp_path, "all_taper", "gpt2")
    program = Path(sys.executable).with_name("lm_eval")
    given = f"pretrained={out},trust_remote_code=True,add_bos_token=True"
    command = [str(program), "run", "--model", "hf", "--model_args", given, "--tasks", "tiny_choice"]
    said = in_the_root([*command, "--include_path", str(tmp_path / "tasks"), "--device", "cpu"], tmp_path)
    assert "tiny_choice" in said and "acc" in said
