"""The log's format as the reference has it: its JavaScript reads what Penstock writes, without Penstock."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.records import Record, ShardName
from penstock.streaming import Streamer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "log-format.md"

# Speaks to Redis by itself: a page about a format should not need a library.
READ = """
const net = require("node:net");
const [path, key] = process.argv.slice(2);
const command = ["XRANGE", key, "-", "+"];
const socket = net.connect(path, () => {
  socket.write(`*${command.length}\\r\\n` + command.map((each) => `$${Buffer.byteLength(each)}\\r\\n${each}\\r\\n`).join(""));
});
let reply = Buffer.alloc(0);
function parse(at) {
  const end = reply.indexOf("\\r\\n", at);
  if (end < 0) throw new RangeError();
  const size = Number(reply.toString("utf8", at + 1, end));
  if (reply[at] === 36) {
    if (reply.length < end + 4 + size) throw new RangeError();
    return [reply.toString("utf8", end + 2, end + 2 + size), end + 4 + size];
  }
  const values = [];
  let next = end + 2;
  for (let place = 0; place < size; place++) {
    const [value, after] = parse(next);
    values.push(value);
    next = after;
  }
  return [values, next];
}
socket.on("data", (some) => {
  reply = Buffer.concat([reply, some]);
  try {
    const [entries] = parse(0);
    socket.end();
    const found = entries.flatMap(([id, fields]) => {
      const entry = {};
      for (let place = 0; place < fields.length; place += 2) entry[fields[place]] = fields[place + 1];
      return records(id, entry);
    });
    console.log(JSON.stringify(found, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
  }
});
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js")
def test_the_pages_javascript_reads_the_log(
    connection: Connection,
    streamer: Streamer,
    things: Log,
    logged: Callable[[Log], dict[ShardName, list[Record]]],
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    stage_rows(connection, things, 100)
    streamer.drain()
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)"
        """ VALUES ('things', 0, E'a\\n"ü\\t', 'upd\\ate', 'ö', '{"text": "a\\nb"}', '{"trace": "1"}')"""
    )
    stage_rows(connection, things, 3, "later")
    streamer.drain()
    [function] = re.findall(r"```javascript\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "read.js"
    script.write_text(function + READ)
    path = redis_client.connection_pool.connection_kwargs["path"]

    for shard, records in logged(things).items():
        key = f"penstock:{{{shard}}}:log"
        done = subprocess.run(["node", str(script), path, key], capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout) == [as_javascript(record) for record in records]


def as_javascript(record: Record) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "id": record.id,
        "key": record.key,
        "action": record.action,
        "object": record.object,
        "data": record.data,
        "headers": record.headers,
        "staged_us": record.staged_us,
    }
