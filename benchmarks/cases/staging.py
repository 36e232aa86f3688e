"""What staging costs an application: a flush with the hooks, beside a flush without hooks plus one INSERT of the same rows."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

from sqlalchemy import insert
from sqlalchemy.orm import Session, sessionmaker

from benchmarks.application import NOTE, Movement, get_pipeline
from benchmarks.backlogs import ACCOUNTS, Scale
from benchmarks.measuring import Case, Figures
from benchmarks.servers import BenchServers
from penstock import stage_many
from penstock.database.connections import make_engine
from penstock.database.tables import staged_records

OBJECTS = (1, 10, 100, 1000)

FlushObjects = Callable[[Session, int], None]


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """One for each size of a flush, through the ORM and by hand."""
    found = []
    for way, with_penstock, without in (("orm", _orm, _orm_and_insert), ("core", _core, _core_and_insert)):
        for objects in OBJECTS:
            times = max(3, min(300, scale.records // 50 // objects))
            found.append(
                Case(
                    name=f"stage-{way}-{objects}",
                    unit="ms",
                    sentence=f"a flush of {objects} new rows ({way}) stages a record for each",
                    ours=partial(_time_flush, servers, with_penstock, objects, times, attached=True),
                    limits={"one INSERT more": partial(_time_flush, servers, without, objects, times, attached=False)},
                    better="less",
                )
            )
    return found


def _time_flush(servers: BenchServers, flush: FlushObjects, objects: int, times: int, *, attached: bool) -> Figures:
    """Milliseconds per flush; its transaction is rolled back, so that the tables do not change."""
    engine = make_engine(servers.database("staging"), application="bench")
    sessions = sessionmaker(engine)
    if attached:
        get_pipeline(4).attach(sessions)
    try:
        _flush_repeatedly(sessions, flush, objects, 3)
        return {"": _flush_repeatedly(sessions, flush, objects, times) * 1000 / times}
    finally:
        engine.dispose()


def _flush_repeatedly(sessions: sessionmaker[Session], flush: FlushObjects, objects: int, times: int) -> float:
    took = 0.0
    for _ in range(times):
        with sessions() as session:
            session.connection()
            began = perf_counter()
            flush(session, objects)
            took += perf_counter() - began
            session.rollback()
    return took


def _make_values(objects: int) -> list[dict[str, object]]:
    return [{"id": n, "account": n % ACCOUNTS, "cents": n % 977, "note": NOTE} for n in range(objects)]


def _orm(session: Session, objects: int) -> None:
    session.add_all(Movement(**values) for values in _make_values(objects))
    session.flush()


def _orm_and_insert(session: Session, objects: int) -> None:
    _orm(session, objects)
    _insert_records(session, objects)


def _core(session: Session, objects: int) -> None:
    _insert_rows(session, objects)
    stage_many(
        session,
        to=get_pipeline(4).channels["movements"],
        records=[
            {"key": v["account"], "action": "insert", "object": "movement", "data": v} for v in _make_values(objects)
        ],
    )


def _core_and_insert(session: Session, objects: int) -> None:
    _insert_rows(session, objects)
    _insert_records(session, objects)


def _insert_rows(session: Session, objects: int) -> None:
    """The option states that the records of these rows are staged by hand."""
    statement = insert(Movement).execution_options(penstock="staged")
    session.execute(statement, _make_values(objects))


def _insert_records(session: Session, objects: int) -> None:
    """What an application without hooks would write: the rows in one statement of SQLAlchemy."""
    session.connection().execute(
        insert(staged_records("penstock")),
        [
            {
                "channel": "movements",
                "shard": n % 4,
                "key": str(v["account"]),
                "action": "insert",
                "object": "movement",
                "data": v,
            }
            for n, v in enumerate(_make_values(objects))
        ],
    )
