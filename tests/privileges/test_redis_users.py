"""The users of Redis: each command of theirs works on their keys, and no other does."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

from fixtures.clients import RedisClient, connect_redis
from fixtures.command_line import CommandLine
from fixtures.damage import restart
from fixtures.roles import UrlFor
from fixtures.servers import Programs
from fixtures.topologies import Cluster
from penstock import Log, Pipeline
from penstock.channels.acl import COMMANDS, acl_grant, acl_lines, find_users, save_users
from penstock.channels.log.streams import extents, read_newest
from penstock.clients import LogReader, LogWriter
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.embedded import EmbeddedRedis
from penstock.errors import AppendRefused, InvalidName
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose
from penstock.streaming import Streamer

LUA = Path(__file__).parents[2] / "lua"
LOG, EPOCH = "penstock:{things/0}:log", "penstock:{things/0}:epoch"
DIRTY = "penstock:{index/0}:ick/ick/{penstock:{index/0}:ick}/pset"

ENTRY = "XADD {} * id 1"
FORBIDDEN = {
    "everyone": [
        "FLUSHALL",
        "KEYS *",
        "CONFIG GET requirepass",
        "CONFIG SET maxmemory 1",
        "ACL LIST",
        "CLIENT LIST",
        "SHUTDOWN NOSAVE",
        "SCRIPT FLUSH",
        "FUNCTION FLUSH",
        "REPLICAOF NO ONE",
        "SUBSCRIBE c",
        "EVAL return(1) 0",
        "GET other",
        "GET penstock2:{things/0}:epoch",
        "SET penstock:free x",
    ],
    "owner": ["EVAL return(1) 0"],
    "streamer": [f"RENAME {LOG} {EPOCH}"],
    "consumer": [ENTRY.format(LOG), f"DEL {LOG}", f"SET {EPOCH} 9", f"DEL {EPOCH}", f"XTRIM {LOG} MAXLEN 0", "INFO"],
    "viewer": [
        ENTRY.format(LOG),
        f"DEL {LOG}",
        f"SET {EPOCH} 9",
        f"ZADD {DIRTY} 1 m",
        f"ZREM {DIRTY} m",
        f"HSET {DIRTY} a b",
    ],
}
ALLOWED = {
    "owner": [f"XADD {LOG} 5-0 id 1", f"RENAME {LOG} {LOG}", f"DEL {LOG}"],
    "streamer": [
        f"XADD {LOG} 5-0 id 1",
        f"XTRIM {LOG} MINID 3-0",
        f"SET {EPOCH} 2",
        f"ZADD {DIRTY} 1 m",
        "INFO memory",
    ],
    "consumer": [
        f"XREAD COUNT 1 STREAMS {LOG} 0",
        f"XRANGE {LOG} - +",
        f"XRANGE {LOG}-before-2 - +",  # `penstock reset source`
        f"GET {EPOCH}",
        f"ZADD {DIRTY} 1 m",
        f"ZREM {DIRTY} m",
    ],
    "viewer": [f"XREVRANGE {LOG} + - COUNT 1", f"ZRANGE {DIRTY} 0 -1", f"PTTL {LOG}", "INFO memory"],
}


@pytest.mark.parametrize("user", COMMANDS)
def test_each_user_may_send_its_own_commands_and_no_others(
    user: str, redis_url_for: UrlFor, redis_client: redis.Redis
) -> None:
    """Guarantee 32."""
    redis_client.xadd(LOG, {"id": "1"}, "1-0")
    with redis.Redis.from_url(redis_url_for(user)) as client:
        for line in ALLOWED[user]:
            client.execute_command(*line.split())
        for line in (*FORBIDDEN["everyone"], *FORBIDDEN[user]):
            with pytest.raises(redis.ResponseError, match=r"(?i)no permissions"):
                client.execute_command(*line.split())


def test_a_script_gives_its_caller_no_rights(redis_url_for: UrlFor, redis_client: redis.Redis) -> None:
    """A consumer may call scripts on the keys of a log; what they do to it is still checked."""
    sha = redis_client.script_load("return redis.call('DEL', KEYS[1])")
    redis_client.xadd(LOG, {"id": "1"}, "1-0")
    for user in ("consumer", "viewer"):
        with (
            redis.Redis.from_url(redis_url_for(user)) as client,
            pytest.raises(redis.ResponseError, match=r"(?i)acl failure|permissions|can't"),
        ):
            client.evalsha(sha, 1, LOG)

    assert redis_client.exists(LOG)


def test_a_log_is_read_by_every_user_and_written_by_those_of_streamers(redis_url_for: UrlFor) -> None:
    with LogWriter.connect(redis_url_for("streamer"), "things") as writer:
        writer.append([1, 2, 3], token="a", keep_at_least=3)
        writer.append([4], token="b")
        writer.evict(upto=3)
    for user in COMMANDS:
        with LogReader.connect(redis_url_for(user), "things") as reader:
            found = reader.read(0, 3, 5, block_s=1)
            assert [record and record.data for record in found] == [None, 4]
            assert reader.read(0, 5, block_s=0.01).info.last == 4
            assert reader.offset_at(found.records[0].staged_at) == 4
    for user in ("consumer", "viewer"):
        with (
            LogWriter.connect(redis_url_for(user), "things") as writer,
            pytest.raises(AppendRefused, match=r"(?i)permissions|acl|can't run"),
        ):
            writer.append([5])


def test_the_owner_may_call_all_that_the_scripts_call() -> None:
    called = {
        name.lower()
        for path in LUA.rglob("*.lua")
        # Structures are an application's own, with the rights that their page names and a test of it tries.
        if path.parent.name not in {"volatile", "pinned", "tracker"}
        for name in re.findall(r'redis\.call\("(\w+)"', path.read_text())
    } | {"del"}  # delete.lua: an Ick of a pipeline is never deleted
    granted = {rule.lstrip("+").partition("|")[0] for rule in COMMANDS["owner"].split()}

    assert called - granted == set()


def test_the_lines_restore_what_a_user_may_and_keep_the_password(
    redis_client: RedisClient, redis_url_for: UrlFor
) -> None:
    """What a user may do beyond them, since an earlier release or by hand, it may not do any more."""
    before = redis_client.execute_command("ACL", "GETUSER", "penstock_consumer")
    for more in ("~other", "+keys", "&channel", "(~another +get)"):
        redis_client.execute_command("ACL", "SETUSER", "penstock_consumer", more)
    assert redis_client.execute_command("ACL", "GETUSER", "penstock_consumer") != before

    for line in acl_lines("penstock", "penstock", "setuser"):
        redis_client.execute_command(line)

    assert redis_client.execute_command("ACL", "GETUSER", "penstock_consumer") == before
    with redis.Redis.from_url(redis_url_for("consumer")) as client:
        assert client.ping()


def test_without_a_password_nobody_can_log_in(redis_client: RedisClient, redis_url: str) -> None:
    [line] = [each for each in acl_lines("n", "fresh", "setuser") if "fresh_viewer" in each]
    redis_client.execute_command(line)
    path = redis_url.removeprefix("unix://")
    try:
        with redis.Redis.from_url(f"unix://fresh_viewer:@{path}") as client, pytest.raises(redis.AuthenticationError):
            client.execute_command("AUTH", "fresh_viewer", "")
    finally:
        redis_client.execute_command("ACL", "DELUSER", "fresh_viewer")


def test_the_file_is_one_that_redis_loads(tmp_path: Path, programs: Programs) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user default on nopass ~* &* +@all\n")
    with users.open("a") as file:
        file.writelines(f"{line} >secret\n" for line in acl_lines("shop", "shop", "file"))
    server = EmbeddedRedis(tmp_path / "redis", settings={"aclfile": str(users)}, binary=programs.redis)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            names = {str(name, "ascii") for name in client.execute_command("ACL", "USERS")}
    finally:
        server.remove()

    assert names == {"default", "shop_admin", *(f"shop_{user}" for user in COMMANDS)}


class KeptRedis(EmbeddedRedis):
    """A server whose configuration file is its own: what it rewrites there outlives a restart."""

    def _command(self, sockets: Path) -> Sequence[str | Path]:
        file = self.directory / "redis.conf"
        kept = file.read_text() if file.exists() else None
        command = super()._command(sockets)
        if kept is not None:
            file.write_text(kept)
        return command

    def _is_ready(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.ConnectionError:
                return False


class FilelessRedis(EmbeddedRedis):
    """A server with its settings as arguments, as a container has it."""

    def _command(self, sockets: Path) -> Sequence[str | Path]:
        binary, file = super()._command(sockets)
        words = Path(file).read_text().split()
        lines = zip(words[::2], words[1::2], strict=True)
        return [binary, *(each for name, value in lines for each in (f"--{name}", value.strip('"')))]


def find(connection: Connection, client: redis.Redis) -> CheckResult:
    [result] = [each for each in diagnose(Store(connection), client) if each.check == "users"]
    return result


@pytest.mark.parametrize("where", ["aclfile", "redis.conf"])
def test_users_that_were_saved_outlive_a_restart(
    where: str, tmp_path: Path, programs: Programs, bare: CommandLine, connection: Connection
) -> None:
    """With the default user off, the administrator may still log in."""
    (tmp_path / "users.acl").touch()
    settings = {"aclfile": str(tmp_path / "users.acl")} if where == "aclfile" else {}
    server = KeptRedis(tmp_path / "redis", settings=settings, binary=programs.redis)
    server.start()
    try:
        path = server.url.removeprefix("unix://")
        admin = f"unix://penstock_admin:secret@{path}"
        with redis.Redis.from_url(server.url) as client:
            for line in acl_lines("penstock", "penstock", "setuser"):
                client.execute_command(f"{line} >secret")
            result = find(connection, client)
            assert (result.grade, "needs no password" in result.message) == ("warning", True)
        with redis.Redis.from_url(admin) as client:
            client.execute_command("ACL SETUSER default off")

        done = bare("init", "--roles", "--acl", "save", "--redis-url", admin)
        assert done.returncode == 0, done.stderr
        restart(server)

        with redis.Redis.from_url(admin) as client:
            assert sorted(find_users(client)) == [
                "default",
                "penstock_admin",
                *sorted(f"penstock_{user}" for user in COMMANDS),
            ]
            result = find(connection, client)
            assert (result.grade, "saved to" in result.message) == ("ok", True)
        with redis.Redis.from_url(server.url) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
    finally:
        server.remove()


def test_users_that_no_file_keeps_are_said_to_be_lost(
    tmp_path: Path, programs: Programs, bare: CommandLine, connection: Connection
) -> None:
    server = FilelessRedis(tmp_path / "redis", binary=programs.redis)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert find(connection, client).message == "the default user alone"
            client.execute_command(acl_lines("penstock", "penstock", "setuser")[0])
            result = find(connection, client)
        done = bare("init", "--roles", "--acl", "save", "--redis-url", server.url)
    finally:
        server.remove()

    assert (result.grade, result.message) == (
        "error",
        "Redis keeps 1 user in memory only: a restart loses them, and opens the default user",
    )
    assert done.returncode == 5
    assert "Redis keeps its users in memory only" in done.stderr


def test_the_users_of_a_cluster_are_saved_on_each_node(cluster: Cluster) -> None:
    with connect_redis(cluster.url) as client:
        assert len(save_users(client)) == len(cluster.nodes)


def test_the_users_work_on_a_cluster(cluster: Cluster, connection: Connection, database_url: str) -> None:
    things = Log("things", shards=4)
    flow = Pipeline([things])
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            for line in acl_lines("penstock", "penstock", "setuser"):
                client.execute_command(f"{line} >secret")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i % 4, 'k', 'a', 'o', '{}' FROM generate_series(0, 7) i"
    )
    address = cluster.url.rpartition("@")[2]

    with Streamer(flow, database_url, f"redis+cluster://penstock_streamer:secret@{address}") as streamer:
        streamer.drain()

    for user in ("consumer", "viewer"):
        with connect_redis(f"redis+cluster://penstock_{user}:secret@{address}") as client:
            found = extents(client, "penstock", things.shard_names)
            assert [extent.tail for extent in found.values()] == [2, 2, 2, 2]
            assert len(read_newest(client, "penstock", things.shard_names[3], 10)) == 2


@pytest.mark.parametrize(
    ("refusal", "grant"),
    [
        ("NOPERM User a_viewer has no permissions to run the 'info' command", "ACL SETUSER a_viewer +info"),
        ("NOPERM this user has no permissions to run the 'get' command or its subcommand", "ACL SETUSER a_viewer +get"),
        ("No permissions to access a key", "ACL SETUSER a_viewer ~shop:{*}:*"),
        (
            "The user executing the script can't run this command or subcommand",
            "the rules of a_viewer: penstock init --roles --acl setuser",
        ),
        ("OOM command not allowed", None),
    ],
)
def test_a_refusal_becomes_the_command_that_grants(refusal: str, grant: str | None) -> None:
    assert acl_grant(refusal, "shop", "a_viewer") == grant


def test_the_command_prints_the_users(bare: CommandLine) -> None:
    done = bare("init", "--roles", "--acl", "setuser", "--role-prefix", "shop")
    lines = done.stdout.splitlines()

    assert done.returncode == 0
    assert [line.split()[2] for line in lines] == ["shop_admin", *(f"shop_{u}" for u in COMMANDS)]
    assert "Redis keeps these users in memory" in done.stderr
    assert not any(">" in line or "nopass" in line for line in lines)


def test_a_namespace_that_is_a_pattern_is_refused() -> None:
    with pytest.raises(InvalidName, match="namespace"):
        acl_lines("*", "penstock", "file")
