"""The packages and what they may import. A failure here means that something is in the wrong package."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "horovod_train"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [
    {"train_function"},
    {"main"},
    {"commands"},
    {"inference"},
    {"training", "keras"},
    {"tensorflow"},
    {"distributed", "data", "models", "optim"},
    {"checkpoint"},
    {"output"},
    {"config"},
    {"errors", "host", "keras_seams", "tfrecord_framing"},
    {"shown_text"},
]
"""From top to bottom. A package imports from those below it; siblings do not know each other."""

MAY_IMPORT_UP = {"tensorflow/keras.py": {"keras"}}  # a second name of it, as Horovod has one

MAY_IMPORT_HOROVOD = {"distributed", "tensorflow", "keras"}
MAY_READ_ENVIRONMENT = {"train_function", "distributed"}
READS_ENVIRONMENT_TOO = {
    PACKAGE / "output" / "logs.py",
    PACKAGE / "commands" / "slurm.py",  # where a user keeps settings of programs
    PACKAGE / "host.py",  # where a user keeps caches
    PACKAGE / "commands" / "build_horovod.py",  # settings of compilers
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    found = [number for number, rooms in enumerate(LAYERS) if name in rooms]
    assert found, f"{name} is in no layer: add it to LAYERS where it belongs"
    return found[0]


def where(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def own_rooms(path: Path) -> set[str]:
    inside = {name.split(".")[1] for name in imports(path) if name.startswith("horovod_train.")}
    return {name for name in inside if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()}


def test_imports_point_down() -> None:
    for path in FILES:
        if (here := room(path)) not in ("__init__", "__main__"):
            for there in own_rooms(path) - {here} - MAY_IMPORT_UP.get(where(path), set()):
                assert layer(there) > layer(here), f"{where(path)}: {here} must not import {there}"


def test_only_some_packages_import_horovod_and_mpi() -> None:
    for path in FILES:
        found = {name for name in imports(path) if name.split(".")[0] in ("horovod", "mpi4py")}
        assert not found or room(path) in MAY_IMPORT_HOROVOD, where(path)


def test_only_distributed_and_a_few_modules_read_the_environment() -> None:
    reading = {path for path in FILES if re.search(r"os\.(environ|getenv)", path.read_text())}
    others = {path for path in reading - READS_ENVIRONMENT_TOO if room(path) not in MAY_READ_ENVIRONMENT}
    assert set(map(where, others)) == set()


MAY_COUNT_CORES = {
    "host.py": "and the limit of a container with them",
    "distributed/start.py": "which cores the ranks of a host are bound to",
    "commands/doctor_checks.py": "shows cores and limit apart",
}


def test_threads_are_as_many_as_the_limit_of_a_container_allows_cores() -> None:
    counting = {path for path in FILES if re.search("sched_getaffinity|cpu_count", path.read_text())}
    assert set(map(where, counting)) == set(MAY_COUNT_CORES)


OF_TFRECORD = re.compile(r"horovod_train\.data\.tfrecord")
MAY_KNOW_TFRECORDS = {
    "data/dataset.py": "the list of sources",
    "data/prepare/writing.py": "writes TFRecord files",
    "commands/index.py": "indexes TFRecord files",
}


def test_only_data_tfrecord_knows_how_records_are_stored() -> None:
    """So that another kind of storage takes one module and one line in SOURCES."""
    knowing = {where(path) for path in FILES if any(map(OF_TFRECORD.match, imports(path)))}
    assert {name for name in knowing if name not in ("data/tfrecord.py", "data/tfrecord_index.py")} <= set(
        MAY_KNOW_TFRECORDS
    )


_REMOVES = {
    *("os.remove", "os.unlink", "os.rmdir", "os.removedirs", "os.rename", "os.renames", "os.replace", "os.truncate"),
    *("shutil.rmtree", "shutil.move", "shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.copy2"),
}
_REMOVING_METHODS = {"unlink", "rmdir", "rename", "write_text", "write_bytes", "extractall"}


def _may_lose_a_file(call: ast.Call) -> bool:
    """Whether a call removes, renames or empties a file: by the name of what is called, and the mode of an `open`."""
    name = ast.unparse(call.func)
    if name in _REMOVES:
        return True
    words = [word for word in [*call.args, *(key.value for key in call.keywords)] if isinstance(word, ast.Constant)]
    if name == "open" or (isinstance(call.func, ast.Attribute) and call.func.attr in ("open", "fdopen", "ZipFile")):
        return any(isinstance(word.value, str) and re.fullmatch(r"[bt+]*w[bt+]*", word.value) for word in words)
    if not isinstance(call.func, ast.Attribute):
        return False
    # str.replace takes two words, Path.replace one.
    is_path_replace = call.func.attr == "replace" and len(call.args) == 1 and not call.keywords
    return is_path_replace or call.func.attr in _REMOVING_METHODS


INSIDE_A_NEW_ARCHIVE = {"inference/predictions.py": "archive.open(f'{name}.npy', 'w', force_zip64=True)"}


def test_only_output_files_removes_renames_or_empties_files() -> None:
    """It knows what we have made. Everything else is opened to be read, appended to, or made new (mode x)."""
    for path in FILES:
        if where(path) != "output/files.py":
            calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
            found = {ast.unparse(call) for call in calls if _may_lose_a_file(call)}
            assert found <= {INSIDE_A_NEW_ARCHIVE.get(where(path))}, where(path)


@pytest.mark.parametrize(
    "line",
    [
        "shutil.rmtree(a)",
        "os.replace(a, b)",
        "a.unlink()",
        "a.replace(b)",
        "open(a, 'w')",
        "a.open('wb')",
        "a.rename(b)",
    ],
)
def test_what_may_lose_a_file_is_seen(line: str) -> None:
    (call,) = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
    assert _may_lose_a_file(call)


def test_collectives_say_so() -> None:
    """`grep 'Collective:'` finds every method of the group at which ranks meet, and only those."""
    tree = ast.parse((PACKAGE / "distributed" / "group.py").read_text())
    (group,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "WorkerGroup"]
    for method in (node for node in group.body if isinstance(node, ast.FunctionDef)):
        meets = any(
            word in ast.unparse(method)
            for word in (
                "hvd.",
                "objects.",
                "self.sum(",
                "self.sum_in_step(",
                "broadcast_by_position(",
                "sum_over_ranks(",
                "self.gather(",
                "self.raise_together(",
            )
        )
        says = (ast.get_docstring(method) or "").startswith("Collective:")
        assert meets == says, method.name


UNPICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
LOWERCASE_MPI = {"send", "recv", "bcast", "gather", "allgather", "scatter", "alltoall", "reduce", "allreduce"}


def test_what_other_programs_print_may_have_any_encoding() -> None:
    for path in PACKAGE.rglob("*.py"):
        for call in (node for node in nodes(path) if isinstance(node, ast.Call)):
            words = {word.arg: ast.unparse(word.value) for word in call.keywords}
            if words.get("text") == "True" and "subprocess" in ast.unparse(call.func):
                assert "errors" in words, f"{where(path)}:{call.lineno}"


def test_nothing_is_unpickled() -> None:
    """To unpickle is to run the sender's code. Horovod's exchanges of objects unpickle, and mpi4py's lowercase ones."""
    for path in FILES:
        assert not {name.split(".")[0] for name in imports(path)} & UNPICKLES, where(path)
        imports_mpi = any(name.startswith("mpi4py") for name in imports(path))
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                owner, said = ast.unparse(node.value), f"{where(path)}: {ast.unparse(node)}"
                assert not (owner.startswith("hvd") and re.search(r"_object(_fn)?$", node.attr)), said
                is_communicator = imports_mpi and owner in ("MPI.COMM_WORLD", "host_ranks")
                assert not (is_communicator and node.attr in LOWERCASE_MPI), said
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", where(path)


def test_no_private_names_of_other_libraries() -> None:
    """Names of Keras, TensorFlow and Horovod that begin with an underscore may change without notice."""
    private = re.compile(r"\b(keras\.src|tensorflow\.python|(hvd|keras|tf)\.(\w+\.)*_(?!_)\w+)")
    found = {path.relative_to(PACKAGE).as_posix() for path in FILES if private.search(path.read_text())}
    assert found == {"keras_seams.py"}  # see test_keras_seams


def test_only_users_functions_are_rewritten_by_autograph() -> None:
    """It took two seconds of each rank's start to rewrite ours, for what tf.while_loop and tf.cond say as well."""
    rewritten = set()
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "tf.function":
                continue
            if "autograph" not in {keyword.arg for keyword in node.keywords}:
                rewritten.add(path.name)
        assert "@tf.function\n" not in path.read_text(), where(path)
    assert rewritten == {"parsing.py", "augment.py"}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--config", "nowhere.yaml"],
        ["prepare", "--help"],
        ["plan", "--help"],
        ["plan", "--config", "nowhere.yaml"],
        ["doctor", "--help"],
        ["doctor", "--config", "nowhere.yaml"],
        ["bench", "scaling", "--help"],
    ],
)
def test_help_and_bad_paths_answer_before_tensorflow_is_imported(words: list[str]) -> None:
    script = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from horovod_train.main import main\n"
        f"sys.exit(main({words!r}))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert "Error" not in finished.stderr
    assert finished.returncode in (0, 2)


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone and refuses the second."""
    names = [path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
