"""doctor warns of a connection to Postgres across a network that nobody verifies."""

import pytest

from fixtures.inspecting import Diagnose
from penstock.operating.doctor.database_checks import examine_encryption


@pytest.mark.parametrize(
    ("host", "mode", "encrypted", "grade", "said"),
    [
        ("/var/run/postgresql", "prefer", False, "ok", "this machine"),
        ("localhost", "prefer", False, "ok", "this machine"),
        ("127.0.0.1", "prefer", False, "ok", "this machine"),
        ("::1", "prefer", False, "ok", "this machine"),
        ("db.example.com", "prefer", False, "warning", "not encrypted"),
        ("10.0.0.1", "prefer", True, "warning", "verifies no certificate"),
        ("db.example.com", "require", True, "warning", "sslmode=require"),
        ("db.example.com", "verify-ca", True, "ok", "verified"),
        ("db.example.com", "verify-full", True, "ok", "verified"),
    ],
)
def test_a_connection_across_a_network_is_to_be_verified(
    host: str, mode: str, grade: str, said: str, *, encrypted: bool
) -> None:
    result = examine_encryption(host, mode, encrypted=encrypted)

    assert (result.grade, said in result.message) == (grade, True)


def test_doctor_examines_its_own_connection(diagnosed: Diagnose) -> None:
    [result] = diagnosed("encryption", pipeline=None)

    assert (result.grade, result.message) == ("ok", "Postgres is on this machine")
