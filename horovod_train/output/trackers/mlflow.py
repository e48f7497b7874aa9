"""The tracker `mlflow`: a run on an MLflow server, or in a database that MLflow opens itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_train.config.loader import by_key
from horovod_train.config.registry import import_extra
from horovod_train.output.trackers.sender import Ended, Row

_STATUS: dict[Ended, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""In one request: limits of MLflow's REST API, which for tags is that of params."""
_LONGEST_PARAM, _LONGEST_TAG = 6000, 5000
_NOT_IN_A_NAME = re.compile(r"[^\w\-. /]")


class MlflowTracker:
    """Each setting is a param, each value a metric `split/name` by step; a setting that a later start changes is a tag.

    uri, experiment, run_name: defaults are MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME or `Default`, and the name of
    the run directory.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None, run_name: str | None = None) -> None:
        self._mlflow: Any = import_extra("mlflow", "mlflow", "log.trackers")
        self._uri, self._experiment, self._run_name = uri, experiment, run_name
        self._client: Any = None
        self._run_id = ""
        # Its own limits, 7 retries of 120 s each, are for scripts that wait for the server. See sender.
        variables: Any = import_extra("mlflow.environment_variables", "mlflow", "log.trackers")
        for variable, limit in (
            (variables.MLFLOW_HTTP_REQUEST_TIMEOUT, 30),
            (variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES, 0),
        ):
            if not variable.is_set():
                variable.set(limit)
        self._default_experiment = variables.MLFLOW_EXPERIMENT_NAME.get() or "Default"

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        if self._client is None:
            self._client = self._mlflow.MlflowClient(self._uri or self._mlflow.get_tracking_uri())
        run = self._find(run_id)
        if run is None:
            name = self._run_name or directory.resolve().name
            run = self._client.create_run(self._experiment_id(), run_name=name)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_id = run.info.run_id
        settings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in by_key(config)}
        self._log_params(settings, run.data.params, step)
        return self._run_id

    def last_steps(self) -> dict[str, int]:
        latest = self._client.get_run(self._run_id).data.metrics
        return {name.removesuffix("/step"): int(value) for name, value in latest.items() if name.endswith("/step")}

    def log(self, row: Row) -> None:
        metric, time_ms = self._mlflow.entities.Metric, int(row.time * 1000)
        # The last one tells that all were logged; see last_steps.
        values = {"epoch": row.epoch, **row.values, "step": row.step}
        metrics = [
            metric(_NOT_IN_A_NAME.sub("_", f"{row.split}/{name}"), float(value), time_ms, row.step)
            for name, value in values.items()
        ]
        self._log("metrics", metrics, _MOST_METRICS)

    def finish(self, ended: Ended, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._run_id, str(file))
        self._client.set_terminated(self._run_id, _STATUS[ended])

    def _find(self, run_id: str | None) -> Any:
        """Return a run that can be continued, or None if there is none, or it was deleted."""
        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment_id(self) -> str:
        name = self._experiment or self._default_experiment
        if experiment := self._client.get_experiment_by_name(name):
            return str(experiment.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except self._mlflow.exceptions.MlflowException as error:
            experiment = self._client.get_experiment_by_name(name)  # another run may have created it meanwhile
            if error.error_code == "RESOURCE_ALREADY_EXISTS" and experiment:
                return str(experiment.experiment_id)
            raise

    def _log_params(self, settings: Mapping[str, str], known: Mapping[str, str], step: int) -> None:
        """Log the settings that the run lacks. MLflow's params cannot change, so changed ones become tags."""
        param, tag = self._mlflow.entities.Param, self._mlflow.entities.RunTag
        new = [param(key, value[:_LONGEST_PARAM]) for key, value in settings.items() if key not in known]
        changed = [
            tag(f"from step {step}/{key}", value[:_LONGEST_TAG])
            for key, value in settings.items()
            if key in known and known[key] != value[:_LONGEST_PARAM]
        ]
        self._log("params", new, _MOST_PARAMS)
        self._log("tags", changed, _MOST_PARAMS)

    def _log(self, kind: str, items: Sequence[Any], most: int) -> None:
        """Log items, at most so many in a request. Raises ValueError for what the server refuses."""
        try:
            for begin in range(0, len(items), most):
                self._client.log_batch(self._run_id, **{kind: items[begin : begin + most]})
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE":
                raise ValueError(str(error)) from error
            raise
