"""Places for studies: each kind opens, keeps and is read by plain Optuna; one that cannot be used says why."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sqlalchemy import event, text
from support.strategies import examples
from support.tuner_replays import LARGE, NAME, SMALL, assert_complete, plan_of, run, trials_in

from embforge.codegen.params import params_from
from embforge.tuner.judge.outcome import Timed
from embforge.tuner.study.storage import StorageError, default_url, masked, open_storage

PLAIN: dict[str, Callable[[Path], BaseStorage]] = {
    "studies.sqlite3": lambda path: RDBStorage(f"sqlite:///{path}"),
    "journal://studies.log": lambda path: JournalStorage(JournalFileBackend(str(path))),
}
"""By the URL that embforge takes: how a program without embforge opens the same storage with Optuna alone."""
SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("url", PLAIN)
def test_plain_optuna_reads_a_study(url: str, tmp_path: Path) -> None:
    """Parameters, values, states and user attributes are Optuna's own, so that optuna-dashboard shows them."""
    assert run(trials_in(url, SMALL), SMALL) == len(SMALL.points)
    outcomes = assert_complete(url, SMALL)
    study = optuna.load_study(study_name=NAME, storage=PLAIN[url](tmp_path / url.removeprefix("journal://")))
    assert [trial.number for trial in study.trials] == list(range(len(SMALL.points)))
    for trial in study.trials:
        params, outcome = outcomes[trial.number]
        assert params_from("cpu", trial.params) == params_from("cpu", trial.user_attrs["params"]) == params
        assert trial.user_attrs["uri"] == plan_of(params).uri
        assert trial.user_attrs["seconds"].keys() == {"compiling", "verifying", "timing"}
        assert trial.user_attrs["build"] == {"cached": True, "binary_bytes": 0, "resources": []}
        timed = isinstance(outcome, Timed)
        assert trial.state == (TrialState.COMPLETE if timed else TrialState.FAIL)
        assert trial.values == ([outcome.score] if isinstance(outcome, Timed) else None)
    best = min((o.score, params) for params, o in outcomes.values() if isinstance(o, Timed))
    assert (study.best_value, params_from("cpu", study.best_params)) == best


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:///relative.db", "relative.db"),
        ("deep/er/studies", "deep/er/studies"),
        ("50% {of} what?.db", "50% {of} what?.db"),
        ("a%20b.db", "a%20b.db"),
        ("journal://deep/{er}.log", "deep/{er}.log"),
    ],
)
def test_a_file_has_the_name_that_was_given(url: str, file: str, tmp_path: Path) -> None:
    trials_in(url, SMALL)
    assert (tmp_path / file).stat().st_size > 0
    assert trials_in(url, SMALL).outcomes() == {}


def test_the_default_url_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EMBFORGE_STUDIES", raising=False)
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "tuned"))
    assert default_url() == str(tmp_path / "tuned" / "studies.sqlite3")
    monkeypatch.setenv("EMBFORGE_STUDIES", "journal://mine.log")
    open_storage()
    assert (tmp_path / "mine.log").exists() and not (tmp_path / "tuned").exists()


HERE = "postgresql+psycopg://127.0.0.1:1/db"
NOT_A_URL = "not a URL of a storage; allowed: a SQLite file, sqlite:///FILE, postgresql"
UNUSABLE = "check that it exists and can be written, or name another by --storage or EMBFORGE_STUDIES"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("foo://x", NOT_A_URL),
        ("://", NOT_A_URL),
        (f"redis://u:{SECRET}@h", NOT_A_URL),
        (f"postgresql+psycopg://u:{SECRET}@h:port/db", NOT_A_URL),
        (f"mysql://u:{SECRET}@h/db", "no driver for mysql (MySQLdb); pip install 'mysqlclient'"),
        (f"postgresql+psycopg2://u:{SECRET}@h/db", "(psycopg2); pip install 'psycopg2-binary'"),
        (f"mysql+broken://u:{SECRET}@h/db", NOT_A_URL),
        (f"postgresql+psycopg://u:{SECRET}@127.0.0.1:1/db", UNUSABLE),
        (f"postgresql+psycopg://u:{SECRET} {SECRET}@127.0.0.1:1/db", UNUSABLE),
        (f"postgresql+psycopg://u:{{{SECRET}}}@127.0.0.1:1/db", UNUSABLE),
        (f"postgresql+psycopg://u:x@{SECRET}@127.0.0.1:1/db", "write an @ of the password as %40"),
        (f"{HERE}?password={SECRET}&user=u", UNUSABLE),
        ("/proc/nowhere/studies.sqlite3", UNUSABLE),
        ("folder", UNUSABLE),
        ("text", "file is not a database"),
        ("journal:///proc/nowhere/studies.log", UNUSABLE),
        ("journal://folder", UNUSABLE),
        ("journal://text", "not a journal of studies; name another file"),
        ("journal://numbers", "not a journal of studies; name another file"),
        ("journal://objects", "not a journal of studies; name another file"),
        ("journal://bytes", "not a journal of studies; name another file"),
    ],
)
def test_a_storage_that_cannot_be_used_is_an_error_with_the_remedy(
    url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("MySQLdb", "psycopg2"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("Dear diary,\nyesterday " + "I waited. " * 100 + "\nyours\n")
    (tmp_path / "numbers").write_text("1\n2\n3\n")
    (tmp_path / "objects").write_text('{"a": 1}\n{"a": 1}\n')
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 2)
    with pytest.raises(StorageError) as caught:
        open_storage(url)
    assert why in str(caught.value) and "\n" not in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_broken_database_driver_is_an_error_that_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pymysql.py").write_text("raise ImportError('libmysql.so is not there')\n")
    monkeypatch.delitem(sys.modules, "pymysql", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StorageError, match=r"libmysql\.so is not there"):
        open_storage("mysql+pymysql://h/db")


def test_a_server_that_does_not_answer_is_asked_once() -> None:
    """A connection may take minutes to fail."""
    asked = 0

    def refuse(server: socket.socket) -> None:
        nonlocal asked
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return
            asked += 1

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse, args=(server,))
        thread.start()
        with pytest.raises(StorageError, match="cannot be used"):
            # Without TLS and GSS: libpq tries again without them by itself.
            open_storage(
                f"postgresql+psycopg://127.0.0.1:{server.getsockname()[1]}/db?sslmode=disable&gssencmode=disable"
            )
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert asked == 1


@contextmanager
def powerless() -> Iterator[Path]:
    """A folder, in a process whose user is not root: root may write to any file."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        if os.geteuid() != 0:
            yield Path(name)
            return
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_a_read_only_file_is_refused_with_the_remedy() -> None:
    open_storage("warm.sqlite3")  # what is imported late is imported now: `nobody` may not read it
    with powerless() as folder:
        file = folder / "studies.sqlite3"
        open_storage(str(file))
        file.chmod(stat.S_IRUSR)
        with pytest.raises(StorageError, match=r"readonly database.*or name another by --storage"):
            open_storage(str(file))
        file.chmod(stat.S_IRUSR | stat.S_IWUSR)
        assert trials_in(str(file), SMALL).outcomes() == {}


PASSWORDS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r"), min_size=6)


@examples(60)
@given(PASSWORDS, st.sampled_from(["", "user", "us er"]))
def test_no_password_is_shown(password: str, user: str) -> None:
    """Wherever in the text the password is, and also if it has characters that are not allowed in a URL."""
    shown = masked(f"cannot connect to postgresql://{user}:{password}@host/name now")
    assert shown == f"cannot connect to postgresql://{user}:***@host/name now"
    plain = "".join(c for c in password if c.isalnum())
    assert masked(f"postgresql://host/name?PASSWORD={plain}&a=b") == "postgresql://host/name?PASSWORD=***&a=b"


def test_text_without_a_password_is_not_changed() -> None:
    for text_ in ("sqlite:////tmp/a.db", "/tmp/a.db", "postgresql://host:5432/name", "journal:///a/b", "u@host"):
        assert masked(text_) == text_


@pytest.mark.parametrize("left", [1, 20, -2, -1])
def test_an_unfinished_line_of_a_journal_loses_no_trial(left: int, tmp_path: Path) -> None:
    """After a process was killed while writing, the next one must not continue the unfinished line with its own."""
    url, file = "journal://studies.log", tmp_path / "studies.log"
    assert run(trials_in(url, SMALL), SMALL, most=4) == 4
    whole = file.read_bytes()
    last = whole[whole[:-1].rfind(b"\n") + 1 :]
    file.write_bytes(whole + last[:left])
    before = trials_in(url, SMALL).outcomes()
    assert len(before) == 4
    run(trials_in(url, SMALL), SMALL)
    assert before.items() <= assert_complete(url, SMALL).items()


def test_a_long_unfinished_line_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "studies.log"
    file.write_bytes(b"x" * 200_000)
    assert run(trials_in("journal://studies.log", SMALL), SMALL) == len(SMALL.points)
    assert_complete("journal://studies.log", SMALL)
    assert file.read_bytes().startswith(b"{")


def test_a_trial_takes_as_many_reads_with_200_trials_as_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither statements nor trials read from the database grow with the number of trials in it."""
    trials = trials_in("studies.sqlite3", LARGE)
    backend = trials.study._storage._backend  # type: ignore[attr-defined]
    statements = read = 0
    build = RDBStorage._build_frozen_trial_from_trial_model

    def count(*_: object) -> None:
        nonlocal statements
        statements += 1

    def counted(self: RDBStorage, trial: object) -> optuna.trial.FrozenTrial:
        nonlocal read
        read += 1
        return build(self, trial)  # type: ignore[arg-type]

    event.listen(backend.engine, "before_cursor_execute", count)
    monkeypatch.setattr(RDBStorage, "_build_frozen_trial_from_trial_model", counted)

    def cost() -> tuple[int, int]:
        nonlocal statements, read
        statements = read = 0
        assert run(trials, LARGE, most=10) == 10
        return statements, read

    few = cost()
    with backend.engine.begin() as connection:  # 200 copies of the first trial
        for number in range(10, 210):
            new = connection.execute(
                text(
                    "insert into trials (number, study_id, state, datetime_start) "
                    f"select {number}, study_id, state, datetime_start from trials where number = 0 returning trial_id"
                )
            ).scalar_one()
            for table, columns in {
                "trial_params": "param_name, param_value, distribution_json",
                "trial_values": "objective, value, value_type",
                "trial_user_attributes": "key, value_json",
            }.items():
                connection.execute(
                    text(
                        f"insert into {table} (trial_id, {columns}) select {new}, {columns} from {table} "
                        "where trial_id = (select trial_id from trials where number = 0)"
                    )
                )
    assert len(trials.outcomes()) == 210
    many = cost()
    assert many[0] <= few[0] + 10 and many[0] / 10 < 80
    assert many[1] <= few[1] and many[1] / 10 < 10
