"""The users of a pipeline in Redis, and what each may do.

Each is limited to the commands that its work takes, and to the keys of the namespace.  Redis checks
every command in a script against the user that calls it, so the right to run scripts adds nothing.
The rules give no password: until an administrator sets one, nobody can log in as the user.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import redis

from penstock.channels.commands import RedisClient
from penstock.channels.server import redis_errors
from penstock.errors import UnsafeSetting
from penstock.records import checked_schema

AclUser = Literal["owner", "streamer", "consumer", "viewer"]
"""A user without its prefix.  A producer needs none: staging does not use Redis."""

AclFormat = Literal["setuser", "file"]
"""Commands for ``redis-cli``, or lines of the file that ``aclfile`` names."""

# `@connection` is what every client sends: HELLO, PING, SELECT.  `-@dangerous` takes back what it
# says of other clients.
_CONNECT = "+@connection -@dangerous +cluster|slots"
_SCRIPTS = "+evalsha +script|load"
_READ_LOG = "+get +exists +type +pttl +xinfo|stream +memory|usage +xread +xrange +xrevrange"
_READ_ICK = "+zcard +zrange +zrevrange +hget +hmget"
_READ_QUEUE = (
    "+time +xlen +hexists +hlen +hkeys +hgetall +llen +zscore +zrank +zlexcount +zrangebylex "
    "+zrevrangebylex +zrangebyscore +hscan +zscan"
)
_READ_GROUP = "+zcount"
_READ = f"{_CONNECT} {_SCRIPTS} {_READ_LOG} {_READ_ICK} {_READ_QUEUE} {_READ_GROUP}"
_WRITE_ICK = "+set +setnx +del +zadd +zrem +zremrangebyrank +hset +hdel +hincrby"
_WRITE_QUEUE = "+xadd +xdel +hsetnx +zunionstore"
_WRITE_GROUP = "+lpush +blpop"
_STREAM = f"{_READ} {_WRITE_ICK} {_WRITE_QUEUE} {_WRITE_GROUP} +info +multi +exec +discard +xtrim"

ADMINISTRATOR = "admin"
"""The user, without its prefix, that may do everything: once the default user is off, nobody else
may change users."""

SAVE = "penstock init --roles --acl save"

_REFUSAL = re.compile(
    "NOPERM|no permissions|ACL failure|user executing the script can't", re.IGNORECASE
)

COMMANDS: Mapping[AclUser, str] = {
    "owner": f"{_STREAM} +rename +persist",
    "streamer": _STREAM,
    "consumer": f"{_READ} {_WRITE_ICK} {_WRITE_QUEUE} {_WRITE_GROUP}",
    "viewer": f"{_READ} +info",
}
"""The commands of each user, as rules of an ACL."""

# A consumer changes Icks, queues and groups, and only reads logs: `%R~`.  Redis asks for all rights
# on the keys of a script, whatever the script does: the selector in brackets gives them to the call
# alone, and not to the commands in it.  Both since Redis 7.  A viewer has no command that writes.
_KEYS: Mapping[AclUser, str] = {
    "owner": "~{namespace}:{{*}}:*",
    "streamer": "~{namespace}:{{*}}:*",
    "consumer": "clearselectors (~{namespace}:{{*}}:* +evalsha) %R~{namespace}:{{*}}:log* "
    "%R~{namespace}:{{*}}:epoch %R~{namespace}:{{*}}:epoch-ends ~{namespace}:{{*}}:group:* "
    "~{namespace}:{{*}}:progress ~{namespace}:{{*}}:ick* ~{namespace}:{{*}}:q-* "
    "~{namespace}:{{*}}:s*",
    "viewer": "~{namespace}:{{*}}:*",
}


def acl_rules(user: AclUser, namespace: str) -> str:
    """Returns the rules of a user, without a password; they replace all its earlier rights.

    Raises ``InvalidName``.
    """
    keys = _KEYS[user].format(namespace=checked_schema(namespace, "namespace"))
    return f"on resetkeys resetchannels -@all {keys} {COMMANDS[user]}"


def acl_grant(refusal: str, namespace: str, user: str) -> str | None:
    """Returns the command that grants what Redis refused; None if the text is not about rights.

    ``refusal`` is the error's text, such as ``NOPERM User x has no permissions to run the 'info'
    command``; not every release puts the user into it.
    """
    if not _REFUSAL.search(refusal):
        return None
    if "run this command" in refusal:  # Redis 7.0 does not say which
        return f"the rules of {user}: penstock init --roles --acl setuser"
    refused = re.search(r"run the '([^']+)' command", refusal)
    rule = f"+{refused[1]}" if refused else f"~{namespace}:{{*}}:*"
    return f"ACL SETUSER {user} {rule}"


def get_user(client: RedisClient) -> str:
    """Returns the user that a client logs in as."""
    pool = getattr(client, "connection_pool", None)
    options = getattr(pool, "connection_kwargs", {}) or getattr(client, "connection_kwargs", {})
    return options.get("username") or "default"


def acl_lines(namespace: str, prefix: str, form: AclFormat) -> list[str]:
    """Returns a line for each user, the administrator first.  Raises ``InvalidName``.

    ``prefix`` begins their names.  In the form ``setuser`` they keep their passwords; in a
    ``file``, add ``>password`` to each line.
    """
    checked_schema(prefix, "role prefix")
    verb = "ACL SETUSER" if form == "setuser" else "user"
    rules = {ADMINISTRATOR: "on ~* &* +@all"} | {
        user: acl_rules(user, namespace) for user in COMMANDS
    }
    return [f"{verb} {prefix}_{user} {rule}" for user, rule in rules.items()]


def find_users(client: RedisClient) -> dict[str, str]:
    """Returns the rules of each user, as ``ACL LIST`` shows them, with hashes of passwords.

    On a Cluster they are those of one node. Raises ``redis.ResponseError``.
    """
    [server, *_] = _servers(client)
    lines = [line if isinstance(line, str) else line.decode() for line in server.acl_list()]
    return {line.split()[1]: line for line in lines}


def find_users_file(client: RedisClient) -> str:
    """Returns the file to which a server can save its users; empty if there is none.

    Raises ``redis.ResponseError``.
    """
    [server, *_] = _servers(client)
    return _acl_file(server) or str(server.info("server").get("config_file", ""))


def _acl_file(server: Any) -> str:
    return str(server.config_get("aclfile").get("aclfile", ""))


def save_users(client: RedisClient) -> list[str]:
    """Saves the users of a server, or of each node of a Cluster; returns the files.

    Raises ``UnsafeSetting``, ``ServerUnavailable`` or ``AppendRefused``.
    """
    saved = []
    for server in _servers(client):
        with redis_errors("saving the users of Redis"):
            path = find_users_file(server)
            if not path:
                raise UnsafeSetting(
                    "Redis keeps its users in memory only: it has neither an ACL file nor a "
                    "configuration file. Its next restart "
                    "loses them, and opens the default user to everybody, without a password. "
                    "Start it with a file, such as "
                    "redis-server /etc/redis/redis.conf or --aclfile /data/users.acl, make the "
                    f"users again, then: {SAVE}"
                )
            server.execute_command("ACL SAVE" if _acl_file(server) else "CONFIG REWRITE")
        saved.append(path)
    return saved


def _servers(client: RedisClient) -> list[Any]:
    """Returns the server, or the nodes of a Cluster."""
    if not isinstance(client, redis.RedisCluster):
        return [client]
    cluster: Any = client
    return [cluster.get_redis_connection(node) for node in cluster.get_nodes()]
