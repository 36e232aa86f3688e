"""The users of a pipeline in Redis, and what each may do.

Each is limited to the commands that its work takes, and to the keys of the namespace.  Redis checks every command in a
script against the user that calls it, so the right to run scripts adds nothing.  The rules give no password: until an
administrator sets one, nobody can log in as the user.
"""

import re
from collections.abc import Mapping
from typing import Literal

from penstock.channels.server import RedisClient
from penstock.records import checked_schema

AclUser = Literal["owner", "streamer", "consumer", "viewer"]
"""A user without its prefix.  A producer needs none: staging does not go to Redis."""

AclFormat = Literal["setuser", "file"]
"""Commands for ``redis-cli``, or lines of the file that ``aclfile`` names."""

# `@connection` is what every client sends: HELLO, PING, SELECT.  `-@dangerous` takes back what it says of other clients.
_CONNECT = "+@connection -@dangerous +cluster|slots"
_SCRIPTS = "+evalsha +script|load"
_READ_LOG = "+get +exists +type +pttl +xinfo|stream +memory|usage +xread +xrange +xrevrange"
_READ_ICK = "+zcard +zrange +zrevrange +hget +hmget"
_READ_QUEUE = "+time +xlen +hexists +hlen +hkeys +hgetall +llen +zscore +zrank +zlexcount +zrangebylex +zrevrangebylex +zrangebyscore +hscan +zscan"
_READ_GROUP = "+zcount"
_READ = f"{_CONNECT} {_SCRIPTS} {_READ_LOG} {_READ_ICK} {_READ_QUEUE} {_READ_GROUP}"
_WRITE_ICK = "+set +setnx +del +zadd +zrem +zremrangebyrank +hset +hdel +hincrby"
_WRITE_QUEUE = "+xadd +xdel +hsetnx +zunionstore"
_WRITE_GROUP = "+lpush +blpop"
_STREAM = f"{_READ} {_WRITE_ICK} {_WRITE_QUEUE} {_WRITE_GROUP} +info +multi +exec +discard +xtrim"

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

# A consumer changes Icks, queues and groups, and only reads logs: `%R~`.  Redis asks for all rights on the keys of a script, whatever the
# script does: the selector in brackets gives them to the call alone, and not to the commands in it.  Both since Redis 7.
# A viewer has no command that writes.
_KEYS: Mapping[AclUser, str] = {
    "owner": "~{namespace}:{{*}}:*",
    "streamer": "~{namespace}:{{*}}:*",
    "consumer": "clearselectors (~{namespace}:{{*}}:* +evalsha) %R~{namespace}:{{*}}:log* %R~{namespace}:{{*}}:epoch "
    "%R~{namespace}:{{*}}:epoch-ends ~{namespace}:{{*}}:group:* "
    "~{namespace}:{{*}}:progress ~{namespace}:{{*}}:ick* ~{namespace}:{{*}}:q-* ~{namespace}:{{*}}:s*",
    "viewer": "~{namespace}:{{*}}:*",
}


def acl_rules(user: AclUser, namespace: str) -> str:
    """The rules of a user, without a password: what it may do, whatever it could do before.

    Raises:
        InvalidName: The namespace is not valid.
    """
    keys = _KEYS[user].format(namespace=checked_schema(namespace, "namespace"))
    return f"on resetkeys resetchannels -@all {keys} {COMMANDS[user]}"


def acl_grant(refusal: str, namespace: str, user: str) -> str | None:
    """The command that gives a user what Redis has refused it for; None if the text says nothing of rights.

    Args:
        refusal: Text of the error: ``NOPERM User x has no permissions to run the 'info' command``.
        namespace: Of the pipeline.
        user: Name of the user, which not every release puts into the text.
    """
    if not _REFUSAL.search(refusal):
        return None
    if "run this command" in refusal:  # Redis 7.0 does not say which
        return f"the rules of {user}: penstock init --roles --acl setuser"
    refused = re.search(r"run the '([^']+)' command", refusal)
    rule = f"+{refused[1]}" if refused else f"~{namespace}:{{*}}:*"
    return f"ACL SETUSER {user} {rule}"


def get_user(client: RedisClient) -> str:
    """The user that a client logs in as."""
    pool = getattr(client, "connection_pool", None)
    options = getattr(pool, "connection_kwargs", {}) or getattr(client, "connection_kwargs", {})
    return options.get("username") or "default"


def acl_lines(namespace: str, prefix: str, form: AclFormat) -> list[str]:
    """A line for each user.

    Args:
        namespace: Of the pipeline.
        prefix: First part of the users' names.
        form: ``setuser`` keeps the passwords that the users have; in a ``file``, add ``>password`` to each line.

    Raises:
        InvalidName: The namespace or the prefix is not valid.
    """
    checked_schema(prefix, "role prefix")
    verb = "ACL SETUSER" if form == "setuser" else "user"
    return [f"{verb} {prefix}_{user} {acl_rules(user, namespace)}" for user in COMMANDS]
