"""What TensorBoard shows of a run on two ranks; the run is the same without it."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from conftest import BIN, HANGS_AFTER_S, PROJECT, metrics_of, rank_environment, summary_of, train
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from horovod_train.commands.report import build_page, read_run
from horovod_train.output.tensorboard import find_profiles, read_profiles

CONFIGS = PROJECT / "configs"
WEIGHTS = ["hidden1/weight", "hidden1/bias", "out_layer/weight", "out_layer/bias"]
PROFILED = [30, 31]
DIGITS = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
model: user_models:mixed
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
metrics: [{{name: sparse_categorical_accuracy, options: {{name: accuracy}}}}]
optimizer: adam
train: {{max_steps: 12}}
eval: {{every_steps: 4}}
log: {{every_steps: 1}}
"""


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mlp_tensorboard on two ranks, shorter, with two steps profiled."""
    folder = tmp_path_factory.mktemp("mlp_tensorboard")
    assert train(["prepare", "mlp-samples", "--records", "2000", "--out", folder / "mlp"]).returncode == 0
    configs = [CONFIGS / "mlp_synchronous.yaml", CONFIGS / "mlp_tensorboard.yaml"]
    data = [f"data.train={folder / 'mlp' / 'train'}", f"data.eval={folder / 'mlp' / 'eval'}"]
    shorter = [*data, "train.epochs=10", "log.histograms_every_steps=25"]
    arguments = ["--config", *configs, *shorter, f"log.profile_at_steps={PROFILED}", "--output-dir", folder / "run"]
    finished = train(arguments, launcher="horovodrun", np=2)
    assert finished.returncode == 0, finished.text
    return folder / "run"


def events(run_dir: Path) -> list[Any]:
    (file,) = (run_dir / "tensorboard" / "train").iterdir()
    return [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]


def histograms(run_dir: Path) -> dict[str, dict[int, Any]]:
    """Name → step → buckets [count, 3]: left edge, right edge, how many."""
    found: dict[str, dict[int, Any]] = {}
    for event in events(run_dir):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "histograms":
                found.setdefault(value.tag, {})[event.step] = tf.make_ndarray(value.tensor)
    return found


def node_names(run_dir: Path) -> list[str]:
    (drawn,) = [event.graph_def for event in events(run_dir) if event.graph_def]
    return [node.name for node in tf.compat.v1.GraphDef.FromString(drawn).node]


def ops_of(profile: Path) -> list[str]:
    (file,) = profile.glob("*.xplane.pb")
    found = xplane_pb2.XSpace.FromString(file.read_bytes())
    (plane,) = [plane for plane in found.planes if plane.name == "/host:CPU"]
    return [plane.event_metadata[event.metadata_id].name for line in plane.lines for event in line.events]


@pytest.mark.long
def test_histograms_of_weights_outputs_and_gradients_come_at_their_interval(run_dir: Path) -> None:
    found = histograms(run_dir)
    assert {*found} == {*WEIGHTS, "y_hidden", *(f"gradients/{name}" for name in WEIGHTS)}
    for by_step in found.values():
        assert [*by_step] == [25, 50, 75, 100]


@pytest.mark.long
def test_histograms_count_every_number(run_dir: Path) -> None:
    found = histograms(run_dir)
    sizes = {"hidden1/weight": 50, "hidden1/bias": 10, "out_layer/weight": 10, "out_layer/bias": 1}
    for name, size in sizes.items():
        assert found[name][100][:, 2].sum() == size
        assert found[f"gradients/{name}"][100][:, 2].sum() == size
    assert found["y_hidden"][100][:, 2].sum() == 100 * 10  # one rank's records, ten units
    assert found["y_hidden"][100][:, 0].min() >= 0  # behind a ReLU
    assert found["gradients/hidden1/weight"][100][:, 0].min() < 0


@pytest.mark.long
def test_weights_move_from_one_histogram_to_the_next(run_dir: Path) -> None:
    by_step = histograms(run_dir)["out_layer/bias"]
    assert len({float(buckets[:, 0].min()) for buckets in by_step.values()}) == 4


@pytest.mark.long
def test_scalar_loss_is_there(run_dir: Path) -> None:
    assert "loss" in {value.tag for event in events(run_dir) for value in event.summary.value}


@pytest.mark.long
def test_graph_folds_into_its_namespaces(run_dir: Path) -> None:
    names = node_names(run_dir)
    assert {name.split("/")[0] for name in names if "/" in name} >= {
        *("input_data", "rank_0", "exchange", "update_parameters", "hidden1", "out_layer")
    }
    assert {*WEIGHTS} <= {*names}
    for inside in ("mlp/hidden1/MatMul", "mlp/hidden1/Relu", "mlp/out_layer/MatMul", "loss_function", "gradient_tape"):
        assert any(name.startswith(f"rank_0/{inside}") for name in names), inside
    assert len([name for name in names if re.match(r"exchange/.*\.gradients\.float32", name)]) == 1
    assert len([name for name in names if re.match(r"update_parameters/.*AssignSubVariableOp", name)]) == 4


@pytest.mark.long
def test_s5_folds_its_graph_as_it_says_and_profiles(digits: Path, tmp_path: Path) -> None:
    configs = [CONFIGS / "mnist_mlp.yaml", CONFIGS / "digits_mlp.yaml"]
    shorter = [f"data.train={digits / 'train'}", f"data.eval={digits / 'eval'}", "train.max_steps=3"]
    arguments = ["--config", *configs, *shorter, "log.profile_at_steps=[3]", "--output-dir", tmp_path / "run"]
    finished = train(arguments)
    assert finished.returncode == 0, finished.text
    names = node_names(tmp_path / "run")
    first = {name.split("/")[0] for name in names if "/" in name}
    assert first >= {"input", "layer1", "layer2", "moving_average", "loss_function", "train_step"}
    assert first.isdisjoint({"rank_0", "image_mlp", "input_data", "update_parameters", "exchange", "gradient_tape"})
    assert "moving_average/layer1/kernel" in names
    assert len([name for name in names if re.match(r"moving_average/.*AssignSubVariableOp", name)]) == 4
    ops = ops_of(tmp_path / "run" / "tensorboard" / "plugins" / "profile" / "step-000000003")
    assert any(re.search("layer1_1/.*MatMul", name) for name in ops)


@pytest.mark.long
def test_profile_of_a_step_holds_its_ops_and_their_memory(run_dir: Path) -> None:
    for step in PROFILED:
        names = ops_of(run_dir / "tensorboard" / "plugins" / "profile" / f"step-{step:09d}")
        assert len([name for name in names if re.search(r"gradient_tape/.*hidden1_1/MatMul", name)]) == 1
        assert len([name for name in names if "AssignSubVariableOp" in name]) == 4  # one step, not several
        assert names.count("MemoryAllocation") > 10


def op_ms(profile: Path) -> dict[tuple[str, str], float]:
    """(kind, name) of each op of a step, as TensorFlow wrote it → ms in all threads."""
    (file,) = profile.glob("*.xplane.pb")
    found: dict[tuple[str, str], float] = {}
    for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
        for event in (event for line in plane.lines for event in line.events):
            name, _, kind = plane.event_metadata[event.metadata_id].name.rpartition(":")
            name = re.sub(r"while/(body/_\d+/)?", "", name)  # the loop over steps
            found[kind, name] = found.get((kind, name), 0.0) + event.duration_ps / 1e9
    return found


@pytest.mark.long
def test_a_profiled_step_ends_with_a_table_of_its_most_expensive_ops(run_dir: Path) -> None:
    pytest.importorskip("xprof", reason="reading profiles needs the extra `profile`")
    folders = find_profiles(run_dir)
    assert len(folders) == len(PROFILED)
    log = "\n".join(line.strip() for line in (run_dir / "logs" / "rank-0.log").read_text().splitlines())
    for costs, folder, step in zip(read_profiles(folders), folders, PROFILED, strict=True):
        assert (costs.step, costs.place, costs.problem, len(costs.ops)) == (step, "Host", "", 10)
        assert [op.ms for op in costs.ops] == sorted((op.ms for op in costs.ops), reverse=True)
        assert sum(op.ms for op in costs.ops) <= costs.ms
        written = op_ms(folder)
        of_the_graph = [op for op in costs.ops if op.kind != "Dataset"]  # whose names are others in the file
        assert of_the_graph
        for op in of_the_graph:
            # Own time: without the ops that an op calls.
            assert 0 < op.ms <= written[op.kind, op.name] + 1e-6
        assert "\n".join(line.strip() for line in costs.text().splitlines()) in log
        assert [path.suffix for path in folder.iterdir()] == [".pb"]


@pytest.mark.long
def test_the_report_has_the_table_too(run_dir: Path) -> None:
    pytest.importorskip("xprof", reason="reading profiles needs the extra `profile`")
    page = build_page([read_run(run_dir)]).replace("<wbr>", "")  # where long names may break
    for costs in read_profiles(find_profiles(run_dir)):
        assert f"<h3>{costs.heading.capitalize()}</h3>" in page
        assert all(f"<td>{op.name}</td>" in page for op in costs.ops)


@pytest.mark.long
def test_profiles_of_other_steps_and_ranks_are_not_there(run_dir: Path) -> None:
    profiles = run_dir / "tensorboard" / "plugins" / "profile"
    assert sorted(path.name for path in profiles.iterdir()) == [f"step-{step:09d}" for step in PROFILED]
    assert [len([*path.glob("*.xplane.pb")]) for path in profiles.iterdir()] == [1, 1]
    written = [path.parent.name for path in (run_dir / "tensorboard").rglob("*tfevents*")]
    assert sorted(written) == ["eval", "train"]  # one file each, of root


@pytest.fixture(scope="session")
def with_and_without(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs with dropout, BatchNorm and Adam on two ranks: one that TensorBoard shows everything of, one plain."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "digits.yaml").write_text(DIGITS.format(data=digits))
    everything = [
        *("log.histograms_every_steps=3", "log.activations={y_hidden: dense}"),
        *("log.graph=true", "log.profile_at_steps=[5]"),
    ]
    for name, arguments in (("with", everything), ("without", ["log.tensorboard=false"])):
        run = ["--config", folder / "digits.yaml", *arguments, "--output-dir", folder / name]
        finished = train(run, launcher="mpirun", np=2)
        assert finished.returncode == 0, finished.text
    return folder / "with", folder / "without"


@pytest.mark.long
def test_a_run_is_the_same_to_the_bit_with_all_of_it_and_without(with_and_without: tuple[Path, Path]) -> None:
    shown, plain = with_and_without
    assert len(histograms(shown)) > 10
    assert summary_of(shown)["weights_sha256"] == summary_of(plain)["weights_sha256"]
    for split in ("train", "eval"):
        pairs = zip(metrics_of(shown, split), metrics_of(plain, split), strict=True)
        assert all(row["loss"] == other["loss"] and row["accuracy"] == other["accuracy"] for row, other in pairs)


@pytest.mark.long
def test_nothing_is_written_when_it_is_off(with_and_without: tuple[Path, Path]) -> None:
    shown, plain = with_and_without
    assert (shown / "tensorboard" / "plugins" / "profile" / "step-000000005").exists()
    assert not (plain / "tensorboard").exists()


@pytest.fixture(scope="module")
def address(run_dir: Path) -> Iterator[str]:
    """A real TensorBoard server on the run."""
    command = [str(BIN / "tensorboard"), "--logdir", str(run_dir / "tensorboard"), "--host", "127.0.0.1", "--port", "0"]
    with (run_dir.parent / "tensorboard.log").open("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=rank_environment())
        try:
            yield _wait_for_address(server, run_dir.parent / "tensorboard.log")
        finally:
            server.terminate()
            server.wait(HANGS_AFTER_S)


def _wait_for_address(server: subprocess.Popen, log: Path) -> str:
    until = time.monotonic() + HANGS_AFTER_S
    while not (found := re.search(r"at (http://127.0.0.1:\d+)", log.read_text())):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.25)
    return found[1]


def ask(address: str, path: str, is_whole: Callable[[Any], object] = lambda content: True) -> bytes:
    """An answer of the server; it reads the files after it has started, and until then knows nothing, or not all."""
    until = time.monotonic() + HANGS_AFTER_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/data/{path}", timeout=HANGS_AFTER_S) as answer:
                content: bytes = answer.read()
                if answer.headers["Content-Encoding"] == "gzip":  # xprof's answers always are
                    content = gzip.decompress(content)
        except urllib.error.HTTPError:
            content = b""
        if content not in (b"", b"{}", b"[]") and is_whole(content):
            return content
        assert time.monotonic() < until, (path, content[:2000])
        time.sleep(0.25)


@pytest.mark.long
def test_tensorboard_serves_scalars_and_histograms(address: str) -> None:
    def tags(content: bytes) -> set[str]:
        return {*json.loads(content).get("train", ())}

    ask(address, "plugin/scalars/tags", lambda content: "loss" in tags(content))
    wanted = {*WEIGHTS, "y_hidden", "gradients/hidden1/weight"}
    ask(address, "plugin/histograms/tags", lambda content: wanted <= tags(content))
    path = "plugin/histograms/histograms?run=train&tag=hidden1/weight"
    shown = json.loads(ask(address, path, lambda content: json.loads(content)[-1][1] >= 100))
    assert [step for _, step, _ in shown] == [25, 50, 75, 100]


@pytest.mark.long
def test_tensorboard_serves_the_graph(address: str) -> None:
    shown = ask(address, "plugin/graphs/graph?run=train").decode()
    assert 'name: "rank_0/mlp/hidden1/MatMul"' in shown
    assert 'name: "update_parameters/' in shown


@pytest.mark.long
def test_tensorboard_serves_the_profile_page(address: str) -> None:
    pytest.importorskip("xprof", reason="the profile page needs the extra `profile`")
    assert json.loads(ask(address, "plugin/profile/runs")) == [f"step-{step:09d}" for step in reversed(PROFILED)]
    run = f"run=step-{PROFILED[0]:09d}"
    (host,) = json.loads(ask(address, f"plugin/profile/hosts?{run}&tag=memory_profile"))
    which = f"{run}&host={host['hostname']}"
    assert b"hidden1_1/MatMul" in ask(address, f"plugin/profile/data?{which}&tag=framework_op_stats")
    assert b"tfOpName" in ask(address, f"plugin/profile/data?{which}&tag=memory_profile")


@pytest.mark.long
def test_an_address_that_serves_nothing_is_noticed(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/data/plugin/histograms/histograms?run=train&tag=hidden1/nothing")
