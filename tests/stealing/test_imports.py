"""What a web process pays for recruiting: it loads no driver and no worker, and jobs load theirs in their thread."""

from fixtures.recruiting import RunProgram

HEAVY = {
    "alembic", "hiredis", "psycopg", "pyarrow", "pydantic", "pyspark", "redis", "rich", "structlog", "typer",
}  # fmt: skip


def test_a_web_process_that_enlists_loads_no_driver(run_program: RunProgram) -> None:
    lines = run_program(
        """
        import sys
        from penstock.engines.stealing import Recruiter

        recruiter = Recruiter()
        recruiter.install(lambda: None, "job", 0.5)
        for _ in range(100):
            recruiter.enlist()
        print(*{name.partition(".")[0] for name in sys.modules})
        print(*(name for name in sys.modules if name.startswith("penstock.")))
        """
    )

    assert not HEAVY & set(lines[0].split())
    assert "penstock.consuming" not in lines[1].split()


def test_a_place_needs_no_framework(run_program: RunProgram) -> None:
    lines = run_program(
        """
        import sys
        from penstock.engines.stealing import ASGIEnlister, WSGIEnlister, enlist_after_commit

        print(*sys.modules)
        """
    )

    assert not {"starlette", "fastapi", "flask", "django", "celery"} & set(lines[0].split())
