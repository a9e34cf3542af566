"""MLflow: a run for every run, at a tracking server or in a database.

Trainer(..., callbacks=[MLflow("http://127.0.0.1:5000")])
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from itertools import islice
from typing import Any

from shoal.core.events import RunStarted
from shoal.monitor.figures import Point, facts
from shoal.monitor.tracking import Ending, Record, Text, Tracker, require, without_password

_EXTRA = "mlflow"
# MLflow's own limits
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_MOST_NAME = 250
_MOST_VALUE = 500
_MOST_TAG = 5000


class MLflow(Tracker):
    """Logs every run to `experiment` (made if it is not there) at `uri`, or where MLflow's own settings say.

    MLflow's reports to its makers are off, unless the environment has MLFLOW_DISABLE_TELEMETRY=false or mlflow was
    imported before.
    """

    label = "MLflow"

    def __init__(self, uri: str | None = None, experiment: str = "shoal") -> None:
        super().__init__()
        self._uri = uri
        self._experiment = experiment
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported: there is no argument
        require("mlflow.tracking", _EXTRA)

    def begin(self, started: RunStarted) -> Record:
        client = require("mlflow.tracking", _EXTRA).MlflowClient(tracking_uri=self._uri)
        return _Run(client, _experiment(client, self._experiment), started)


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


class _Run:
    def __init__(self, client: Any, experiment: str, started: RunStarted) -> None:
        self._client = client
        self._entities = require("mlflow.entities", _EXTRA)
        self._notices = ""
        known = _find(client, experiment, started)
        if known is not None:
            self._id = known
            client.update_run(known, status="RUNNING")
        else:
            self._id = self._create(experiment, started)
        self.where = _where(str(client.tracking_uri), experiment, self._id)

    def log(self, points: Sequence[Point]) -> None:
        metrics = (
            self._entities.Metric(_name(name), value, int(1000 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
        )
        while chunk := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._id, metrics=chunk)

    def write(self, text: Text) -> None:
        if text.name == "notice":
            # the newest ones, where there are more than fit
            self._notices = f"{self._notices}step {text.step}: {text.text}\n"[-_MOST_TAG:]
            self._client.set_tag(self._id, "shoal.notices", self._notices)
        else:
            self._client.set_tag(self._id, f"shoal.{text.name}", text.text[-_MOST_TAG:])

    def finish(self, ending: Ending) -> None:
        try:
            self._client.set_tag(self._id, "shoal.reason", ending.reason[:_MOST_TAG])
        finally:
            self._client.set_terminated(self._id, "FAILED" if ending.failed else "FINISHED")

    def _create(self, experiment: str, started: RunStarted) -> str:
        tags = {"shoal.run_id": started.run_id, "shoal.run_dir": started.run_dir or ""}
        run = self._client.create_run(experiment, run_name=started.run_id or started.name or None, tags=tags)
        run_id = str(run.info.run_id)
        values = facts(started).items()
        params = (self._entities.Param(_name(name), str(value)[:_MOST_VALUE]) for name, value in values)
        while chunk := list(islice(params, _MOST_PARAMS)):
            self._client.log_batch(run_id, params=chunk)
        return run_id


def _where(uri: str, experiment: str, run: str) -> str:
    uri = without_password(uri)
    if uri.startswith(("http://", "https://")):
        return f"MLflow run at {uri.rstrip('/')}/#/experiments/{experiment}/runs/{run}"
    return f"MLflow run {run} in {uri}; look at it with: mlflow ui --backend-store-uri {shlex.quote(uri)}"


def _find(client: Any, experiment: str, started: RunStarted) -> str | None:
    """The record of a run that is resumed."""
    if started.step == 0 or not started.run_id or "'" in started.run_id:
        return None
    found = client.search_runs([experiment], filter_string=f"tags.`shoal.run_id` = '{started.run_id}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _name(name: str) -> str:
    """A name of the letters that MLflow lets pass."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MOST_NAME]
