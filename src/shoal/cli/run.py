"""`shoal run`: a script with flags that beat what it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shoal.core.errors import ConfigError

ABOUT = """\
Run a script that uses [bold]Trainer[/bold] or [bold]shoal.launch[/bold], with flags that beat what it says.

A flag beats the script's argument, which beats the default. What comes
after [cyan]--[/cyan] belongs to the script. See where each value comes from, without
training, by [cyan]--show-config[/cyan].

[bold]Examples[/bold]
  [cyan]shoal run train.py --workers 4[/cyan]
  [cyan]shoal run train.py --workers 4 --epochs 20 -- --data big.csv[/cyan]
  [cyan]shoal run train.py --workers 4 --show-config[/cyan]
  [cyan]shoal run train.py --resume last[/cyan]          go on from the last checkpoint
  [cyan]shoal run train.py --json > events.jsonl[/cyan]  progress for another program

[bold]Exit codes[/bold]  0 done · 1 the script or a worker failed · 2 wrong usage
or configuration · 75 SIGTERM, checkpointed · 130 Ctrl-C, checkpointed
"""

_TRAINING, _RUN, _SHOWN, _TOLD = "Training", "The run", "What is shown", "Who else is told"


class RunCommand(TyperCommand):
    """Says where the script's own options go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            told: Any = error
            if type(error).__name__ == "NoSuchOption" and not _is_misspelt(told.option_name, told.possibilities or []):
                told.possibilities = None
                told.message += f"\nIf {told.option_name} is an option of the script, put it after `--`, as in: "
                told.message += f"shoal run train.py --workers 4 -- {told.option_name} ..."
            raise


def _is_misspelt(option: str, known: Sequence[str]) -> bool:
    return bool(get_close_matches(option, known, n=1, cutoff=0.75))


def register(app: typer.Typer) -> None:
    app.command(
        "run",
        cls=RunCommand,
        help=ABOUT,
        short_help="Run a script on many workers, with flags that beat what it says.",
    )(run)


def run(
    script: Annotated[Path, typer.Argument(help="A Python file.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(help="After --: what the script finds in sys.argv.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="Processes that train together.", rich_help_panel=_TRAINING),
    ] = None,
    min_workers: Annotated[
        int | None,
        typer.Option(min=1, help="With fewer workers the run waits.", rich_help_panel=_TRAINING),
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="Workers may join up to this number.", rich_help_panel=_TRAINING)
    ] = None,
    replace: Annotated[
        bool | None,
        typer.Option(
            "--replace/--no-replace",
            help="Whether another process takes the place of a worker that dies; else that ends the run.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Restarts from the last checkpoint if all workers, or the servers, are lost.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per step, of all workers together.", rich_help_panel=_TRAINING)
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.", rich_help_panel=_TRAINING)] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps, instead of epochs.", rich_help_panel=_TRAINING)
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="How a replica is spread: single.", rich_help_panel=_TRAINING)
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            help="How workers agree: allreduce, server, or server:mode=ssp,staleness=4.", rich_help_panel=_TRAINING
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="How gradients travel: none, fp16, bf16, int8, powersgd:rank=4, onebit, topk:density=0.01 or auto.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32.", rich_help_panel=_TRAINING)] = None,
    collective: Annotated[
        str | None,
        typer.Option(help="How workers sum: auto, shm, hierarchical, gloo or nccl.", rich_help_panel=_TRAINING),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Most samples a worker computes at once.", rich_help_panel=_TRAINING)
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.", rich_help_panel=_TRAINING)] = None,
    ema: Annotated[
        float | None, typer.Option(help="Decay of an average of the weights.", rich_help_panel=_TRAINING)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.", rich_help_panel=_TRAINING)] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Bitwise equal weights for any number of workers.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    data_workers: Annotated[
        int | None, typer.Option(min=0, help="Loader processes per worker.", rich_help_panel=_TRAINING)
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations.", rich_help_panel=_TRAINING)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Where workers start: local, local:start=script, or local:lab=NAME.", rich_help_panel=_TRAINING
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.", rich_help_panel=_RUN)] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run.", rich_help_panel=_RUN)] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from: last, the id of a run, or a path.", rich_help_panel=_RUN)
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel=_RUN)
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="How many checkpoints stay.", rich_help_panel=_RUN)] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Run store: sqlite:///file, postgresql://…, or none.", envvar="SHOAL_STORE", rich_help_panel=_RUN
        ),
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Show every value and its origin; do not train.", rich_help_panel=_SHOWN),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="A line per worker.", rich_help_panel=_SHOWN)
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Every event as a line of JSON on stdout.", rich_help_panel=_SHOWN)
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines of text, also in a terminal.", rich_help_panel=_SHOWN)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Warnings and errors only.", rich_help_panel=_SHOWN)
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard files into this folder.", rich_help_panel=_TOLD)
    ] = None,
    mlflow: Annotated[str | None, typer.Option(help="URI of an MLflow tracking store.", rich_help_panel=_TOLD)] = None,
    wandb: Annotated[str | None, typer.Option(help="Weights & Biases project.", rich_help_panel=_TOLD)] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve Prometheus metrics on this port (0: a free one).", rich_help_panel=_TOLD
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            help="Address to serve them on; other than loopback only with a key in SHOAL_METRICS_KEY.",
            rich_help_panel=_TOLD,
        ),
    ] = "127.0.0.1",
) -> None:
    """Run a script with flags."""
    given: dict[str, Any] = {
        "workers": workers,
        "min_workers": min_workers,
        "replace": replace,
        "max_workers": max_workers,
        "restarts": restarts,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": steps,
        "layout": layout,
        "sync": sync,
        "codec": codec,
        "precision": precision,
        "collective": collective,
        "micro_batch": micro_batch,
        "clip": clip,
        "ema": ema,
        "seed": seed,
        "deterministic": deterministic,
        "data_workers": data_workers,
        "eval_every": eval_every,
        "engine": engine,
        "name": name,
        "run_dir": run_dir,
        "resume": resume,
        "checkpoint_every": checkpoint_every,
        "keep": keep,
    }
    from shoal.cli.script import run_script
    from shoal.core.settings import Settings

    _check_store(store)
    settings = Settings(
        overrides=_overrides(given),
        stream=sys.stdout if json else None,
        command=tuple(sys.argv[1:]),
        progress=_progress(json=json, plain=plain, quiet=quiet),
        verbose=verbose,
        show_config=show_config,
        store=store,
        listeners=_listeners(tensorboard, mlflow, wandb, metrics_port, metrics_host),
    )
    raise typer.Exit(run_script(script, args or [], settings))


def _check_store(store: str | None) -> None:
    """A store that was asked for by name must be there before the work, not be missed after it."""
    if store is None or store == "none":
        return
    from shoal.store.store import Store

    with Store.open(store):
        pass


def _overrides(given: dict[str, Any]) -> dict[str, Any]:
    from shoal.core import spec

    overrides = {name: value for name, value in given.items() if value is not None}
    for kind in ("layout", "sync", "codec", "precision", "engine"):
        if kind in overrides:
            spec.parse(kind, overrides[kind])
    if "collective" in overrides:
        spec.check_collective(overrides["collective"])
    if "epochs" in overrides and "steps" in overrides:
        raise ConfigError("--epochs and --steps were both given; use one of them")
    if "epochs" in overrides:
        overrides["steps"] = None  # the script's steps= would win over epochs
    return overrides


def _progress(*, json: bool, plain: bool, quiet: bool) -> str | None:
    asked = [name for name, wanted in (("json", json), ("plain", plain), ("quiet", quiet)) if wanted]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in asked)} were given; use one of them")
    return asked[0] if asked else None


def _listeners(
    tensorboard: Path | None, mlflow: str | None, wandb: str | None, port: int | None, host: str
) -> tuple[Callable[[], Any], ...]:
    makers: list[Callable[[], Any]] = []
    if tensorboard is not None:
        from shoal.monitor.tensorboard import TensorBoard

        makers.append(partial(TensorBoard, tensorboard))
    if mlflow is not None:
        from shoal.monitor.mlflow import MLflow

        makers.append(partial(MLflow, mlflow))
    if wandb is not None:
        from shoal.monitor.wandb import WandB

        makers.append(partial(WandB, wandb))
    if port is not None:
        from shoal.monitor.prometheus import Prometheus

        makers.append(partial(Prometheus, port, host=host, key=os.environ.get("SHOAL_METRICS_KEY") or None))
    for make in makers:
        make()  # what is missing or wrong is said now, not after minutes of loading data
    return tuple(makers)
