"""What mypy and pyright accept can be declared; what they refuse is in ``refused.py``.

There each wrong line has a ``type: ignore``, and one that is not needed is an error to both checkers: a handler that is
wrongly accepted fails lint.  Pyright needs 280 MB with its Node.js and is not in the lock: ``pip install basedpyright``.
"""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from penstock import Log, Pipeline, Record

HERE = Path(__file__).parent
PYRIGHT = shutil.which("basedpyright") or shutil.which("pyright")


def test_what_is_accepted_can_be_declared() -> None:
    runpy.run_path(str(HERE / "accepted.py"))


def test_the_consumer_of_a_method_is_found_by_it() -> None:
    class Totals:
        def apply(self, session: Session, records: Sequence[Record]) -> None: ...

    totals, rides = Totals(), Log("rides")
    pipeline = Pipeline([rides])
    pipeline.consumer(reads=rides, name="totals")(totals.apply)
    pipeline.reconciliation(of=totals.apply, state="public.totals")(lambda _: "SELECT")

    assert pipeline.get_reconciliation("totals").consumer.handler == totals.apply


@pytest.mark.skipif(PYRIGHT is None, reason="no pyright: pip install basedpyright")
@pytest.mark.xfail(reason="record.payload is Any to pyright: its function takes Record[Any]")
def test_pyright_agrees() -> None:
    assert PYRIGHT is not None
    ended = subprocess.run(
        [PYRIGHT, "--project", HERE, "--pythonpath", sys.executable, "--outputjson"], capture_output=True, check=False
    )
    found: list[dict[str, Any]] = json.loads(ended.stdout)["generalDiagnostics"]

    assert [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']}" for each in found
    ] == []
