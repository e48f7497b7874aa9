"""What the command `slurm` prints is read by a real sbatch as it was meant. Starts no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import PROJECT
from jobs import submit
from virtual_cluster import HEAD, VirtualCluster

from horovod_train.main import main

pytestmark = pytest.mark.cluster

COMMENT = """it's $(date) "a" \\ b #c"""
SITE = "time: 12:00:00\nmem: 100M\nsbatch: [--hold, --comment=another]\n"


def test_options_and_the_sites_defaults_reach_a_real_sbatch_as_they_are(
    cluster: VirtualCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "horovod_train").mkdir()
    (tmp_path / "horovod_train" / "slurm.yaml").write_text(SITE)
    config = str(PROJECT / "configs" / "digits_convnet.yaml")
    assert main(["slurm", "--config", config, "--sbatch", f"--comment={COMMENT}", "--sbatch", "--nice=7"]) == 0
    script = tmp_path / "job.sbatch"
    script.write_text(capsys.readouterr().out)
    job = submit(cluster, [str(script)], tmp_path / "out")
    shown = cluster.run(HEAD, ["scontrol", "show", "job", job.number]).stdout
    cluster.run(HEAD, ["scancel", job.number])
    for expected in (
        f"Comment={COMMENT} ",
        "TimeLimit=12:00:00 ",
        "MinMemoryNode=100M",
        "Nice=7 ",
        "Reason=JobHeldUser ",
    ):
        assert expected in shown
