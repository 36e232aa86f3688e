"""``trace`` and ``explain`` on the command line: what they take, print and exit with."""

import json

import psycopg

from fixtures.command_line import CommandLine
from penstock.database.connections import Connection

STAGE = (
    "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
    "VALUES ('things', 0, %s, 'insert', 'thing', '{\"secret\": 1}') RETURNING id"
)


def stage(connection: Connection, key: str = "k") -> str:
    [(record,)] = connection.execute(STAGE, [key]).fetchall()
    return str(record)


def test_a_record_is_found_by_id_key_and_place(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, "other")
    record = stage(connection, "7")
    penstock("stream", "--drain")

    shown_by = [
        penstock("trace", *words)
        for words in ([record], ["--key", "7"], ["things/0 offset 2"])
    ]  # fmt: skip
    as_json = penstock("trace", "--key", "7", "--json")
    missing = penstock("trace", "nothing")

    assert {each.stdout for each in shown_by} == {shown_by[0].stdout}
    assert f"record {record} of things/0, key 7, insert thing" in shown_by[0].stdout
    assert "things/0 offset 2" in shown_by[0].stdout
    assert "--key" in shown_by[0].stderr
    assert "secret" not in shown_by[0].stdout + as_json.stdout
    [story] = json.loads(as_json.stdout)
    assert (story["id"], story["offset"], story["published"]) == (int(record), 2, 2)
    assert [each.returncode for each in (*shown_by, missing)] == [0, 0, 0, 2]
    assert "nothing is known of the key 'nothing'" in missing.stderr


def test_the_trace_of_a_record_is_named(penstock: CommandLine, connection: Connection) -> None:
    given = {"traced": f"00-{'ab' * 16}-{'cd' * 8}-01", "hostile": "\x1b[31m", "number": 7}
    for key, traceparent in given.items():
        headers = json.dumps({"traceparent": traceparent})
        connection.execute(
            "UPDATE penstock.staged_records SET headers = %s WHERE id = %s", [headers, stage(connection, key)]
        )

    found = {key: json.loads(penstock("trace", "--key", key, "--json").stdout)[0]["trace_id"] for key in given}

    assert found == {"traced": "ab" * 16, "hostile": None, "number": None}
    assert f"trace       {'ab' * 16}" in penstock("trace", "--key", "traced").stdout


def test_a_place_of_a_source_is_no_key(penstock: CommandLine, connection: Connection) -> None:
    stage(connection)
    penstock("stream", "--drain")

    missing = penstock("trace", "things@eu/2 offset 5")
    key = penstock("trace", "--key", "things@eu/2 offset 5")

    assert "nothing is known of things@eu/2 offset 5" in missing.stderr
    assert "nothing is known of the key" in key.stderr


def test_explain_exits_with_1_until_the_record_is_applied(
    penstock: CommandLine, connection: Connection, database_url: str
) -> None:
    connection.execute("CREATE TABLE public.effects (id bigint)")
    with psycopg.connect(database_url, application_name="shop") as slow:
        record, pid = stage(slow), slow.info.backend_pid
        opened, shown = penstock("explain", record), penstock("explain", record, "--query")
    staged = penstock("explain", "k")
    penstock("stream", "--drain")
    penstock("consume", "reader", "--drain")
    applied, as_json = penstock("explain", "k"), penstock("explain", "k", "--json")

    assert [each.returncode for each in (opened, staged, applied, as_json)] == [1, 1, 0, 0]
    assert opened.stdout.startswith("open transaction: ")
    assert f"process {pid}, shop" in opened.stdout
    assert "secret" not in opened.stdout
    assert "INSERT INTO" in shown.stdout
    assert staged.stdout.startswith("not ticked: ")
    assert "fix: penstock stream" in staged.stdout
    assert applied.stdout.startswith("applied: ")
    assert json.loads(as_json.stdout)["cause"] == "applied"
