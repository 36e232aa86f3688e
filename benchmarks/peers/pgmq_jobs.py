# /// script
# requires-python = ">=3.11"
# dependencies = ["pgmq==1.1.4", "psycopg[binary]>=3.2"]
#
# [tool.penstock]
# works = ["jobs"]
# ///
"""pgmq: messages that need nothing, read with a visibility timeout and deleted, 100 at a time."""

import json
import os
from time import perf_counter, process_time

import psycopg
from pgmq.install import get_embedded_install_sql

COUNT = int(os.environ["PEER_RECORDS"])
AT_ONCE = 100

if __name__ == "__main__":
    with psycopg.connect(os.environ["PEER_DATABASE_URL"], autocommit=True) as connection:
        connection.execute("CREATE SCHEMA pgmq")
        connection.execute(get_embedded_install_sql().encode())
        connection.execute("SELECT pgmq.create('bench')")
        payload = json.dumps({"note": "x" * 200})
        connection.execute("SELECT pgmq.send_batch('bench', array_fill(%s::jsonb, ARRAY[%s]))", [payload, COUNT])
        began, processor, done = perf_counter(), process_time(), 0
        while ids := [row[0] for row in connection.execute("SELECT msg_id FROM pgmq.read('bench', 30, %s)", [AT_ONCE])]:
            connection.execute("SELECT pgmq.delete('bench', %s::bigint[])", [ids])
            done += len(ids)
        took, busy = perf_counter() - began, process_time() - processor
    if done != COUNT:
        raise SystemExit(f"{done} of {COUNT} messages were done")
    print(json.dumps({"": COUNT / took, "-cpu": busy / COUNT * 1e6}))
