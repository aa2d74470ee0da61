"""Build the Weights & Biases workspace of this project from code: gate, logit chasing, scales, anchor, calibration.

Examples:
  python scripts/wandb_dashboard.py --entity NAME         # save it in the project, and print its address
  python scripts/wandb_dashboard.py --print               # an outline; needs no server and no key
  python scripts/wandb_dashboard.py --print json          # what would be sent

Runs are grouped by sweep, norm and anchor, so a line is the mean over the seeds of one arm; the x axis is tokens.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from tapernorm.cli.errors import stop
from tapernorm.config.options import TrackingConfig
from tapernorm.runtime.record import METRICS

INSTALL = "pip install -c constraints.txt -e '.[dashboard]'"
X = "trainer/tokens"
GROUP_BY = ("norm.name", "anchor.kind")  # after the sweep
LINEAR, LOG = False, True  # the y axis

# Section -> panels (title, names in tracking.METRICS, y axis). A name with <site> stands for all sites.
SECTIONS: dict[str, list[tuple[str, tuple[str, ...], bool]]] = {
    "Loss and gate": [
        ("Loss, with the gate", ("train/loss", "val/loss", "gate/g"), LINEAR),
        ("Validation loss", ("val/loss", "val/loss_best_temperature"), LINEAR),
        ("Best temperature", ("val/best_temperature",), LINEAR),
        ("Gate", ("gate/g",), LINEAR),
    ],
    "Logit chasing": [
        ("Residual scale since the warmup", ("scale/drift",), LINEAR),
        ("Residual scale and its level at the warmup's end", ("scale/final_rms_mean", "scale/target"), LOG),
        ("Logit norm", ("logits/norm_mean",), LOG),
        ("Largest logit", ("logits/abs_max",), LOG),
        ("Spread of the logits", ("logits/std",), LINEAR),
        ("Entropy of the predictions", ("probe/entropy",), LINEAR),
        ("Accuracy", ("probe/accuracy",), LINEAR),
    ],
    "Radial gradient": [
        ("Radial gradient and its theory", ("radial/mean", "radial/theory"), LINEAR),
        ("On training batches", ("radial/train_mean",), LINEAR),
        ("Share of the gradient that is radial", ("radial/fraction",), LINEAR),
        ("Margin bound", ("radial/bound_ok",), LINEAR),
        ("Gradient at the final hidden state", ("grad/final_hidden_norm",), LOG),
    ],
    "Scales": [
        ("Mean scale at each norm", ("scale/rms.<site>",), LOG),
        ("99th percentile at each norm", ("scale/rms_p99.<site>",), LOG),
        ("Final scale, mean and 99th percentile", ("scale/final_rms_mean", "scale/final_rms_p99"), LOG),
    ],
    "Anchor": [
        ("Scale loss", ("anchor/loss",), LOG),
        ("What it adds to the objective", ("anchor/weighted",), LINEAR),
        ("Pull of the loss and restoring force", ("radial/train_mean", "anchor/force"), LINEAR),
        ("Weight", ("anchor/lambda",), LINEAR),
    ],
    "Calibration": [
        ("c at each norm", ("calib/c.<site>",), LOG),
        ("Mismatch of c", ("calib/mismatch.<site>",), LINEAR),
        ("Gain of the tapered branch", ("taper/gain_rms.<site>",), LINEAR),
    ],
    "Throughput and health": [
        ("Tokens per second", ("throughput/tokens_per_s",), LINEAR),
        ("Learning rate", ("optim/lr",), LINEAR),
        ("Gradient norm", ("grad/norm",), LOG),
        ("Size of an update", ("update/ratio",), LOG),
        ("Values that were not finite", ("nonfinite/count",), LINEAR),
    ],
}


def build(entity: str, project: str, name: str) -> Any:
    """The workspace. Ends the program with one line if wandb-workspaces is not installed."""
    try:
        from wandb_workspaces import expr
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports import v2 as wr
    except ModuleNotFoundError:
        stop(f"wandb-workspaces is not installed: {INSTALL}")

    def panel(title: str, metrics: Sequence[str], log: bool) -> Any:
        if "<site>" in metrics[0]:
            return wr.LinePlot(title=title, x=X, metric_regex=pattern(metrics[0]), log_y=log)
        return wr.LinePlot(title=title, x=X, y=list(metrics), log_y=log)

    sections = [
        ws.Section(name=title, panels=[panel(*row) for row in panels], is_open=True)
        for title, panels in SECTIONS.items()
    ]
    groups: list[Any] = [expr.Metric("Group"), *(expr.Config(key) for key in GROUP_BY)]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=X, max_runs=50),
        runset_settings=ws.RunsetSettings(groupby=groups),
    )


def pattern(metric: str) -> str:
    """The regular expression for the names of a metric that every site has."""
    return re.escape(metric).replace("<site>", ".*")


def outline(workspace: Any) -> str:
    lines = [
        f"workspace {workspace.name!r} of project {workspace.project}, over {workspace.settings.x_axis}, "
        f"grouped by sweep, {', '.join(GROUP_BY)}"
    ]
    for section in workspace.sections:
        lines.append(section.name)
        for panel in section.panels:
            metrics = panel.metric_regex or ", ".join(panel.y)
            lines.append(f"  {panel.title}: {metrics}{' (logarithmic)' if panel.log_y else ''}")
    shown = {name for panels in SECTIONS.values() for _, names, _ in panels for name in names}
    lines.append(f"not shown: {', '.join(name for name in METRICS if name not in shown)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    head, _, rest = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=form)
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="W&B user or team")
    parser.add_argument("--project", default=TrackingConfig().project, help="W&B project (%(default)s)")
    parser.add_argument("--name", default="tapernorm", help="name of the workspace (%(default)s)")
    parser.add_argument(
        "--print", nargs="?", const="outline", choices=("outline", "json"), help="show it, send nothing"
    )
    given = parser.parse_args(arguments)
    workspace = build(given.entity, given.project, given.name)
    if given.print == "outline":
        print(outline(workspace))
    elif given.print == "json":
        print(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=2))
    elif not given.entity:
        stop("--entity is missing: name the W&B user or team whose project it is, or set WANDB_ENTITY")
    else:
        save(workspace)


def save(workspace: Any) -> None:
    try:
        workspace.save()  # says where
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        stop(f"W&B did not take the workspace ({first}); is a key set (wandb login), the entity right?", status=1)


if __name__ == "__main__":
    main()
