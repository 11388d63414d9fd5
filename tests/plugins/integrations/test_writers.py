"""The writers of scalars for wandb and MLflow, with the real libraries where they are installed."""

import sys
from types import SimpleNamespace

import pytest

import polycast
from polycast_plugins.integrations.mlflow import MlflowWriter
from polycast_plugins.integrations.wandb import WandbWriter
from polycast_plugins.observe import StepRecord

HISTORY = polycast.RunHistory([StepRecord(3, loss=0.5, scale=8.0), StepRecord(4, loss=0.25)])


class WandbRun:
    def __init__(self):
        self.metrics, self.logged = [], []

    def define_metric(self, name, **options):
        self.metrics.append((name, options.get("step_metric")))

    def log(self, values):
        self.logged.append(values)


def test_wandb_gets_a_row_for_each_step_over_a_step_of_its_own():
    run = WandbRun()
    HISTORY.log_to(WandbWriter(run))
    assert run.metrics == [("polycast/step", None), ("polycast/*", "polycast/step")]
    assert run.logged == [
        {"polycast/loss": 0.5, "polycast/scale": 8.0, "polycast/step": 3},
        {"polycast/loss": 0.25, "polycast/step": 4},
    ]


def test_a_single_scalar_is_written():
    run = WandbRun()
    WandbWriter(run).add_scalar("loss", 1.0, 2)
    assert run.logged == [{"loss": 1.0, "polycast/step": 2}]


def test_without_a_run_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(RuntimeError, match=r"^wandb has no run: call wandb.init\(\) first, or pass the run$"):
        WandbWriter()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: None))
    said = r"^MLflow has no active run: call mlflow.start_run\(\) first, or pass run_id$"
    with pytest.raises(RuntimeError, match=said):
        MlflowWriter()


def test_mlflow_gets_the_metrics_of_the_active_run(monkeypatch):
    logged = []
    library = SimpleNamespace(
        active_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="r1")),
        log_metrics=lambda metrics, **options: logged.append((metrics, options)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", library)
    HISTORY.log_to(MlflowWriter())
    assert logged[0] == ({"polycast/loss": 0.5, "polycast/scale": 8.0}, {"step": 3, "run_id": "r1"})


def test_a_library_is_imported_only_when_its_writer_is_made(monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="mlflow"):
        MlflowWriter("r1")
    WandbWriter(WandbRun())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the library's own
def test_mlflow_itself_has_the_metrics(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            HISTORY.log_to(MlflowWriter())
    except mlflow.exceptions.MlflowException as error:  # of mlflow-skinny without a store
        pytest.skip(f"mlflow has no store here: {error}")
    found = mlflow.MlflowClient().get_metric_history(run.info.run_id, "polycast/loss")
    assert [(metric.step, metric.value) for metric in found] == [(3, 0.5), (4, 0.25)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the library's own
def test_wandb_itself_has_the_last_values(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as run:
        HISTORY.log_to(WandbWriter())
        assert run.summary["polycast/loss"] == 0.25
        assert run.summary["polycast/step"] == 4
