"""The log's format as the reference has it: its JavaScript reads what Penstock writes, without Penstock."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from fixtures.documents import ROOT
from fixtures.flow import Publish, Site
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList
from penstock.records import Record, Shard, ShardName

PAGE = ROOT / "docs" / "reference" / "log-format.md"

BLOCKS = re.findall(r"```javascript\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

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
def test_the_pages_javascript_reads_the_log(site: Site, publish: Publish, tmp_path: Path) -> None:
    publish(100)
    site.connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)"
        """ VALUES ('things', 0, E'a\\n"ü\\t', 'upd\\ate', 'ö', '{"text": "a\\nb"}', '{"trace": "1"}')"""
    )
    publish(3, "later")
    function, _ = BLOCKS
    script = tmp_path / "read.js"
    script.write_text(function + READ)
    path = site.client.connection_pool.connection_kwargs["path"]

    for shard, records in site.log().items():
        key = f"penstock:{{{shard}}}:log"
        done = subprocess.run(["node", str(script), path, key], capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout) == [as_javascript(record) for record in records]


LIST = """
import { createClient } from "redis";
const client = createClient({ socket: { path: process.argv[2], tls: false } });
await client.connect();
console.log(JSON.stringify(await dirtyMembers(client, process.argv[3])));
await client.close();
"""


def test_the_pages_javascript_lists_what_an_ick_has_not_done(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Dirty, reserved, reserved under a number, and dirty again: each once, since it became dirty first."""
    node, modules = shutil.which("node"), ROOT / ".venv" / "node" / "node_modules"
    if node is None or not (modules / "redis").is_dir():
        pytest.skip("there is no Node.js with redis: npm install --prefix .venv/node redis")
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "list.mjs").write_text(BLOCKS[1] + LIST)
    keys = ick_shard_keys("penstock", ShardName("documents", Shard(1)))
    dirty = DirtyList(redis_client, keys.name)
    dirty.add({"é first": 1.5, "second": 2.0, "third": 3.25})
    reserved = dirty.reserve(2)
    redis_client.zadd(keys.ick.held, {"held": 2.5})
    dirty.add({"second": 9.0})
    path = redis_client.connection_pool.connection_kwargs["path"]

    command = [node, str(tmp_path / "list.mjs"), path, "documents/1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert [*reserved] == [("é first".encode(), 1.5), (b"second", 2.0)]
    assert json.loads(done.stdout) == [["é first", 1.5], ["second", 2], ["held", 2.5], ["third", 3.25]]


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
