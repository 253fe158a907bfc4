"""Studies survive kills, races and refused neighbours, alike in a SQLite file and in PostgreSQL."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import alembic.command
import optuna
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from autocompile.errors import AutocompileError, MachineError, UserError
from autocompile.records import (
    Compile,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Recompile,
    Region,
    Stage,
    State,
    StepSeconds,
    Stopped,
    Telemetry,
    TrialRecord,
)
from autocompile.space import SearchSpace, default_config
from autocompile.spec import (
    FULL_DEPTH,
    Budget,
    Device,
    Facts,
    Fidelity,
    LoraSpec,
    Method,
    Role,
    StudySpec,
    WorkloadSpec,
    traits,
)
from autocompile.storage import Storage, exists
from autocompile.storage.lease import process_start, this_process
from autocompile.storage.mounts import network_file_system
from autocompile.storage.optuna_rows import OptunaRows
from autocompile.storage.tables import METADATA

SERVERS = ("postgresql+psycopg://postgres@127.0.0.1:5432/test", "postgresql+psycopg://root@127.0.0.1:5432/test")
SPACE = SearchSpace.model_validate(
    {
        "format": 1,
        "parameters": {
            "scope": {"choices": ["none", "layer"], "default": "none", "why": "test"},
            "mode": [
                {"choices": ["default"], "default": "default", "when": {"scope": ["none"]}, "why": "test"},
                {"choices": ["default", "reduce-overhead"], "default": "default", "why": "test"},
            ],
            "micro_batch": {"low": 1, "high": 64, "scale": "log2", "default": 4, "why": "test"},
            "gradient_checkpointing": {"choices": [False, True], "default": False, "why": "test"},
            "sdpa": {"choices": ["auto", "math"], "default": "auto", "why": "test"},
        },
    }
)
SPEC = StudySpec(
    workload=WorkloadSpec(
        model="tiny-llama", method=Method.LORA, lora=LoraSpec(r=64), options={"depth": 2, "wide": True, "rate": 0.5}
    ),
    space=SPACE,
    pinned={"sdpa": "math"},
    seed=7,
    budget=Budget(seconds=1800.0, trials=40),
    cache_root="/caches",
)
FACTS = Facts(
    devices=(Device(uuid="GPU-1", name="NVIDIA H200", memory_bytes=150_000_000_000, capability="9.0"),),
    layers=32,
    parameters=6_738_415_616,
    environment={"gpu": "NVIDIA H200", "torch": "2.13.0"},
    regions={"layer": "model.layers.*"},
    frozen_knobs={"micro_batch": "the batch does not grow with it"},
    free_memory_bytes=149_000_000_000,
)
CONFIG = default_config(SPACE, traits(SPEC, FACTS), SPEC.pinned)
MEASURED = Measured(
    measurement=Measurement(
        tokens_per_second=12345.678,
        step_seconds=StepSeconds(median=0.1, low=0.09, high=0.11, n=12),
        compile=Compile(seconds=3.5, cold_seconds=13.25, cache="partly"),
        setup_seconds=2.0,
        peak_memory_bytes=1 << 36,
        losses=(10.5, 10.25),
        degraded=("tight_memory",),
    ),
    telemetry=Telemetry(
        compile_applied="all",
        regions=(Region(name="layer", modules=32, graphs=1, calls=99, code_hashes=("ab", "cd")),),
        recompiles=(Recompile(where="model.py:3", guard="size \x00 \u00e9 \U0001f600"),),
    ),
)
OOM = Failed(failure=Failure(kind=FailureKind.OOM, stage=Stage.WARMUP, message="out of memory", where="train.py:3"))


@pytest.fixture(scope="session")
def server() -> sa.Engine:
    return running_server()


def running_server() -> sa.Engine:
    """Of PostgreSQL, where databases can be made; without one the tests are skipped, but not in CI."""
    for url in SERVERS:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            continue
        return engine
    missing = f"no PostgreSQL server at {' or '.join(SERVERS)}"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@contextmanager
def throw_away(server: sa.Engine, template: str = "template1") -> Iterator[str]:
    """A database on the server, a copy of the template."""
    name = f"autocompile_{uuid.uuid4().hex}"
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server.url.set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def opened_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with all tables and no study, to copy."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('opened')}/autocompile.db"
        Storage.open(url).close()
        yield url
        return
    with throw_away(request.getfixturevalue("server")) as url:
        Storage.open(url).close()
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that nobody has opened."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/studies/autocompile.db"
        return
    with throw_away(request.getfixturevalue("server")) as url:
        yield url


@pytest.fixture
def url(request: pytest.FixtureRequest, opened_once: str, tmp_path: Path) -> Iterator[str]:
    if opened_once.startswith("sqlite"):
        shutil.copy(opened_once.removeprefix("sqlite:///"), tmp_path / "autocompile.db")
        yield f"sqlite:///{tmp_path}/autocompile.db"
        return
    with throw_away(request.getfixturevalue("server"), template=str(sa.make_url(opened_once).database)) as url:
        yield url


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    with Storage.open(url) as opened:
        yield opened


@contextmanager
def database(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.contract.test_storage"])


@contextmanager
def child(act: Callable[[str, Connection], None], url: str) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process of its own that acts on this database; what it says and hears goes through the pipe."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=act, args=(url, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def dies(act: Callable[[str, Connection], None], url: str) -> None:
    with child(act, url) as (process, _):
        process.join(60)
        assert process.exitcode == -signal.SIGKILL


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def open_one(storage: Storage, name: str = "study", role: Role = Role.SEARCH, **knobs: Any) -> int:
    return storage.open_trial(name, config={**CONFIG, **knobs}, role=role, fidelity=FULL_DEPTH)


def closed(number: int, state: State = State.COMPLETE, **fields: Any) -> TrialRecord:
    fields = {"config": dict(CONFIG), "role": Role.SEARCH, **fields}
    return TrialRecord(number=number, state=state, **fields)


def trials(url: str, name: str = "study") -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=name, storage=optunas(url)).trials


def optunas(url: str) -> optuna.storages.RDBStorage:
    """The database as Optuna's own tools open it."""
    return optuna.storages.RDBStorage(
        url, {"poolclass": sa.NullPool}, skip_compatibility_check=True, skip_table_creation=True
    )


# What is put in comes out


@pytest.mark.parametrize("planned", ["planned_tokens", "planned_steps"])
def test_a_study_comes_back_as_it_was_but_for_its_planned_run(storage: Storage, planned: str) -> None:
    storage.create("study", SPEC.model_copy(update={planned: 50_000_000}), FACTS)
    found = storage.load("study")
    assert found is not None
    assert (found.name, found.spec, found.facts, found.used_seconds) == ("study", SPEC, FACTS, 0.0)
    assert timedelta(0) <= datetime.now(UTC) - found.created < timedelta(minutes=1)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(
            closed(0, value=12345.678, value_source="measured", outcome=MEASURED, seconds=42.5), id="a measurement"
        ),
        pytest.param(
            closed(0, value=7.0, value_source="predicted", outcome=MEASURED, fidelity=Fidelity(layers=2)),
            id="a shallow probe",
        ),
        pytest.param(closed(0, State.PRUNED, outcome=OOM, seconds=1.0), id="a failure of the config"),
        pytest.param(closed(0, State.FAIL, stopped=Stopped(reason="lost", bound=900.0)), id="a lost slice"),
        pytest.param(
            closed(
                0,
                value=1.0,
                outcome=MEASURED.model_copy(
                    update={"measurement": MEASURED.measurement.model_copy(update={"losses": (float("inf"),)})}
                ),
            ),
            id="a loss that diverged",
        ),
    ],
)
def test_every_field_of_a_record_comes_back(storage: Storage, record: TrialRecord) -> None:
    storage.create("study", SPEC, FACTS)
    number = storage.open_trial("study", config=record.config, role=record.role, fidelity=record.fidelity)
    running = TrialRecord(
        number=0, role=record.role, state=State.RUNNING, config=record.config, fidelity=record.fidelity
    )
    assert (number, storage.records("study")) == (0, [running])
    storage.close_trial("study", record)
    assert storage.records("study") == [record]


def test_values_keep_their_types(storage: Storage) -> None:
    storage.create("study", SPEC, FACTS)
    open_one(storage, fullgraph=True, micro_batch=1)
    config = storage.records("study")[0].config
    assert (config["fullgraph"], config["micro_batch"]) == (True, 1)
    assert (type(config["fullgraph"]), type(config["micro_batch"])) == (bool, int)
    assert list(config) == list(CONFIG)


def test_time_and_budget_are_kept(storage: Storage) -> None:
    storage.create("study", SPEC, FACTS)
    storage.add_seconds("study", 10.5)
    storage.add_seconds("study", 4.5)
    storage.set_budget("study", Budget(seconds=7200.0))
    found = storage.load("study")
    assert found is not None
    assert found.used_seconds == 15.0
    assert found.spec == SPEC.model_copy(update={"budget": Budget(seconds=7200.0)})


def test_studies_are_apart_and_listed_oldest_first(storage: Storage) -> None:
    for name in ("zebra", "ant"):
        storage.create(name, SPEC, FACTS)
    assert [open_one(storage, name) for name in ("zebra", "ant", "zebra")] == [0, 0, 1]
    storage.add_seconds("ant", 5)
    zebra = storage.load("zebra")
    assert zebra is not None
    assert (storage.names(), len(storage.records("ant")), zebra.used_seconds) == (["zebra", "ant"], 1, 0)


def test_what_is_not_there(storage: Storage) -> None:
    assert (storage.names(), storage.load("study")) == ([], None)
    storage.create("study", SPEC, FACTS)
    with pytest.raises(UserError, match=r"^no study stady in .*; did you mean study\?$"):
        storage.records("stady")
    with pytest.raises(UserError, match=r"^no study stady"), storage.hold("stady"):
        pass


def test_a_name_is_taken_once(storage: Storage) -> None:
    storage.create("study", SPEC, FACTS)
    with pytest.raises(UserError, match=r"^study study exists already in "):
        storage.create("study", SPEC, FACTS)


def test_a_study_of_optuna_alone_keeps_its_name(storage: Storage, url: str) -> None:
    optuna.create_study(study_name="mine", storage=optunas(url))
    with pytest.raises(UserError, match=r"^a study mine that is not of autocompile exists"):
        storage.create("mine", SPEC, FACTS)
    assert storage.names() == []


def test_delete_removes_both_and_frees_the_name(storage: Storage, url: str) -> None:
    for name in ("study", "other"):
        storage.create(name, SPEC, FACTS)
        open_one(storage, name)
    storage.delete("study")
    assert storage.names() == ["other"]
    with pytest.raises(KeyError):
        trials(url)
    storage.create("study", SPEC, FACTS)
    assert (storage.records("study"), len(storage.records("other"))) == ([], 1)


# Optuna's rows


def test_optuna_opens_the_study_and_sees_what_happened(storage: Storage, url: str) -> None:
    storage.create("study", SPEC, FACTS)
    for knobs in ({}, {"scope": "layer", "mode": "reduce-overhead", "micro_batch": 16}, {}, {}, {}):
        open_one(storage, **knobs)
    storage.close_trial("study", closed(0, value=100.0, outcome=MEASURED))
    storage.close_trial("study", closed(1, State.PRUNED, outcome=OOM))
    storage.close_trial("study", closed(2, State.FAIL))
    storage.close_trial("study", closed(3, outcome=MEASURED, fidelity=Fidelity(layers=2)))
    complete, pruned, failed, shallow, running = trials(url)
    states = [trial.state.name for trial in (complete, pruned, failed, shallow, running)]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "RUNNING"]
    assert (complete.value, complete.constraints) == (100.0, {})
    assert pruned.constraints == {"oom": 1.0}
    assert pruned.params == {
        "scope": "layer",
        "mode": "reduce-overhead",
        "micro_batch": 16,
        "gradient_checkpointing": False,
    }
    assert pruned.distributions["micro_batch"] == optuna.distributions.IntDistribution(1, 64, log=True)
    assert pruned.user_attrs["role"] == "search"
    assert pruned.user_attrs["config"] == {**CONFIG, "scope": "layer", "mode": "reduce-overhead", "micro_batch": 16}
    study = optuna.load_study(study_name="study", storage=optunas(url))
    assert (study.best_value, study.direction.name) == (100.0, "MAXIMIZE")


def test_a_value_outside_the_space_is_no_parameter(storage: Storage, url: str) -> None:
    storage.create("study", SPEC, FACTS)
    open_one(storage, micro_batch=128, scope="*.q_proj")
    assert set(trials(url)[0].params) == {"mode", "gradient_checkpointing"}
    assert trials(url)[0].user_attrs["config"]["micro_batch"] == 128


def test_closing_twice_keeps_the_first_outcome(storage: Storage, url: str) -> None:
    storage.create("study", SPEC, FACTS)
    open_one(storage)
    first = closed(0, value=100.0, outcome=MEASURED)
    for record in (first, first, closed(0, State.FAIL)):
        storage.close_trial("study", record)
    assert storage.records("study") == [first]
    assert (trials(url)[0].state.name, trials(url)[0].value) == ("COMPLETE", 100.0)


QUIET = """
import sys
from autocompile.storage import Storage
from tests.contract.test_storage import CONFIG, FACTS, FULL_DEPTH, OOM, Role, SPEC, State, closed
with Storage.open(sys.argv[1]) as storage:
    storage.create("study", SPEC, FACTS)
    with storage.hold("study"):
        storage.open_trial("study", config=CONFIG, role=Role.SEARCH, fidelity=FULL_DEPTH)
        storage.close_trial("study", closed(0, State.PRUNED, outcome=OOM))
        storage.close_trial("study", closed(0, State.PRUNED, outcome=OOM))
        storage.mend("study")
    storage.delete("study")
"""


def test_nothing_is_printed(new_url: str) -> None:
    root = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET, new_url],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# kill -9 at the worst moments


def die_before_telling(url: str, _: Connection) -> None:
    OptunaRows.tell = die
    storage = Storage.open(url)
    storage.create("study", SPEC, FACTS)
    with storage.hold("study"):
        open_one(storage)
        open_one(storage)
        storage.close_trial("study", closed(0, State.PRUNED, outcome=OOM))


def test_killed_between_our_write_and_optunas(url: str) -> None:
    dies(die_before_telling, url)
    with Storage.open(url) as storage, storage.hold("study"):
        assert [record.state for record in storage.records("study")] == [State.PRUNED, State.RUNNING]
        assert [trial.state.name for trial in trials(url)] == ["RUNNING", "RUNNING"]
        for _ in range(2):
            storage.mend("study")
            assert [trial.state.name for trial in trials(url)] == ["PRUNED", "RUNNING"]
        assert trials(url)[0].constraints == {"oom": 1.0}


def die_before_our_row(url: str, _: Connection) -> None:
    storage = Storage.open(url)
    storage.create("study", SPEC, FACTS)
    open_one(storage)
    opened = OptunaRows.open_trial
    OptunaRows.open_trial = lambda *args: die(opened(*args))
    open_one(storage)


def test_killed_between_optunas_row_and_ours(url: str) -> None:
    dies(die_before_our_row, url)
    with Storage.open(url) as storage:
        storage.mend("study")
        assert [trial.state.name for trial in trials(url)] == ["RUNNING", "FAIL"]
        assert (len(storage.records("study")), open_one(storage)) == (1, 2)


def die_creating(url: str, _: Connection) -> None:
    OptunaRows.create = die
    Storage.open(url).create("study", SPEC, FACTS)


def test_killed_in_the_midst_of_creating(url: str) -> None:
    dies(die_creating, url)
    with Storage.open(url) as storage:
        assert storage.names() == ["study"]
        storage.mend("study")
        assert trials(url) == []
        assert open_one(storage) == 0


def die_deleting(url: str, _: Connection) -> None:
    storage = Storage.open(url)
    storage.create("study", SPEC, FACTS)
    open_one(storage)
    deleted = OptunaRows.delete
    OptunaRows.delete = lambda *args: die(deleted(*args))
    storage.delete("study")


def test_killed_in_the_midst_of_deleting(url: str) -> None:
    dies(die_deleting, url)
    with Storage.open(url) as storage:
        storage.delete("study")
        storage.create("study", SPEC, FACTS)
        assert storage.records("study") == []


def die_migrating(url: str, _: Connection) -> None:
    upgrade = alembic.command.upgrade
    alembic.command.upgrade = lambda *args: die(upgrade(*args))
    Storage.open(url)


def test_killed_in_the_midst_of_the_first_migration(new_url: str) -> None:
    dies(die_migrating, new_url)
    with database(new_url) as connection:
        assert not sa.inspect(connection).has_table("autocompile_studies")
    with Storage.open(new_url) as storage:
        assert storage.names() == []


def test_rows_that_optuna_lost_are_made_again(storage: Storage, url: str) -> None:
    storage.create("study", SPEC, FACTS)
    open_one(storage, micro_batch=8)
    open_one(storage)
    storage.close_trial("study", closed(0, value=100.0, outcome=MEASURED))
    optuna.delete_study(study_name="study", storage=optunas(url))
    storage.mend("study")
    done, running = trials(url)
    assert (done.value, done.params["micro_batch"], running.state.name) == (100.0, CONFIG["micro_batch"], "RUNNING")
    assert open_one(storage) == 2


# Who may write


def hold_for_ever(url: str, pipe: Connection) -> None:
    with Storage.open(url) as storage, storage.hold("study"):
        pipe.send("held")
        time.sleep(600)


def test_a_live_holder_is_left_alone_and_a_killed_one_is_replaced(storage: Storage, url: str) -> None:
    storage.create("study", SPEC, FACTS)
    with child(hold_for_ever, url) as (holder, pipe):
        assert pipe.recv() == "held"
        refusal = rf"^study study is in use by pid {holder.pid} on {this_process().host}$"
        with pytest.raises(UserError, match=refusal), storage.hold("study"):
            pass
        with pytest.raises(UserError, match=refusal):
            storage.delete("study")
    with storage.hold("study"):
        storage.beat("study")
    with storage.hold("study"):
        pass


def test_a_killed_process_that_nobody_collected_is_dead() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process_start(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(process.pid) is None
    assert process_start(process.pid) is None


def test_a_study_is_held_once_in_a_process_and_free_again_after_an_error(storage: Storage) -> None:
    storage.create("study", SPEC, FACTS)
    with pytest.raises(ZeroDivisionError), storage.hold("study"):
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()}"), storage.hold("study"):
            pass
        raise ZeroDivisionError
    with storage.hold("study"):
        storage.beat("study")
    with pytest.raises(UserError, match="taken over"):
        storage.beat("study")


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        pytest.param({}, True, id="this very process lives"),
        pytest.param({"lease_heartbeat": 0.0}, True, id="a suspended process of this host lives"),
        pytest.param({"lease_process_start": 1}, False, id="another process has its pid now"),
        pytest.param({"lease_boot_id": "earlier"}, False, id="the host was started again"),
        pytest.param({"lease_host": "elsewhere"}, True, id="another host was heard of just now"),
        pytest.param({"lease_host": "elsewhere", "lease_boot_id": "b"}, True, id="whatever its boot"),
        pytest.param({"lease_host": "elsewhere", "lease_heartbeat": -50.0}, True, id="or 50 s ago"),
        pytest.param({"lease_host": "elsewhere", "lease_heartbeat": -70.0}, False, id="but not 70 s ago"),
        pytest.param({"lease_host": "elsewhere", "lease_heartbeat": 3600.0}, False, id="nor in an hour"),
    ],
)
def test_who_counts_as_alive(url: str, changes: dict[str, Any], refused: bool) -> None:
    storage = Storage.open(url, watch_seconds=0.1)
    storage.create("study", SPEC, FACTS)
    mine = {f"lease_{name}": value for name, value in this_process().model_dump().items()}
    lease = {**mine, "lease_heartbeat": 0.0, **changes}
    if lease["lease_host"] == "elsewhere":
        lease["lease_heartbeat"] += time.time()
    with database(url) as connection:
        connection.execute(sa.update(METADATA.tables["autocompile_studies"]).values(lease))
    if refused:
        with pytest.raises(UserError, match="in use by pid"), storage.hold("study"):
            pass
    else:
        with storage.hold("study"):
            storage.beat("study")
    storage.close()


@pytest.mark.parametrize(
    "jump",
    [
        pytest.param(-3600.0, id="its clock is an hour behind"),
        pytest.param(3600.0, id="its clock is an hour ahead"),
    ],
)
@pytest.mark.parametrize("elsewhere", ["lease_host", "lease_boot_id"])
def test_a_holder_whose_heartbeat_moves_is_alive_whatever_the_clocks_say(url: str, elsewhere: str, jump: float) -> None:
    """Another host may have this one's name."""
    with Storage.open(url, watch_seconds=1.5) as storage, Storage.open(url) as other:
        storage.create("study", SPEC, FACTS)
        lease = {f"lease_{name}": value for name, value in this_process().model_dump().items()} | {elsewhere: "other"}
        with database(url) as connection:
            studies = METADATA.tables["autocompile_studies"]
            connection.execute(sa.update(studies).values({**lease, "lease_heartbeat": time.time() + jump}))
        timer = threading.Timer(0.5, beat_once, [url, time.time() + jump + 1])
        timer.start()
        with pytest.raises(UserError, match=f"in use by pid {lease['lease_pid']}"), storage.hold("study"):
            pass
        timer.join()
        assert other.names() == ["study"]  # nobody was locked out meanwhile


def beat_once(url: str, heartbeat: float) -> None:
    with database(url) as connection:
        connection.execute(sa.update(METADATA.tables["autocompile_studies"]).values(lease_heartbeat=heartbeat))


def test_a_holder_that_was_taken_over_learns_it_and_leaves_the_other_alone(storage: Storage, url: str) -> None:
    studies = METADATA.tables["autocompile_studies"]
    storage.create("study", SPEC, FACTS)
    with storage.hold("study"):
        with database(url) as connection:
            connection.execute(sa.update(studies).values(lease_host="elsewhere", lease_pid=77))
        with pytest.raises(UserError, match=r"^study study was taken over by pid 77 on elsewhere$"):
            storage.beat("study")
    with database(url) as connection:
        assert connection.scalars(sa.select(studies.c.lease_pid)).one() == 77


def race(act: Callable[[str, Connection], None], url: str) -> list[str]:
    """What three processes say that were let go at one moment."""
    with ExitStack() as stack:
        racers = [stack.enter_context(child(act, url)) for _ in range(3)]
        assert [pipe.recv() for _, pipe in racers] == ["ready"] * 3
        for _, pipe in racers:
            pipe.send("go")
        return sorted(pipe.recv() for _, pipe in racers)


def create_at_once(url: str, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()
    try:
        Storage.open(url).create("study", SPEC, FACTS)
        pipe.send("created")
    except UserError as error:
        pipe.send(str(error)[:26])


def test_of_processes_creating_one_study_on_a_new_database_one_does(new_url: str) -> None:
    assert race(create_at_once, new_url) == ["created", *["study study exists already"] * 2]
    assert trials(new_url) == []


def hold_at_once(url: str, pipe: Connection) -> None:
    storage = Storage.open(url)
    pipe.send("ready")
    pipe.recv()
    try:
        with storage.hold("study"):
            pipe.send("held")
            time.sleep(600)
    except UserError as error:
        pipe.send(str(error)[:21])


def test_of_processes_taking_a_dead_ones_study_one_does(url: str) -> None:
    with Storage.open(url) as storage:
        storage.create("study", SPEC, FACTS)
    with database(url) as connection:
        gone = {"lease_host": this_process().host, "lease_pid": 1 << 22, "lease_process_start": 1}
        values = {**gone, "lease_boot_id": this_process().boot_id, "lease_heartbeat": 0.0}
        connection.execute(sa.update(METADATA.tables["autocompile_studies"]).values(values))
    assert race(hold_at_once, url) == ["held", *["study study is in use"] * 2]


def lock_for_a_while(url: str, pipe: Connection) -> None:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    pipe.send("locked")
    time.sleep(5.5)  # sqlite3 by itself would wait for 5 s


def test_a_busy_writer_is_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/autocompile.db"
    with Storage.open(url) as storage:
        storage.create("study", SPEC, FACTS)
        with child(lock_for_a_while, url) as (_, pipe):
            assert pipe.recv() == "locked"
            assert storage.names() == ["study"]  # readers do not wait: WAL
            storage.add_seconds("study", 1.0)
            assert open_one(storage) == 0


def test_a_lock_that_lasts_is_one_line_and_is_waited_for_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/autocompile.db"
    with Storage.open(f"{url}?timeout=2") as storage:
        storage.create("study", SPEC, FACTS)
        open_one(storage)
        with child(lock_for_a_while, url) as (_, pipe):
            assert pipe.recv() == "locked"
            began = time.monotonic()
            with pytest.raises(MachineError, match=r"autocompile\.db\?timeout=2: database is locked$"):
                storage.close_trial("study", closed(0, value=1.0, outcome=MEASURED))
            assert 1.5 < time.monotonic() - began < 4
            for write in (lambda: storage.add_seconds("study", 1.0), lambda: open_one(storage)):
                began = time.monotonic()
                with pytest.raises(MachineError, match="database is locked"):
                    write()
                assert time.monotonic() - began < 1
        storage.close_trial("study", closed(0, value=1.0, outcome=MEASURED))
        assert [record.state for record in storage.records("study")] == [State.COMPLETE]


# A server that goes away


def drop(server: sa.Engine, url: str) -> None:
    """End all connections to this database, as a server does that is stopped."""
    with server.connect() as connection:
        name = sa.make_url(url).database
        query = sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
        connection.execute(query, {"name": name})


@pytest.fixture
def served(server: sa.Engine) -> Iterator[tuple[str, Storage]]:
    """A storage in PostgreSQL with a study that has one running trial."""
    with throw_away(server) as url, Storage.open(url) as storage:
        storage.create("study", SPEC, FACTS)
        open_one(storage)
        yield url, storage


def test_dropped_connections_are_made_again(served: tuple[str, Storage], server: sa.Engine) -> None:
    url, storage = served
    record = closed(0, value=1.0, outcome=MEASURED)
    acts: list[Callable[[], object]] = [
        lambda: storage.close_trial("study", record),
        lambda: open_one(storage),
        lambda: storage.add_seconds("study", 1.0),
        lambda: storage.mend("study"),
        lambda: storage.records("study"),
    ]
    with storage.hold("study"):
        for act in acts:
            drop(server, url)
            act()
        drop(server, url)
        storage.beat("study")
        drop(server, url)
    assert [found.state for found in storage.records("study")] == [State.COMPLETE, State.RUNNING]


def test_a_server_that_is_started_again_is_waited_for(served: tuple[str, Storage], server: sa.Engine) -> None:
    url, storage = served
    name = sa.make_url(url).database

    def admit(yes: bool) -> None:
        with server.connect() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {yes}")

    admit(False)
    drop(server, url)
    timer = threading.Timer(2.0, admit, [True])
    timer.start()
    try:
        began = time.monotonic()
        storage.close_trial("study", closed(0, value=1.0, outcome=MEASURED))
        assert open_one(storage) == 1
        assert time.monotonic() - began > 1.5
    finally:
        timer.join()
        admit(True)


@pytest.mark.parametrize("committed", [True, False])
def test_a_transaction_in_which_the_server_goes_away_is_done_again(
    served: tuple[str, Storage], server: sa.Engine, committed: bool
) -> None:
    """At each commit in turn of ours and Optuna's, before it or after it, of all that a trial writes."""
    url, storage = served
    record = closed(0, value=1.0, outcome=MEASURED)
    n_commits, at = 0, -1

    def commit(connection: Any) -> None:
        nonlocal n_commits
        n_commits += 1
        if n_commits - 1 != at:
            connection.commit()
            return
        if committed:
            connection.commit()
        drop(server, url)
        connection.execute("SELECT 1")  # raises, as the driver does

    def one_trial() -> None:
        nonlocal n_commits
        n_commits = 0
        open_one(storage)
        number = max(found.number for found in storage.records("study"))
        storage.close_trial("study", closed(number, value=1.0, outcome=MEASURED))

    for engine in (storage._engine, storage._rows._rows.engine):
        engine.dialect.do_commit = commit
    storage.close_trial("study", record)
    one_trial()
    usual = n_commits
    for lost in range(usual):
        at = lost
        one_trial()
        assert n_commits > usual or committed  # it did happen
    at = -1
    storage.mend("study")
    assert [found.state for found in storage.records("study")] == [State.COMPLETE] * (usual + 2)
    assert State.RUNNING.value not in {trial.state.name for trial in trials(url)}


# The schema


def test_migrating_twice_is_harmless_and_optunas_version_is_apart(new_url: str) -> None:
    for _ in range(2):
        Storage.open(new_url).close()
    with database(new_url) as connection:
        assert connection.exec_driver_sql("SELECT version_num FROM autocompile_version").scalars().all() == ["0001"]
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars().all() != ["0001"]


def test_the_migrations_make_the_tables_that_the_code_uses(storage: Storage, url: str) -> None:
    def ours(thing: Any, name: str | None, kind: str, reflected: bool, compared: Any) -> bool:
        return kind != "table" or str(name).startswith("autocompile_")

    with database(url) as connection:
        options = {"include_object": ours, "compare_type": True, "version_table": "autocompile_version"}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), METADATA) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        pytest.param("autocompile_version", "newer autocompile.* found 9999; upgrade autocompile$", id="ours"),
        pytest.param("alembic_version", "Optuna's tables: .* found 9999; upgrade optuna", id="optuna's"),
    ],
)
def test_a_schema_from_the_future_is_refused(url: str, table: str, message: str) -> None:
    Storage.open(url).close()
    with database(url) as connection:
        connection.exec_driver_sql(f"UPDATE {table} SET version_num = '9999'")
    with pytest.raises(UserError, match=message):
        Storage.open(url)


def test_sqlite_writes_ahead(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/autocompile.db"
    Storage.open(url).close()
    with database(url) as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


# Databases that cannot be


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        pytest.param("studies.db", UserError, "expected sqlite:///FILE", id="a path is no URL"),
        pytest.param("sqlite:///", UserError, "kept in a file", id="no file"),
        pytest.param("sqlite:///:memory:", UserError, "kept in a file", id="memory is gone after a kill"),
        pytest.param("postgres://me:secret@host/x", UserError, "expected sqlite:///FILE", id="an old scheme"),
        pytest.param("sqlite:///x.db?timeout=soon", UserError, "expected a number of seconds, found", id="no time"),
        pytest.param("mysql://me:secret@host/x", UserError, "expected sqlite:///FILE", id="another database"),
        pytest.param("postgresql+psycopg://host:port/x", UserError, "expected sqlite:///FILE", id="a port in words"),
        pytest.param("sqlite:////proc/none/x.db", MachineError, "cannot make /proc/none", id="no right to the folder"),
        pytest.param(
            "postgresql+psycopg://me:secret@127.0.0.1:1/x", MachineError, "port 1 failed", id="nobody listens"
        ),
    ],
)
def test_bad_urls_are_one_line(url: str, kind: type[AutocompileError], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        Storage.open(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value) or "postgres://" in url


def test_a_missing_driver_is_named() -> None:
    if importlib.util.find_spec("psycopg2"):
        pytest.skip("psycopg2 is installed")
    with pytest.raises(MachineError, match="psycopg2 is not installed; pip install psycopg2"):
        Storage.open("postgresql+psycopg2://me@127.0.0.1/x")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("these are my notes, and they are long enough to be read as a header\n" * 9)
    with pytest.raises(MachineError, match=r"notes.txt: file is not a database$"):
        Storage.open(f"sqlite:///{tmp_path}/notes.txt")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "autocompile.db"
    with Storage.open(f"sqlite:///{file}") as storage:
        storage.create("study", SPEC, FACTS)
    pages = file.read_bytes()
    file.write_bytes(pages[:4096] + b"\xff" * (len(pages) - 4096))
    with pytest.raises(MachineError, match=r"autocompile.db: database disk image is malformed$"):
        Storage.open(f"sqlite:///{file}")


def test_a_full_or_broken_database_is_the_machines_failure(tmp_path: Path) -> None:
    with Storage.open(f"sqlite:///{tmp_path}/autocompile.db") as storage:
        storage.create("study", SPEC, FACTS)
        with database(f"sqlite:///{tmp_path}/autocompile.db") as connection:
            connection.exec_driver_sql("DROP TABLE study_directions")
            connection.exec_driver_sql("DROP TABLE autocompile_trials")
        with pytest.raises(MachineError, match=r"autocompile.db: no such table: autocompile_trials$"):
            storage.records("study")
        with pytest.raises(MachineError, match=r"autocompile.db: no such table: study_directions$"):
            storage.delete("study")


def test_whether_there_is_something_to_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/deep/autocompile.db"
    assert not exists(url)
    assert not (tmp_path / "deep").exists()
    Storage.open(url).close()
    assert exists(url)


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
filer:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0 /home/me/scratch xfs rw 0 0
//win/share /mnt/my\\040share cifs rw 0 0
me@host: /mnt/remote fuse.sshfs rw 0 0
systemd-1 /auto autofs rw 0 0
filer:/auto /auto nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        pytest.param("/data/studies", None, id="the root is local"),
        pytest.param("/home/me/studies", "nfs4", id="a home of a file server"),
        pytest.param("/home/me/scratch/studies", None, id="a local disk mounted in it"),
        pytest.param("/homework", None, id="a name that only begins alike"),
        pytest.param("/mnt/my share", "cifs", id="a blank in the mount point"),
        pytest.param("/mnt/remote/x", "fuse.sshfs", id="a remote shell"),
        pytest.param("/auto/x", "nfs", id="the later mount covers the earlier"),
    ],
)
def test_network_file_systems_are_recognised(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind
