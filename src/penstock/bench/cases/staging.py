"""What staging costs an application: a flush with the hooks, beside one without them and one INSERT of the same rows."""

from collections.abc import Callable
from time import perf_counter

from sqlalchemy import insert
from sqlalchemy.orm import Session, sessionmaker

from penstock import stage_many
from penstock.bench.application import NOTE, Movement, pipeline_of
from penstock.bench.measuring import Case, Sample
from penstock.bench.plant import ACCOUNTS, Plant, Scale
from penstock.database.connections import make_engine
from penstock.database.tables import staged_records

OBJECTS = (1, 10, 100, 1000)

Flush = Callable[[Session, int], None]


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """One for each size of a flush, through the ORM and by hand."""
    found = []
    for way, with_penstock, without in (
        ("orm", _orm, _orm_and_insert),
        ("core", _core, _core_and_insert),
    ):
        for objects in OBJECTS:
            times = max(3, min(300, scale.records // 50 // objects))
            found.append(
                Case(
                    name=f"stage-{way}-{objects}",
                    unit="ms",
                    sentence=f"a flush of {objects} new rows ({way}) stages a record for each",
                    ours=lambda f=with_penstock, n=objects, t=times: _timed(plant, f, n, t, True),  # type: ignore[misc]  # bound now
                    limits={
                        "one INSERT more": lambda f=without, n=objects, t=times: _timed(  # type: ignore[misc]  # the same
                            plant, f, n, t, False
                        )
                    },
                    better="less",
                )
            )
    return found


def _timed(plant: Plant, flush: Flush, objects: int, times: int, attached: bool) -> Sample:  # noqa: FBT001
    """Milliseconds a flush; its transaction is rolled back, so that the tables stay as they are."""
    engine = make_engine(plant.database("staging"), application="bench")
    sessions = sessionmaker(engine)
    if attached:
        pipeline_of(4).attach(sessions)
    try:
        _flushes(sessions, flush, objects, 3)
        return {"": _flushes(sessions, flush, objects, times) * 1000 / times}
    finally:
        engine.dispose()


def _flushes(sessions: sessionmaker[Session], flush: Flush, objects: int, times: int) -> float:
    took = 0.0
    for _ in range(times):
        with sessions() as session:
            session.connection()
            began = perf_counter()
            flush(session, objects)
            took += perf_counter() - began
            session.rollback()
    return took


def _values(objects: int) -> list[dict[str, object]]:
    return [
        {"id": n, "account": n % ACCOUNTS, "cents": n % 977, "note": NOTE} for n in range(objects)
    ]


def _orm(session: Session, objects: int) -> None:
    session.add_all(Movement(**values) for values in _values(objects))
    session.flush()


def _orm_and_insert(session: Session, objects: int) -> None:
    _orm(session, objects)
    _insert_records(session, objects)


def _core(session: Session, objects: int) -> None:
    _insert_rows(session, objects)
    stage_many(
        session,
        pipeline_of(4).channels["movements"],
        [
            {"key": v["account"], "action": "insert", "object": "movement", "data": v}
            for v in _values(objects)
        ],
    )


def _core_and_insert(session: Session, objects: int) -> None:
    _insert_rows(session, objects)
    _insert_records(session, objects)


def _insert_rows(session: Session, objects: int) -> None:
    """A statement on a class with rules says that its records are staged by hand."""
    statement = insert(Movement).execution_options(penstock="staged")
    session.execute(statement, _values(objects))


def _insert_records(session: Session, objects: int) -> None:
    """What somebody would write who has no hooks: the rows in one statement of SQLAlchemy."""
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
            for n, v in enumerate(_values(objects))
        ],
    )
