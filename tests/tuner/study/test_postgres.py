"""Studies in a real PostgreSQL: processes share them, a killed search continues, no message has a password."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import optuna
import psycopg
import pytest
from support.tuner_replays import NAME, SMALL, assert_complete, assert_shared, assert_survives, run, trials_in

from embforge.tuner.study.storage import StorageError, masked, open_storage
from embforge.tuner.study.study import Screening, SearchEvent

PASSWORD = "s3cr3t/{of}: 100%"
IN_URL = "s3cr3t%2F%7Bof%7D%3A%20100%25"
NOT_HERE = "no PostgreSQL server on this machine"


@dataclass(frozen=True)
class Server:
    """A server for these tests, which only this machine reaches."""

    programs: Path
    folder: Path
    port: int
    user: str | None
    """The user that runs it, if not the current one: PostgreSQL refuses root."""

    def url(self, database: str, password: str = IN_URL) -> str:
        return f"postgresql+psycopg://tester:{password}@127.0.0.1:{self.port}/{database}"

    def database(self, name: str) -> str:
        """A new one's URL."""
        login = {"host": "127.0.0.1", "port": self.port, "user": "tester", "password": PASSWORD, "dbname": "postgres"}
        with psycopg.connect(**login, autocommit=True) as connection:  # type: ignore[arg-type]
            connection.execute(f"create database {name}".encode())
        return self.url(name)

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k '' -F"
        self.call("pg_ctl", "-D", "data", "-o", options, "-l", "log", "-w", "start")

    def stop(self) -> None:
        self.call("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.folder,
            user=self.user,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe would stay open as long as the server
        )


def programs() -> Path | None:
    """Where initdb and pg_ctl are; Debian keeps them off the path."""
    found = [Path(path).resolve().parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in found if (f / "initdb").exists() and (f / "pg_ctl").exists()), None)


def unprivileged() -> str | None:
    """The user that runs the server if the tests run as root, which PostgreSQL refuses; otherwise None."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if (found := programs()) is None:
        pytest.skip(NOT_HERE)
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        server = Server(found, Path(name), port, unprivileged())
        if server.user is not None:
            shutil.chown(name, server.user)
        (server.folder / "password").write_text(PASSWORD)
        (server.folder / "password").chmod(0o644)
        server.call(
            "initdb",
            "-D",
            "data",
            "-U",
            "tester",
            "--auth=scram-sha-256",
            "--pwfile=password",
            "--no-sync",
            "-E",
            "UTF8",
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_a_study(server: Server, tmp_path: Path, processes: int) -> None:
    """They also make its tables, all at once."""
    assert_shared(server.database(f"shared{processes}"), SMALL, tmp_path / "log", processes)


def test_a_killed_search_continues_where_it_was(server: Server, tmp_path: Path) -> None:
    assert_survives(server.database("killed"), SMALL, tmp_path / "log", ["just finished", "being measured"])


def test_plain_optuna_reads_a_study(server: Server) -> None:
    url = server.database("plain")
    assert run(trials_in(url, SMALL), SMALL) == len(SMALL.points)
    outcomes = assert_complete(url, SMALL)
    study = optuna.load_study(study_name=NAME, storage=url.replace("{", "{{"))
    assert study.best_params == {key: study.best_trial.user_attrs["params"][key] for key in study.best_params}
    assert [trial.user_attrs["outcome"]["kind"] for trial in study.trials] == [o.kind for _, o in outcomes.values()]


def test_a_server_that_goes_away_costs_no_finished_trial(server: Server) -> None:
    url = server.database("gone")
    trials = trials_in(url, SMALL)

    def stop(event: SearchEvent) -> None:
        if isinstance(event, Screening) and event.number == 5:
            server.stop()

    with pytest.raises(StorageError, match=r"study study: cannot be used: .*name another by --storage") as caught:
        run(trials, SMALL, progress=stop)
    assert_hidden(caught.value)
    with pytest.raises(StorageError, match=r"cannot be used: .*refused") as caught:
        open_storage(url)
    assert_hidden(caught.value)
    server.start()
    before = trials.outcomes()  # the old connections are broken, so new ones are made
    assert len(before) == 5
    # This process lives and could not give its trials back, so they stay claimed.
    left = len(SMALL.points) - 5 - 3
    assert run(trials_in(url, SMALL), SMALL) == left
    assert before.items() <= trials_in(url, SMALL).outcomes().items()


@pytest.mark.parametrize(
    ("database", "password", "why"),
    [("postgres", "wr0ng-s3cr3t", "password authentication failed"), ("nowhere", IN_URL, "does not exist")],
)
def test_a_refused_connection_is_an_error_with_the_servers_reason(
    server: Server, database: str, password: str, why: str
) -> None:
    url = server.url(database, password)
    with pytest.raises(StorageError, match=why) as caught:
        open_storage(url)
    assert masked(url) in str(caught.value)
    assert_hidden(caught.value)


def assert_hidden(error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    assert "s3cr3t" not in text
