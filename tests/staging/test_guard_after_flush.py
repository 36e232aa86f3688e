"""The guard remembers statements that passed, but not those that only the unit of work may send."""

import pytest
from sqlalchemy.orm import Session, sessionmaker

from fixtures.application import Ride, StagedRecords
from penstock import Log, Pipeline
from penstock.errors import BypassedStaging


@pytest.mark.filterwarnings("ignore:.*:sqlalchemy.exc.SADeprecationWarning")
def test_a_bulk_update_is_refused_after_the_same_update_by_a_flush(
    pipeline: Pipeline, rides: Log, sessions: sessionmaker[Session], staged: StagedRecords
) -> None:
    """Guarantee 7: the two send the same text on the same connection."""
    pipeline.stages(Ride, to=rides, key="id", data=["id", "status"])
    with sessions.begin() as session:
        session.add_all([Ride(id=1), Ride(id=2)])
    with sessions() as session:
        ride = session.get_one(Ride, 1)
        ride.status = "done"
        session.flush()
        with pytest.raises(BypassedStaging, match="Ride"):
            session.bulk_update_mappings(Ride.__mapper__, [{"id": 2, "status": "bypassed"}])

    assert len(staged()) == 2
